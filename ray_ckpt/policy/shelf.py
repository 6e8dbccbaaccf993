"""The checkpoints of many simulated runs, and what becomes of them in a stretch of steps and saves without a failure.

A stretch is periodic: a unit of work, the wait for the upload before, the stall. So how many saves were made after
any time, and which of them were usable in which tier, is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ckpt.policy.setting import Floats, Ints

_ROUNDING = 1e-9


class Shelf:
    """How far each run is, and which checkpoints it has: the newest usable one of each tier, and one in flight.

    Attributes:
        work_s: done on the surviving history, full-size seconds: [runs].
        steps_s: that its steps took, seconds: [runs].
        usable: work and step seconds of the newest usable checkpoint: [tiers, 2, runs].
        flying: the same of the one whose upload goes on: [tiers, 2, runs].
        landing_s: when that is over: [tiers, runs]; inf where none is in flight.
    """

    def __init__(self, uploads_s: Sequence[float], runs: int) -> None:
        self.uploads_s = uploads_s
        self.work_s, self.steps_s = np.zeros((2, runs))
        self.usable, self.flying = np.zeros((2, len(uploads_s), 2, runs))
        self.landing_s = np.full((len(uploads_s), runs), np.inf)

    def upload_left_s(self, now_s: Floats) -> Floats:
        """Seconds until the upload to the fastest tier is over; 0 where there is none."""
        left_s = self.landing_s[0] - now_s
        return np.where(np.isinf(left_s), 0.0, np.maximum(left_s, 0.0))

    def since_s(self, tier: int) -> Floats:
        """Work since the last checkpoint that went to a tier, full-size seconds."""
        flies = np.isfinite(self.landing_s[tier])
        return self.work_s - np.where(flies, self.flying[tier, 0], self.usable[tier, 0])

    def keep(self, who: NDArray[np.bool_]) -> None:
        """All that these runs have done is usable in the fastest tier."""
        self.usable[0, 0][who] = self.work_s[who]
        self.usable[0, 1][who] = self.steps_s[who]
        self.landing_s[0, who] = np.inf

    def fall_back(self, runs: Ints, needs: Ints, now_s: Floats) -> Floats:
        """Brings runs back to what a failure left; returns the seconds of steps that were lost.

        Args:
            runs: which: [n].
            needs: the fastest tier that outlived it: [n].
            now_s: when: [n].
        """
        landed = self.landing_s[:, runs] <= now_s
        kept = np.where(landed[:, None], self.flying[:, :, runs], self.usable[:, :, runs])
        self.landing_s[:, runs] = np.inf
        # Of what slower tiers hold, the newest: they may be ahead where a faster one is slow to become usable.
        newest = np.maximum.accumulate(kept[::-1])[::-1]
        back = newest[needs, :, np.arange(len(runs))].T
        lost_s = self.steps_s[runs] - back[1]
        self.work_s[runs], self.steps_s[runs] = back
        # What is restored is in the faster tiers again, or can be had again from where it came.
        faster = np.arange(len(self.uploads_s))[:, None] <= needs
        self.usable[:, :, runs] = np.where(faster[:, None], back, kept)
        return lost_s


class Stretch:
    """Units of work with a save after each.

    Args:
        shelf: that the saves go to.
        now_s: when it begins: [runs].
        unit_s: work between saves, full-size seconds: [runs].
        speed: full-size seconds of work in a second: [runs].
        times: saves of the fastest tier to one of each tier: [tiers, runs].
        stall_s: of a save.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        now_s: Floats,
        unit_s: Floats,
        speed: Floats,
        times: Ints,
        stall_s: float,
    ) -> None:
        self._shelf, self._now_s, self._unit_s, self._times = shelf, now_s, unit_s, times
        self._speed, self._stall_s = speed, stall_s
        self._work_s = unit_s / speed
        busy_s = np.maximum(self._work_s, shelf.uploads_s[0])
        self._first_busy_s = np.maximum(self._work_s, shelf.upload_left_s(now_s))
        self._early_s = busy_s - self._first_busy_s  # what the first cycle is shorter
        self._busy_s, self.cycle_s = busy_s, busy_s + stall_s

    def end_s(self, units: Floats) -> Floats:
        """When so many units are over, seconds from the beginning."""
        return np.where(units > 0, units * self.cycle_s - self._early_s, 0.0)

    def _units(self, passed_s: Floats) -> Floats:
        """How many are over after a time; fewer than 0 for a time before the beginning."""
        units = np.floor((passed_s + self._early_s) / self.cycle_s)
        # The last bit of the quotient must not hide the unit that this time is the end of.
        units += self.end_s(units + 1) <= passed_s
        return np.where(passed_s < 0, -1.0, units)

    def play(self, passed_s: Floats) -> Floats:
        """Brings the runs so much further; returns how long they stood still for saves, seconds."""
        units = self._units(passed_s)
        rest_s = np.maximum(passed_s - self.end_s(units), 0.0)
        part_s = np.minimum(rest_s, self._work_s)
        for tier in range(len(self._times)):
            self._save(tier, units, passed_s)
        steps_s = units * self._work_s + part_s
        self._shelf.steps_s += steps_s
        self._shelf.work_s += units * self._unit_s + part_s * self._speed
        return passed_s - steps_s

    def _save(self, tier: int, units: Floats, passed_s: Floats) -> None:
        """Which of the saves so far are in a tier, and which is on its way."""
        shelf, upload_s = self._shelf, self._shelf.uploads_s[tier]
        first, every = np.ones_like(units), np.ones_like(units)
        if tier:
            first, every = self._due(tier)
        made = _last(first, every, units)
        usable = _last(first, every, self._units(passed_s - upload_s))
        flies, landed = made > usable, shelf.landing_s[tier] <= self._now_s + passed_s
        here = np.stack([shelf.work_s, shelf.steps_s])
        unit = np.stack([self._unit_s, self._work_s])
        old = np.where(landed, shelf.flying[tier], shelf.usable[tier])
        shelf.usable[tier] = np.where(usable > 0, here + usable * unit, old)
        shelf.flying[tier] = np.where(flies, here + made * unit, shelf.flying[tier])
        landing_s = np.where(landed | (made > 0), np.inf, shelf.landing_s[tier])
        shelf.landing_s[tier] = np.where(
            flies, self._now_s + self.end_s(made) + upload_s, landing_s
        )

    def _due(self, tier: int) -> tuple[Floats, Floats]:
        """The first save that goes to a slower tier, counted from 1, and how many there are to the next."""
        shelf, upload_s = self._shelf, self._shelf.uploads_s[tier]
        left_s = shelf.landing_s[tier] - self._now_s
        left_s = np.where(np.isfinite(left_s), left_s, -np.inf)
        open_at = 1 + (left_s - self._first_busy_s) / self.cycle_s
        wanted = self._times[tier] - shelf.since_s(tier) / self._unit_s
        every = np.maximum(self._times[tier], 1 + (upload_s - self._busy_s) / self.cycle_s)
        first = np.maximum(1.0, np.ceil(np.maximum(wanted, open_at) - _ROUNDING))
        return first, np.ceil(every - _ROUNDING)


def _last(first: Floats, every: Floats, units: Floats) -> Floats:
    """The last one of first, first + every, and so on, that is not after ``units``; 0 if there is none."""
    return np.where(units < first, 0.0, first + np.floor((units - first) / every) * every)
