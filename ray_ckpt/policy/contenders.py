"""Policies of saving that are played against each other: habits, what a run does, and one that knows the truth.

The one that learns is the code of a run: the belief of :mod:`ray_ckpt.policy.failures`, the plan of
:mod:`ray_ckpt.policy.tiers`. It is told what a run would have seen. In two things it is told less than a run keeps:
failures come to it in the shares that their kinds have, and time at several sizes as if it had passed at their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from ray_ckpt.policy.belief import ScalePrior, Seen
from ray_ckpt.policy.failures import FailureModel
from ray_ckpt.policy.interval import young
from ray_ckpt.policy.limits import IntervalLimits
from ray_ckpt.policy.setting import Floats, Ints, Setting, shared_out
from ray_ckpt.policy.tiers import plan_intervals

# Exposure, size and rates are told to a policy in steps of this share: beliefs that near are the same decision.
GRAIN = 0.02
_FINE_GRAIN = GRAIN / 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What runs have seen: arrays of [runs].

    Attributes:
        failures: how many.
        exposure_s: time in which they could come, seconds.
        mean_workers: of that time.
        workers: at present.
    """

    failures: Ints
    exposure_s: Floats
    mean_workers: Floats
    workers: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Plans:
    """When runs save.

    Attributes:
        unit_s: work between saves to the fastest tier, full-size seconds: [runs].
        times: saves of the fastest tier to one of each tier: [tiers, runs].
    """

    unit_s: Floats
    times: Ints


class Policy(Protocol):
    """When to save."""

    def plans(self, sight: Sight) -> Plans:
        """For runs that have seen so much."""
        ...


class Fixed:
    """Always the same time between saves.

    Args:
        setting: that it lives in.
        interval_s: seconds of steps, however many workers make them.
        times: saves to one of each tier; empty: each save to all tiers.
    """

    def __init__(self, setting: Setting, interval_s: float, times: Sequence[int] = ()) -> None:
        self._setting, self.interval_s = setting, interval_s
        self._times = np.array(times or [1] * len(setting.tiers), np.int64)[:, None]

    def plans(self, sight: Sight) -> Plans:
        return Plans(
            unit_s=self.interval_s * self._setting.speed(sight.workers),
            times=np.repeat(self._times, len(sight.workers), axis=1),
        )


class EverySteps(Fixed):
    """Always the same number of steps between saves, each of them to all tiers."""

    def __init__(self, setting: Setting, steps: int) -> None:
        super().__init__(setting, steps * setting.step_s)

    def plans(self, sight: Sight) -> Plans:
        plans = super().plans(sight)
        return replace(plans, unit_s=np.full(len(sight.workers), self.interval_s))


def young_fixed(setting: Setting, mtbf_s: float) -> Fixed:
    """Young's interval for a time between failures that somebody believes in, and that is never looked at again."""
    return Fixed(setting, max(young(setting.tiers[0].stall_s, mtbf_s), setting.step_s))


class _Planner:
    """Plans from the rates of failure by kind, with the planner of a run."""

    def __init__(self, setting: Setting, limits: IntervalLimits) -> None:
        self._setting, self._limits = setting, limits
        self._planned = lru_cache(maxsize=1 << 16)(self._plan)

    def steps(self, rates: Mapping[str, float], workers: int) -> tuple[int, ...]:
        """Steps between saves, by tier."""
        grains = tuple(
            round(math.log(rate) / _FINE_GRAIN) if rate else None for rate in rates.values()
        )
        return self._planned(tuple(rates), grains, workers)

    def _plan(
        self, kinds: tuple[str, ...], grains: tuple[int | None, ...], workers: int
    ) -> tuple[int, ...]:
        rates = {
            kind: 0.0 if grain is None else math.exp(grain * _FINE_GRAIN)
            for kind, grain in zip(kinds, grains, strict=True)
        }
        step_s = self._setting.step_s / float(self._setting.speed(workers))
        tiers = self._setting.costs(rates, workers)
        return plan_intervals(tiers, step_s, self._limits).every_steps


class Clairvoyant:
    """The best plan for the true rates, which nobody knows.

    Args:
        setting: with those rates.
        limits: of the intervals.
    """

    def __init__(self, setting: Setting, limits: IntervalLimits) -> None:
        self._setting = setting
        self._planner = _Planner(setting, limits)

    def plans(self, sight: Sight) -> Plans:
        return _each(sight.workers, self.steps, self._setting.step_s)

    def steps(self, workers: int) -> tuple[int, ...]:
        """Steps between saves with so many workers, by tier."""
        return self._planner.steps(self._setting.true_rates(workers), workers)


class Online:
    """What a run does: it believes in a prior, counts, and decides by the same code.

    Args:
        setting: with the costs as the run measures them; its rates are not looked at.
        prior: before anything was seen.
        limits: of the intervals.
    """

    def __init__(self, setting: Setting, prior: ScalePrior, limits: IntervalLimits) -> None:
        self._setting, self._prior = setting, prior
        self._planner = _Planner(setting, limits)
        self._decided = lru_cache(maxsize=1 << 18)(self._decide)

    def plans(self, sight: Sight) -> Plans:
        time = np.round(np.log(np.maximum(sight.exposure_s, 1.0)) / GRAIN).astype(np.int64)
        share = sight.mean_workers / self._setting.fleet.workers
        size = np.round(-np.log(np.maximum(share, 1e-4)) / GRAIN).astype(np.int64)
        # One number for all of it: 2^18 workers, 2^10 sizes, 2^12 times, 2^20 failures.
        key = ((sight.failures << 12 | time) << 10 | size) << 18 | sight.workers
        return _each(key, self._by_key, self._setting.step_s)

    def _by_key(self, key: int) -> tuple[int, ...]:
        failures, time, size = key >> 40, key >> 28 & 0xFFF, key >> 18 & 0x3FF
        return self._decided(failures, time, size, key & 0x3FFFF)

    def _decide(self, failures: int, time: int, size: int, workers: int) -> tuple[int, ...]:
        exposure_s = math.exp(time * GRAIN) if time else 0.0
        mean = max(1, round(self._setting.fleet.workers * math.exp(-size * GRAIN)))
        return self.steps(failures, exposure_s, mean, workers)

    def steps(
        self, failures: int, exposure_s: float, mean_workers: int, workers: int
    ) -> tuple[int, ...]:
        """Steps between saves, by tier, after so many failures in so much time."""
        counts = shared_out(failures, self._setting.shares)
        seen = Seen(world_size=mean_workers, exposure_s=exposure_s, failures=counts)
        return self._planner.steps(FailureModel(self._prior, [seen]).rates(workers), workers)


def _each(keys: Ints, steps: Callable[[int], tuple[int, ...]], step_s: float) -> Plans:
    """Plans of runs by a key each; most of them share one."""
    unique, where = np.unique(keys, return_inverse=True)
    every = np.array([steps(int(key)) for key in unique], np.int64).T
    every = every[:, where.reshape(-1)]
    return Plans(unit_s=every[0] * step_s, times=every // every[0])
