"""What the lines of executed steps tell: where a run stands, its losses, and what was done twice."""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

from ray_ckpt.view.curve import Curve


@dataclass(kw_only=True, slots=True)
class Life:
    """Steps of one attempt.

    Attributes:
        first_step: that it executed.
        last_step: that it executed.
        last_time: end of its last step, seconds since the epoch; None when lines do not tell.
        new_time: end of its first step that no attempt had executed before; None when there is none.
        redone_s: time of the steps that had been executed before, seconds.
    """

    first_step: int
    last_step: int
    last_time: float | None = None
    new_time: float | None = None
    redone_s: float = 0.0


class Track:
    """A fold over ``steps.jsonl``. The last line of a step counts; memory is 24 bytes a step.

    Attributes:
        ahead: the newest line of all while those before it are still being read; None when all are.
    """

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        self.last: dict[str, Any] = {}
        self.ahead: dict[str, Any] | None = None
        self.best_step = 0
        self.executed_s = 0.0
        self.lines = 0
        self.curve = Curve()
        self._steps, self._losses, self._useful_s = array("q"), array("d"), array("d")

    @property
    def newest(self) -> dict[str, Any]:
        """The newest line; empty before the first."""
        return self.last if self.ahead is None else self.ahead

    def has_steps_of(self, generation: int) -> bool:
        """Whether an attempt has made a step."""
        return generation in self.lives or self.newest.get("generation") == generation

    @property
    def useful_s(self) -> float:
        """Time of the steps that the run stands on, each counted once, seconds."""
        return self._useful_s[-1] if self._useful_s else 0.0

    def useful_until(self, step: int) -> float:
        """The same of the steps up to one, seconds: what comes after it may be lost and not yet done again."""
        count = bisect_right(self._steps, step)
        return self._useful_s[count - 1] if count else 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Takes one line; one that says less than it should is passed over."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            step, generation = int(line["step"]), int(line["generation"])
            loss = float("nan") if line["loss"] is None else float(line["loss"])
            took_s = max(0.0, float(line["step_time_s"]))
            self._add(step, generation, loss, took_s, line)

    def _add(
        self, step: int, generation: int, loss: float, took_s: float, line: dict[str, Any]
    ) -> None:
        if self._steps and step <= self._steps[-1]:
            self._rewind(step)
        self._steps.append(step)
        self._losses.append(loss)
        self._useful_s.append(self.useful_s + took_s)
        self.curve.add(step, loss)
        self.executed_s += took_s
        self.lines += 1
        time = line.get("time")
        time_s = float(time) if isinstance(time, int | float) else None
        life = self.lives.get(generation)
        if life is None:
            life = self.lives[generation] = Life(first_step=step, last_step=step)
        life.last_step, life.last_time = step, time_s or life.last_time
        if step <= self.best_step:
            life.redone_s += took_s
        else:
            self.best_step = step
            if life.new_time is None:
                life.new_time = time_s
        self.last = line

    def _rewind(self, step: int) -> None:
        kept = bisect_left(self._steps, step)
        for column in (self._steps, self._losses, self._useful_s):
            del column[kept:]
        again = bisect_left(self._steps, self.curve.rewind(step))
        for old, loss in zip(self._steps[again:], self._losses[again:], strict=True):
            self.curve.add(old, loss)
