"""When a step that does not end is a hang. Pure.

A step may take ``factor`` times its usual time, and ``min_s`` at least. What a program does beside its steps may take
longer: starting, restoring, the first step, which compiles, and evaluations, whose length nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HangRule:
    """How long nothing may happen.

    Attributes:
        factor: usual times of a step; 0 never calls anything a hang.
        min_s: least time of a step that is called a hang, seconds.
        long_s: the same for what is no usual step, seconds.
    """

    factor: float
    min_s: float
    long_s: float

    @property
    def watches(self) -> bool:
        """Whether anything is ever called a hang."""
        return self.factor > 0

    def limit_s(self, usual_s: float | None, *, long: bool) -> float:
        """How long nothing may happen now, seconds.

        Args:
            usual_s: time of a step, None while it is not known.
            long: whether what happens may take longer than a step.
        """
        step_s = max(self.min_s, self.factor * (usual_s or 0.0))
        return max(step_s, self.long_s) if long or usual_s is None else step_s

    def option(self, usual_s: float | None, *, long: bool) -> str:
        """The option that the limit comes from, with its value."""
        limit_s = self.limit_s(usual_s, long=long)
        if limit_s == self.long_s and (long or usual_s is None):
            return f"--elastic.hang-long-s {self.long_s:g}"
        if limit_s == self.min_s:
            return f"--elastic.hang-min-s {self.min_s:g}"
        return f"--elastic.hang-factor {self.factor:g}"

    @property
    def tick_s(self) -> float:
        """How often to look, seconds: often beside the least limit, and not for nothing."""
        return min(10.0, max(0.25, self.min_s / 20))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The last sign of life of a run, as the tracker tells it.

    Attributes:
        generation: of the attempt.
        step: that was told last.
        stepped: whether the attempt has told a step.
        since_s: when it was first seen, by the clock of whoever looks, seconds.
    """

    generation: int
    step: int
    stepped: bool
    since_s: float

    def seen(self, generation: int, step: int, stepped: bool, now_s: float) -> Pulse:
        """The pulse after a look: this one when nothing has happened."""
        if (generation, step, stepped) == (self.generation, self.step, self.stepped):
            return self
        return Pulse(generation=generation, step=step, stepped=stepped, since_s=now_s)
