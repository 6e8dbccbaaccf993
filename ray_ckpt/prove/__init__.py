"""Proves that a resumed run is the run that was never interrupted.

An uninterrupted reference, and a run to which a script of events happens, are compared step by step: samples, learning
rate, random numbers, loss, and at the end the digests of model, optimizer and scheduler. In exact mode they must be
the same bits, whatever the number of workers. In default mode they must be the same bits on the same number of
workers; on another number the loss must stay within a tolerance that is measured, between uninterrupted runs at the
smallest and the largest world of the script.

::

    report = prove(config, train, script="4x10 kill 2x7 kill 3x5")
    assert report.identical, report.text()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.config import Config
from ray_ckpt.errors import ConfigError, RayCkptError
from ray_ckpt.facts import versions
from ray_ckpt.prove.compare import (
    EXACT_KEYS,
    LOOSE_KEYS,
    Difference,
    compare_states,
    compare_steps,
    loss_noise,
)
from ray_ckpt.prove.plant import SHOWS
from ray_ckpt.prove.processes import run_phases
from ray_ckpt.prove.script import Phase, Script, parse_script
from ray_ckpt.view.summary import surviving_steps

C = TypeVar("C", bound=Config)
Runner = Callable[[Any, Callable[[Any], None], Script, str], None]

# Runs at two world sizes drift apart slowly; one more world size may be a little further off than those measured.
NOISE_FACTOR = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Outcome of a proof.

    Attributes:
        identical: whether no difference was found.
        exact: whether exact mode was proved.
        script: what happened.
        fault: planted on purpose; empty for none.
        resumes: steps from which the run was resumed.
        tolerance: of the loss; 0 means the same bits.
        differences: by step, in the order in which they show.
        versions: of the libraries.
    """

    identical: bool
    exact: bool
    script: str
    fault: str
    resumes: tuple[int, ...]
    tolerance: float
    differences: tuple[Difference, ...]
    versions: dict[str, str]

    @property
    def first(self) -> Difference | None:
        """The first difference."""
        return self.differences[0] if self.differences else None

    @property
    def fault_found(self) -> bool:
        """Whether the planted fault was found in its own quantity, and as soon as it can show."""
        what, within = SHOWS[self.fault]
        first = self.first
        if first is None or not self.resumes:
            return False
        of_its_own = [d.step for d in self.differences if d.what == what]
        in_time = self.resumes[0] < first.step <= self.resumes[0] + within
        return in_time and bool(of_its_own) and of_its_own[0] == first.step

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        mode = "exact mode" if self.exact else "default mode"
        lines = [
            f"{mode}, script {self.script}, resumed at steps {', '.join(map(str, self.resumes))}"
        ]
        if self.fault:
            found = "found" if self.fault_found else "NOT FOUND"
            lines.append(
                f"planted fault {self.fault}: {found} in {SHOWS[self.fault][0]} where it must show"
            )
        if self.first is None:
            how = "the same bits" if not self.tolerance else f"losses within {self.tolerance:.3g}"
            lines.append(f"IDENTICAL: every step and the state after the last one ({how})")
        else:
            d = self.first
            lines.append(
                f"DIFFERENT: first at step {d.step}, in {d.what}: {d.reference!r} in the uninterrupted run, "
                f"{d.found!r} here; {len(self.differences)} differences in all"
            )
        return "\n".join(lines)


def prove(
    config: C,
    train: Callable[[C], None],
    *,
    script: str | Script,
    fault: str = "",
    runner: Runner = run_phases,
    reuse: bool = False,
) -> Report:
    """Compares a run to which a script happens with one that is left alone.

    Args:
        config: of both runs; ``config.storage`` is where they are made, and must not hold runs of these names.
        train: the training function; calls ``attach``, ``restore``, ``batches``, ``step_end``, ``close``.
        script: what happens.
        fault: a fault to plant in the resumed attempts (a negative control); it must be found.
        runner: how a script is run; the default uses plain processes on this machine.
        reuse: take an uninterrupted run that an earlier proof of the same script left in ``config.storage``.

    Raises:
        ConfigError: a script that the configuration cannot run, or a folder in use.
        RayCkptError: a run failed.
    """
    script = parse_script(script) if isinstance(script, str) else script
    most = config.global_batch // config.micro_batch
    if max(script.worlds) > most:
        raise ConfigError(f"--script {script}: at most {most} workers can share the global batch")
    config = replace(config, steps=script.steps, workers=f"1:{max(script.worlds)}")
    same_world = len(set(script.worlds)) == 1
    references = [script.worlds[0]]
    if not config.exact and not same_world:
        references = [min(script.worlds), max(script.worlds)]
    whole = [_alone(config, train, world, runner, reuse) for world in references]
    broken = _fresh(config, f"proof-{fault}" if fault else "proof")
    runner(broken, train, script, fault)
    keys = EXACT_KEYS if config.exact or same_world else LOOSE_KEYS
    tolerance = 0.0 if keys is EXACT_KEYS else NOISE_FACTOR * loss_noise([c.run_dir for c in whole])
    differences = compare_steps(
        surviving_steps(whole[0].run_dir), surviving_steps(broken.run_dir), keys, tolerance
    )
    if keys is EXACT_KEYS:
        states = [final_state(c.run_dir, script.steps) for c in (whole[0], broken)]
        differences += compare_states(script.steps, *states)
    return Report(
        identical=not differences,
        exact=config.exact,
        script=str(script),
        fault=fault,
        resumes=resumes(broken.run_dir),
        tolerance=tolerance,
        differences=tuple(differences),
        versions=versions(),
    )


def final_state(run_dir: Path, step: int) -> dict[str, str]:
    """Digests of the parts of a run's newest checkpoint, which must be of ``step``."""
    from ray_ckpt.checkpoint.digest import checkpoint_digest

    newest = next(iter(usable(list_checkpoints(run_dir))), None)
    if newest is None or newest.manifest is None or newest.step != step:
        raise RayCkptError(f"{run_dir} has no checkpoint of its last step {step}")
    return checkpoint_digest(newest.folder, newest.manifest)


def resumes(run_dir: Path) -> tuple[int, ...]:
    """Steps from which a run was resumed."""
    from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines

    events = read_lines(run_dir / JOURNAL_NAME)
    return tuple(e["step"] for e in events if e["event"] == "restored" and e["source"])


def _alone(config: C, train: Callable[[C], None], world: int, runner: Runner, reuse: bool) -> C:
    reference = replace(config, run=f"reference-{world}")
    if reuse and len(surviving_steps(reference.run_dir)) == config.steps:
        return reference
    reference = _fresh(config, reference.run)
    runner(reference, train, Script(phases=(Phase(world=world, steps=config.steps, event=""),)), "")
    return reference


def _fresh(config: C, run: str) -> C:
    fresh = replace(config, run=run)
    if fresh.run_dir.exists():
        raise ConfigError(
            f"{fresh.run_dir} exists: a proof makes new runs; remove it, or name another --storage"
        )
    return fresh
