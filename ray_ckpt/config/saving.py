"""Options of making saves: ``--saving``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import UseAppendAction

from ray_ckpt.config.checks import at_least, more_than_0, one_of
from ray_ckpt.errors import ConfigError

StagingMode = Literal["blocking", "overlapped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingConfig:
    """How saves are made."""

    timeout_s: float = 600.0
    """Longest wait for a save in flight when the run ends, and for a worker that does not answer, seconds."""
    final_tries: int = 3
    """Times the last save of a run is tried before the run is called failed."""
    staging: StagingMode = "blocking"
    """Training stands still for the copy, or only the optimizer's next step waits for it (overlapped)."""
    report_to_ray: bool = True
    """Tell Ray Train of each commit, so that Result.checkpoint and get_checkpoint() know it."""
    allow_missing: UseAppendAction[tuple[str, ...]] = ()
    """Item (ema) or first parts of tensor names (model.head) that only the run or the checkpoint has; repeatable."""

    def __post_init__(self) -> None:
        more_than_0("--saving.timeout-s", self.timeout_s, " s")
        at_least(1, "--saving.final-tries", self.final_tries)
        one_of(StagingMode, "--saving.staging", self.staging)
        for name in self.allow_missing:
            if not name.strip("."):
                raise ConfigError(
                    f"--saving.allow-missing {name!r}: an empty name would allow nothing; give the name of an item "
                    "or tensor, as the error that asked for it has it"
                )
