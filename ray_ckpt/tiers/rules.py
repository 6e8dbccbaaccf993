"""The rules of retention that a run goes by, as they are recorded in its journal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ray_ckpt.tiers.retention import (
    KeepAll,
    KeepBest,
    KeepEverySeconds,
    KeepEverySteps,
    KeepNewest,
    KeepPolicy,
    KeepSteps,
    Mode,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Which checkpoints are kept; a rule of 0 is off. By default nothing is deleted.

    Attributes:
        keep_newest: so many of the newest; 0 keeps every checkpoint, whatever the other rules say.
        keep_every_steps: the first of every so many steps.
        keep_every_s: one per so many seconds.
        keep_best: so many of the best.
        metric: what makes one the best.
        mode: whether the lowest or the highest value of it is best.
        keep_steps: those of certain steps.
        quarantined: how many quarantined ones stay as evidence.
        grace_s: how long files that were never committed stay after the last of them was written, seconds.
    """

    keep_newest: int = 0
    keep_every_steps: int = 0
    keep_every_s: float = 0.0
    keep_best: int = 0
    metric: str = "loss"
    mode: Mode = "min"
    keep_steps: tuple[int, ...] = ()
    quarantined: int = 3
    grace_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("keep_newest", "keep_every_steps", "keep_best"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_option(name)} {getattr(self, name)}: must be 0 or more")
        for name in ("keep_every_s", "grace_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{_option(name)} {getattr(self, name)}: must be 0 or more seconds, and finite"
                )
        if self.quarantined < 1:
            raise ValueError(
                f"--retention.quarantined {self.quarantined}: must be at least 1, what was found bad last is "
                "evidence"
            )
        if self.mode not in ("min", "max"):
            raise ValueError(f"--retention.mode {self.mode!r}: must be one of min, max")
        if self.keep_best and not self.metric.strip():
            raise ValueError(
                f"--retention.metric {self.metric!r}: name a metric of the checkpoints, such as loss"
            )
        if any(step < 0 for step in self.keep_steps):
            raise ValueError(f"--retention.keep-steps {self.keep_steps}: steps are 0 or more")

    def policies(self) -> tuple[KeepPolicy, ...]:
        """What to compose with "any of"."""
        if not self.keep_newest:
            return (KeepAll("every one (--retention.keep-newest 0)"),)
        policies: list[KeepPolicy] = [KeepNewest(self.keep_newest)]
        if self.keep_every_steps:
            policies.append(KeepEverySteps(self.keep_every_steps))
        if self.keep_every_s:
            policies.append(KeepEverySeconds(self.keep_every_s))
        if self.keep_best:
            policies.append(KeepBest(self.metric, self.keep_best, self.mode))
        if self.keep_steps:
            policies.append(KeepSteps(self.keep_steps))
        return tuple(policies)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {**asdict(self), "keep_steps": list(self.keep_steps)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Rules:
        """The rules of a journal; those of later versions are left alone, missing ones have their default.

        Raises:
            ValueError: a value is no such rule.
        """
        known = {
            field.name: document[field.name] for field in fields(cls) if field.name in document
        }
        try:
            if "keep_steps" in known:
                known["keep_steps"] = tuple(int(step) for step in known["keep_steps"])
            return cls(**known)
        except TypeError as error:
            raise ValueError(
                f"the rules of retention {document!r} cannot be read ({error})"
            ) from error


def _option(name: str) -> str:
    return f"--retention.{name.replace('_', '-')}"
