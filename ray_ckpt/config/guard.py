"""Options of what may be committed: ``--guard``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tyro.conf import UseAppendAction

from ray_ckpt.checkpoint.guard import FEW_SAVES, GuardRule, OnNonfinite
from ray_ckpt.config.checks import at_least, one_of
from ray_ckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What a checkpoint must be to be committed, and what a run does that is no longer finite."""

    on_nonfinite: OnNonfinite = "stop"
    """A loss, gradient norm or state that is not finite: stop the run and say so (nothing is lost, and nobody decides
    for you); go back to a checkpoint from before and try again; go back and leave out the global batches that led
    there; or train on, without commits until the state is finite. With a gradient scaler only the state counts."""
    max_rollbacks: int = 2
    """Rollbacks in a row; then the run stops. Each goes one checkpoint further back than the one before."""
    band_factor: float = 4.0
    """Refuse a checkpoint whose parameter norm is so many times more or less than at the last saves; 0 for any."""
    band_saves: int = 8
    """Saves that make up the band."""
    ignore: UseAppendAction[tuple[str, ...]] = ()
    """First parts of names of tensors that may hold anything, such as model.mask; repeatable."""

    def __post_init__(self) -> None:
        one_of(OnNonfinite, "--guard.on-nonfinite", self.on_nonfinite)
        at_least(1, "--guard.max-rollbacks", self.max_rollbacks)
        at_least(FEW_SAVES, "--guard.band-saves", self.band_saves)
        if self.band_factor != 0 and not 1 < self.band_factor < math.inf:
            raise ConfigError(
                f"--guard.band-factor {self.band_factor}: must be more than 1, and finite; 0 turns the band off"
            )
        for name in self.ignore:
            if not name.strip("."):
                raise ConfigError(
                    f"--guard.ignore {name!r}: an empty name would ignore nothing; give the name of a tensor, as "
                    "the finding has it, or the first parts of it"
                )

    def rule(self) -> GuardRule:
        """What the tracker goes by."""
        return GuardRule(
            band_factor=self.band_factor,
            band_saves=self.band_saves,
            on_nonfinite=self.on_nonfinite,
            max_rollbacks=self.max_rollbacks,
        )
