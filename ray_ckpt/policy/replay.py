"""What a policy of saving would have cost over weeks of failures, for many runs at once.

The same code decides here as in a run (:mod:`ray_ckpt.policy.failures`, :mod:`ray_ckpt.policy.tiers`): a policy is
asked again after each failure, and after each stretch without one, and sees what a run would have seen. All runs go
through their failures side by side, as arrays, so that thousands of weeks take seconds; what happens inside a stretch
is arithmetic, and :mod:`ray_ckpt.policy.simulate` is the slow witness for it.

A failure costs what was computed since the last usable checkpoint, and the restart. A checkpoint is usable once its
upload is over; one that came too late is lost with those after it. A failure during a restart begins it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ckpt.policy.belief import ScalePrior, Seen
from ray_ckpt.policy.failures import PRIOR_SHARES, FailureModel
from ray_ckpt.policy.interval import young
from ray_ckpt.policy.limits import IntervalLimits
from ray_ckpt.policy.tiers import TierCost, plan_intervals

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Draw = Callable[[int], Floats]
"""So many times between failures, seconds."""

# A policy is asked again after so many intervals without a failure; a run asks at every commit.
_STRETCH = 16
# Exposure and rate are told to a policy in steps of this share: beliefs that near are the same decision.
_GRAIN = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What saving and failing cost.

    Attributes:
        stall_s: training stands still for one save, seconds.
        upload_s: from the end of the stall until the checkpoint is usable, seconds.
        restart_s: from a failure to the first new step, seconds.
        step_s: time of a step, seconds.
    """

    stall_s: float
    upload_s: float = 0.0
    restart_s: float = 0.0
    step_s: float = 1.0


class Policy(Protocol):
    """When to save."""

    def intervals(self, failures: Ints, exposure_s: Floats) -> Floats:
        """Useful seconds between saves, for runs that have seen so many failures in so much time."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same interval, seconds."""

    interval_s: float

    def intervals(self, failures: Ints, exposure_s: Floats) -> Floats:
        return np.full(len(failures), self.interval_s)


def young_fixed(costs: Costs, mtbf_s: float) -> Fixed:
    """Young's interval for a time between failures that somebody believes in, and that is never looked at again."""
    return Fixed(max(young(costs.stall_s, mtbf_s), costs.step_s))


def clairvoyant(costs: Costs, mtbf_s: float, limits: IntervalLimits) -> Fixed:
    """The best interval for the true time between failures, which nobody knows."""
    return Fixed(_best_s(costs, mtbf_s, limits))


class Online:
    """What a run does: it believes in a prior, counts, and decides by the same code.

    Args:
        costs: as the run measures them.
        prior: before anything was seen.
        world_size: workers.
        limits: of the interval.
    """

    def __init__(
        self, costs: Costs, prior: ScalePrior, world_size: int, limits: IntervalLimits
    ) -> None:
        self._costs, self._prior, self._world, self._limits = costs, prior, world_size, limits
        self._decided = lru_cache(maxsize=1 << 16)(self._decide)

    def intervals(self, failures: Ints, exposure_s: Floats) -> Floats:
        grains = np.round(np.log(np.maximum(exposure_s, 1.0)) / _GRAIN).astype(np.int64)
        return np.array(
            [self._decided(int(n), int(g)) for n, g in zip(failures, grains, strict=True)]
        )

    def _decide(self, failures: int, grain: int) -> float:
        exposure_s = math.exp(grain * _GRAIN) if grain else 0.0
        seen = Seen(world_size=self._world, exposure_s=exposure_s, failures=shared_out(failures))
        mtbf_s = FailureModel(self._prior, [seen]).at(self._world).mtbf_s
        return _best_s(self._costs, mtbf_s, self._limits)


def shared_out(failures: int, shares: Mapping[str, float] = PRIOR_SHARES) -> dict[str, int]:
    """Failures by kind, in the shares that kinds have, as near as whole numbers come."""
    exact = {kind: failures * share for kind, share in shares.items()}
    counts = {kind: math.floor(each) for kind, each in exact.items()}
    rest = sorted(shares, key=lambda kind: counts[kind] - exact[kind])
    for kind in rest[: failures - sum(counts.values())]:
        counts[kind] += 1
    return counts


@dataclass(kw_only=True, slots=True)
class Totals:
    """Where the time of each run went, seconds: [runs]; the parts sum to the wall time.

    Attributes:
        useful_s: steps that counted.
        save_s: standing still for saves.
        rework_s: steps that were lost.
        restart_s: restarts.
        failures: how many.
        last_interval_s: that was decided last.
    """

    useful_s: Floats
    save_s: Floats
    rework_s: Floats
    restart_s: Floats
    failures: Ints
    last_interval_s: Floats

    @property
    def wall_s(self) -> Floats:
        """All of it: [runs]."""
        return self.useful_s + self.save_s + self.rework_s + self.restart_s

    @property
    def waste(self) -> Floats:
        """Seconds lost for each useful one: [runs]."""
        return self.wall_s / self.useful_s - 1


