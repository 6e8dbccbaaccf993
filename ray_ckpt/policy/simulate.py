"""A run with failures, played through: what the formulas should say, without using one.

Training, saves, uploads in the background, failures at random times, restarts, event by event. Slow beside the
formulas, and an independent witness for them; also an answer for what they leave out, such as an upload that goes
on beyond the next save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from ray_ckpt.policy.tiers import TierCost


@dataclass(kw_only=True, slots=True)
class Account:
    """Where the time of a run went, seconds; the parts sum to the wall time.

    Attributes:
        useful_s: steps that counted.
        stall_s: standing still for saves, and for uploads that were not over at the next save.
        slowed_s: lost to uploads beside the steps.
        rework_s: steps that were lost to failures, at full speed.
        restart_s: restarts, those too that a failure ended.
        failures: how many.
    """

    useful_s: float = 0.0
    stall_s: float = 0.0
    slowed_s: float = 0.0
    rework_s: float = 0.0
    restart_s: float = 0.0
    failures: int = 0

    @property
    def wall_s(self) -> float:
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name.endswith("_s"))

    @property
    def waste(self) -> float:
        """Seconds lost for each useful one."""
        return self.wall_s / self.useful_s - 1


def simulate(
    tiers: Sequence[TierCost],
    every_steps: Sequence[int],
    step_s: float,
    useful_s: float,
    rng: np.random.Generator,
) -> Account:
    """Plays a run until it has done its work.

    A failure that needs a tier takes the checkpoints of all faster ones and the uploads in flight with it. The run
    must be able to get anywhere: an interval much longer than the time between failures takes for ever.

    Args:
        tiers: fastest first; times and rates are those of :class:`TierCost`.
        every_steps: steps between saves, by tier; each a multiple of the one before.
        step_s: time of a step, seconds.
        useful_s: work to be done, seconds of steps.
        rng: draws the failures.

    Raises:
        ValueError: steps that are no multiples.
    """
    if len(every_steps) != len(tiers) or not tiers or min(every_steps) < 1:
        raise ValueError(f"need steps of 1 or more for each of the {len(tiers)} tiers")
    if any(slow % fast for fast, slow in pairwise(every_steps)):
        raise ValueError(f"each tier's steps must be a multiple of the faster one's: {every_steps}")
    run = _Run(tiers, [n // every_steps[0] for n in every_steps], every_steps[0] * step_s, rng)
    while run.count * run.unit_s < useful_s:
        if not (run.compute() and run.save()):
            run.restart()
    run.account.useful_s = run.count * run.unit_s
    return run.account


class _Run:
    """State of a run; its work is counted in intervals of the fastest tier."""

    def __init__(
        self, tiers: Sequence[TierCost], times: list[int], unit_s: float, rng: np.random.Generator
    ) -> None:
        self.tiers, self.times, self.unit_s, self._rng = tiers, times, unit_s, rng
        self.account = Account()
        self.count = 0  # intervals done since the beginning of the run
        self._part_s = 0.0  # of the one that is being done
        self._usable = [0] * len(tiers)  # newest usable checkpoint of each tier
        self._uploads: dict[int, tuple[int, float]] = {}  # tier to checkpoint and seconds to go
        rates = np.array([tier.failures_per_s for tier in tiers])
        self._rate = float(rates.sum())
        self._shares = rates / self._rate if self._rate else rates
        self._left_s = self._draw()

    def _draw(self) -> float:
        return float(self._rng.exponential(1 / self._rate)) if self._rate else math.inf

    def _pass(self, wall_s: float) -> tuple[float, bool]:
        """Lets time pass; returns how much did, and whether a failure ended it."""
        passed_s = min(wall_s, self._left_s)
        failed = self._left_s < wall_s
        self._left_s -= passed_s
        if not self._uploads:
            return passed_s, not failed
        for k, (count, to_go_s) in list(self._uploads.items()):
            if to_go_s > passed_s + 1e-9:
                self._uploads[k] = count, to_go_s - passed_s
            else:
                self._usable[k] = count
                del self._uploads[k]
        return passed_s, not failed

    def compute(self) -> bool:
        """An interval of steps; False when a failure ended it."""
        while self._part_s < self.unit_s * (1 - 1e-12):
            speed, first_s = 1.0, math.inf
            if self._uploads:
                speed -= min(0.99, sum(self.tiers[k].slowdown for k in self._uploads))
                first_s = min(to_go_s for _, to_go_s in self._uploads.values())
            passed_s, whole = self._pass(min(first_s, (self.unit_s - self._part_s) / speed))
            self._part_s += passed_s * speed
            self.account.slowed_s += passed_s * (1 - speed)
            if not whole:
                return False
        self.count, self._part_s = self.count + 1, 0.0
        return True

    def save(self) -> bool:
        """A save to each tier whose turn it is; False when a failure came in between."""
        due = [k for k, times in enumerate(self.times) if self.count % times == 0]
        for k in due:
            while k in self._uploads:  # no two uploads to the same tier
                passed_s, whole = self._pass(self._uploads[k][1])
                self.account.stall_s += passed_s
                if not whole:
                    return False
        passed_s, whole = self._pass(sum(self.tiers[k].stall_s for k in due))
        self.account.stall_s += passed_s
        if whole:
            self._uploads.update({k: (self.count, self.tiers[k].upload_s) for k in due})
        return whole

    def restart(self) -> None:
        """Goes back to what the failure left, until a restart is not ended by another failure."""
        need, done = 0, False
        while not done:
            self.account.failures += 1
            self._left_s = self._draw()
            self._uploads.clear()
            need = max(need, int(self._rng.choice(len(self.tiers), p=self._shares)))
            passed_s, done = self._pass(self.tiers[need].restart_s)
            self.account.restart_s += passed_s
        back = self._usable[need]
        self.account.rework_s += (self.count - back) * self.unit_s + self._part_s
        self.count, self._part_s = back, 0.0
        # What was restored is in the faster tiers again, or can be had again from where it came.
        self._usable[:need] = [back] * need
