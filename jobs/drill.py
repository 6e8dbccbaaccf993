"""Restores the newest checkpoint of a run of the main job, and compares the loss with that of its commit.

    python jobs/drill.py --run mine                                        the newest one, once
    python jobs/drill.py --run mine --every-s 3600                         each hour, until the run is finished
    ray job submit --working-dir . -- python jobs/drill.py --run mine ...  on the cluster, beside the run

One process, no Ray: `ray job submit` only finds it a machine. The shape of the model, the batch and the seed are on
the run's record; give `--data`, if the run has other data than the default text. Exit codes: 0 all drills were ok,
1 a drill failed, 2 nothing to drill or wrong usage. `ray-ckpt drill RUN` does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain import PretrainConfig, train

import ray_ckpt
from ray_ckpt.commands.drill import print_result
from ray_ckpt.drill import DrillResult, drill
from ray_ckpt.drill.recorded import recorded_flags
from ray_ckpt.drill.schedule import drill_every, end_in_order
from ray_ckpt.errors import ConfigError
from ray_ckpt.options import parse, run_main


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillConfig(PretrainConfig):
    """Restores a checkpoint of a run, and compares the loss with that of its commit."""

    step: str = ""
    """Which checkpoint, such as 1200 or 1200-g3; the newest when empty."""
    every_s: float = 0.0
    """Look every so many seconds and drill the newest checkpoint if it was not; 0 drills once."""
    device: str = "cpu"
    """Where to restore to."""
    tolerance: float = -1.0
    """Relative difference of losses that is let pass; below 0 for that of the kinds of devices."""
    json: bool = False
    """Print JSON for scripts."""

    def __post_init__(self) -> None:
        # No super(): a dataclass with slots is another class than the one that is written here.
        PretrainConfig.__post_init__(self)
        if self.every_s < 0 or (self.every_s and self.step):
            raise ConfigError(
                "--every-s: a time of more than 0 s, without --step: it drills the newest checkpoint each time"
            )


def job(
    run_dir: Path, arguments: Sequence[str]
) -> tuple[DrillConfig, Callable[[PretrainConfig], None]]:
    """Options of a run, from its record and from arguments, and the training function."""
    place = ["--storage", str(run_dir.parent), "--run", run_dir.name]
    options = parse(DrillConfig, [*recorded_flags(run_dir), *arguments, *place])
    return ray_ckpt.resolve(options), train


def main() -> int:
    """Drills."""
    said = ray_ckpt.resolve(parse(DrillConfig))
    config, function = job(said.run_dir, sys.argv[1:])
    end_in_order()
    tolerance = config.tolerance if config.tolerance >= 0 else None

    def tell(result: DrillResult) -> None:
        print_result(result, as_json=config.json)

    if config.every_s:
        good = drill_every(
            config, function, config.every_s, tell, device=config.device, tolerance=tolerance
        )
        return 0 if good else 1
    result = drill(config, function, step=config.step, device=config.device, tolerance=tolerance)
    assert result is not None
    tell(result)
    return 0 if result.drilled.ok else 1


if __name__ == "__main__":
    run_main(main)