def replay(policy: Policy, costs: Costs, draw: Draw, *, runs: int, wall_s: float) -> Totals:
    """Plays runs through their failures.

    Args:
        policy: when to save.
        costs: what that costs.
        draw: the times between failures; the same draws make the same failures for every policy.
        runs: how many.
        wall_s: how long each goes on, seconds; it ends with the stretch that reaches it.
    """
    zeros = np.zeros(runs)
    totals = Totals(
        useful_s=zeros.copy(),
        save_s=zeros.copy(),
        rework_s=zeros.copy(),
        restart_s=zeros.copy(),
        failures=np.zeros(runs, np.int64),
        last_interval_s=zeros.copy(),
    )
    left_s = draw(runs)  # to the next failure
    last_s = zeros.copy()  # interval that the saves of the present attempt were made with
    usable = np.zeros(runs, np.int64)  # saves of the present attempt
    while (active := totals.wall_s < wall_s).any():
        interval_s = policy.intervals(totals.failures, totals.wall_s)
        totals.last_interval_s = np.where(active, interval_s, totals.last_interval_s)
        cycle_s = interval_s + costs.stall_s
        cycles = np.minimum(np.floor(left_s / cycle_s), _STRETCH)
        fails = active & (cycles < _STRETCH)
        saved = np.where(active, cycles, 0.0)
        totals.useful_s += saved * interval_s
        totals.save_s += saved * costs.stall_s
        left_s -= saved * cycle_s
        usable += saved.astype(np.int64)
        last_s = np.where(saved > 0, interval_s, last_s)
        if fails.any():
            _fail(totals, costs, fails, left_s, interval_s, last_s, usable)
            left_s[fails] = 0.0
            usable[fails] = 0
            _restart(totals, costs, draw, fails, left_s)
    return totals


def _fail(
    totals: Totals,
    costs: Costs,
    fails: NDArray[np.bool_],
    left_s: Floats,
    interval_s: Floats,
    last_s: Floats,
    usable: Ints,
) -> None:
    """The end of an attempt, ``left_s`` after its last save."""
    part_s = np.minimum(left_s, interval_s)
    # Saves whose upload was not over yet; those of a longer stretch back are those of this interval, about.
    late = np.ceil(np.maximum(costs.upload_s - left_s, 0.0) / (last_s + costs.stall_s + 1e-300))
    lost_s = np.minimum(late, usable) * last_s
    totals.rework_s += np.where(fails, part_s + lost_s, 0.0)
    totals.useful_s -= np.where(fails, lost_s, 0.0)
    totals.save_s += np.where(fails, left_s - part_s, 0.0)
    totals.failures += fails


def _restart(
    totals: Totals, costs: Costs, draw: Draw, fails: NDArray[np.bool_], left_s: Floats
) -> None:
    """Restarts, until one is not ended by another failure."""
    waiting = fails.copy()
    while waiting.any():
        gap_s = draw(len(left_s))
        again = waiting & (gap_s < costs.restart_s)
        totals.restart_s += np.where(waiting, np.minimum(gap_s, costs.restart_s), 0.0)
        totals.failures += again
        left_s[waiting & ~again] = gap_s[waiting & ~again] - costs.restart_s
        waiting = again


@lru_cache(maxsize=1 << 14)
def _planned_s(costs: Costs, grain: int, limits: IntervalLimits) -> float:
    tier = TierCost(
        name="run",
        stall_s=costs.stall_s,
        upload_s=costs.upload_s,
        restart_s=costs.restart_s,
        failures_per_s=math.exp(-grain * _GRAIN / 4),
    )
    return plan_intervals([tier], costs.step_s, limits).every_steps[0] * costs.step_s


def _best_s(costs: Costs, mtbf_s: float, limits: IntervalLimits) -> float:
    return _planned_s(costs, round(math.log(mtbf_s) / _GRAIN * 4), limits)


def exponential(mtbf_s: float, rng: np.random.Generator) -> Draw:
    """Memoryless failures."""
    return lambda count: rng.exponential(mtbf_s, count)


def weibull(mtbf_s: float, shape: float, rng: np.random.Generator) -> Draw:
    """Failures that come in bursts (shape below 1), as clusters have them, or with age (above 1)."""
    scale_s = mtbf_s / math.gamma(1 + 1 / shape)
    return lambda count: scale_s * rng.weibull(shape, count)


def trace(gaps_s: Floats, rng: np.random.Generator) -> Draw:
    """Times between failures that were seen, drawn again and again in any order."""
    return lambda count: rng.choice(gaps_s, count)
