"""How often to save in each of several tiers, chosen together.

A tier is fast to save to and gone with what it lives on: memory dies with its node, a replica with both nodes, the
durable tier with nothing. So each kind of failure throws the run back to a tier of its own, and a slower tier is
needed more rarely. Its checkpoints are promoted ones of the faster tier: the number of steps between them is a
multiple, and they cost no stall, only what the upload takes from the steps beside it.

The cost is that of :func:`ray_ckpt.policy.interval.overhead`, nested: what the failures of a fast tier waste makes
the time longer that the failures of the next one meet. For one tier that is exact. For more it takes the time lost
to fast tiers at its mean, and lets a failure that needs a slower tier lose the work since that tier's own
checkpoint; both are right to first order, and as near as that to the exact waste while each tier's interval is short
beside the time between the failures that need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ray_ckpt.policy.interval import exact, growth, save_cost
from ray_ckpt.policy.limits import IntervalLimits
from ray_ckpt.policy.words import percent, seconds

# Steps between saves are told apart by this share of them: the waste is so flat that finer would win less than 1e-5,
# and its last digits are noise.
_FINE = 300
# Where no multiples keep all limits, the search for some ends.
_MOST_TRIES = 500
# Another interval is taken only if it wins this share of what the interval decides: no flapping.
WORTH_CHANGING = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCost:
    """What saving to a tier costs, and how often it is needed.

    Attributes:
        name: of the tier.
        stall_s: time training stands still for a save, seconds; 0 for a tier that takes promoted checkpoints.
        upload_s: from the end of the stall until the checkpoint is usable in this tier, seconds.
        slowdown: share of the time of an upload that training loses, 0 to 1.
        restart_s: from a failure to the first new step, with this tier's checkpoint, seconds.
        failures_per_s: rate of the failures that no faster tier outlives and this one does.
    """

    name: str
    stall_s: float
    upload_s: float = 0.0
    slowdown: float = 0.0
    restart_s: float = 0.0
    failures_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stall_s", "upload_s", "restart_s", "failures_per_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of tier {self.name!r} must be 0 or more, got {value}")
        if not 0 <= self.slowdown <= 1:
            raise ValueError(
                f"slowdown of tier {self.name!r} is a share, 0 to 1, got {self.slowdown}"
            )

    @property
    def cost_s(self) -> float:
        """What one save takes from training, seconds."""
        return save_cost(self.stall_s, self.upload_s, self.slowdown)

    def growth(self, interval_s: float, within: float = 1.0) -> float:
        """Seconds for each useful one, with saves every ``interval_s`` useful seconds; see interval.growth."""
        back_s = self.upload_s + self.restart_s
        return growth(interval_s, self.cost_s, self.failures_per_s, back_s, within)

    def optimum_s(self, within: float = 1.0) -> float:
        """Useful seconds between saves that waste least, with no limits; 0 if saving is free, inf if useless."""
        if not self.cost_s:
            return 0.0
        if not self.failures_per_s:
            return math.inf
        return exact(self.cost_s, 1 / self.failures_per_s) / within

    def saving(self, interval_s: float) -> float:
        """Seconds that saves take, for each useful one."""
        return self.cost_s / interval_s

    def rework(self, interval_s: float) -> float:
        """Seconds of work done again, for each useful one; first order."""
        return (interval_s / 2 + self.upload_s) * self.failures_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalPlan:
    """How often to save in each tier.

    Attributes:
        every_steps: steps between saves, by tier; each a multiple of the one before.
        waste: expected seconds lost for each useful one.
        reasons: a sentence for each tier.
    """

    every_steps: tuple[int, ...]
    waste: float
    reasons: tuple[str, ...]


def plan_intervals(
    tiers: Sequence[TierCost],
    step_s: float,
    limits: IntervalLimits | Sequence[IntervalLimits],
    held: Sequence[int] = (),
) -> IntervalPlan:
    """The steps between saves of each tier that waste least together.

    Args:
        tiers: fastest first.
        step_s: time of a step, seconds.
        limits: of all tiers, or one for each. The most time between saves goes before the least, and that of a
            slower tier before that of a faster one. A fixed number of steps is for the fastest tier only.
        held: the plan that is followed now. It stays as long as it keeps the limits and another one would win
            less than 2 % of the waste that the intervals decide.

    Raises:
        ValueError: no tiers, or limits that do not fit them.
    """
    if not tiers:
        raise ValueError("need at least one tier")
    each = [limits] * len(tiers) if isinstance(limits, IntervalLimits) else list(limits)
    if len(each) != len(tiers):
        raise ValueError(f"need limits for each of the {len(tiers)} tiers, got {len(each)}")
    if any(limit.fixed_steps for limit in each[1:]):
        raise ValueError(
            "a fixed number of steps is for the fastest tier; give others min_s, max_s"
        )
    step_s = max(step_s, 1e-9)
    search = _Search(tiers, step_s, each)
    found = search.best()
    kept = len(held) == len(tiers) and search.worth_keeping(tuple(held), found)
    steps = tuple(held) if kept else found
    reasons = tuple(
        f"{tier.name}: {_tier_words(tier, n, step_s, search.bounds[k])}"
        for k, (tier, n) in enumerate(zip(tiers, steps, strict=True))
    )
    return IntervalPlan(every_steps=steps, waste=plan_waste(tiers, step_s, steps), reasons=reasons)


def plan_waste(tiers: Sequence[TierCost], step_s: float, every_steps: Sequence[int]) -> float:
    """Expected seconds lost for each useful one when each tier is saved to every so many steps."""
    grown = 1.0
    for tier, steps in zip(tiers, every_steps, strict=True):
        grown = tier.growth(steps * step_s, grown)
    return grown - 1


def unavoidable(tiers: Sequence[TierCost]) -> float:
    """The part of the waste that no interval changes: restarts, and what is done again for uploads."""
    exponent = sum(t.failures_per_s * (t.restart_s + t.upload_s) for t in tiers)
    return math.expm1(exponent) if exponent < 700 else math.inf


class _Search:
    """Branch and bound over the multiples; a branch is cut when even fractions of steps could not save it."""

    def __init__(
        self, tiers: Sequence[TierCost], step_s: float, limits: Sequence[IntervalLimits]
    ) -> None:
        self.tiers, self.step_s = tiers, step_s
        self.bounds = [
            limit.steps(step_s, tier.upload_s) for tier, limit in zip(tiers, limits, strict=True)
        ]
        if limits[0].fixed_steps:
            self.bounds[0] = (limits[0].fixed_steps, limits[0].fixed_steps)

    def best(self) -> tuple[int, ...]:
        return self._best(0, 1, 1.0)[2]

    def worth_keeping(self, held: tuple[int, ...], found: tuple[int, ...]) -> bool:
        before = 1
        for steps, (least, most) in zip(held, self.bounds, strict=True):
            if steps < 1 or steps % before or not min(least, most) <= steps <= most:
                return False
            before = steps
        always = unavoidable(self.tiers)
        now = plan_waste(self.tiers, self.step_s, held) - always
        then = plan_waste(self.tiers, self.step_s, found) - always
        return math.isfinite(now) and now - then < WORTH_CHANGING * now

    def _best(self, k: int, unit: int, grown: float) -> tuple[int, float, tuple[int, ...]]:
        """Least (broken limits, growth) and its steps, for tier ``k`` and those after it.

        Args:
            k: the tier.
            unit: steps of the tier before, which its own are a multiple of.
            grown: growth by the tiers before.
        """
        least, most = self.bounds[k]
        low, high = math.ceil(least / unit), most // unit
        broken, high = int(low > high), max(1, high)
        low = min(low, high)
        if k + 1 == len(self.tiers):
            return broken, *self._last(unit, grown, low, high)
        centre = self._centre(k, unit, grown, low, high)
        best: tuple[int, float, tuple[int, ...]] | None = None
        for outward in (_outward(centre, high, 1), _outward(centre - 1, low, -1)):
            for times in outward:
                if best and not best[0] and self._least(k, unit * times, grown) >= best[1]:
                    break  # further from the centre it only grows
                growth = self.tiers[k].growth(unit * times * self.step_s, grown)
                more, after, steps = self._best(k + 1, unit * times, growth)
                here = broken + more, after, (unit * times, *steps)
                if best is None or here[:2] < best[:2]:
                    best = here
        assert best is not None
        return best

    def _last(self, unit: int, grown: float, low: int, high: int) -> tuple[float, tuple[int, ...]]:
        """Growth and steps of the slowest tier: its waste has one valley, so a neighbour of the optimum is best."""
        tier = self.tiers[-1]
        alone = min(max(tier.optimum_s(grown) / self.step_s / unit, low), high)
        near = {math.floor(alone), min(math.ceil(alone), high)} if alone < _FINE else {round(alone)}
        return min(
            (tier.growth(unit * times * self.step_s, grown), (unit * times,))
            for times in sorted(near)
        )

    def _centre(self, k: int, unit: int, grown: float, low: int, high: int) -> int:
        """Where the bound is least: the optimum of the tier alone, or less where slower tiers need that."""
        alone = int(min(max(self.tiers[k].optimum_s(grown) / self.step_s / unit, low), high))
        left, right = math.log(low), math.log(alone)
        while right - left > 1e-3:
            one, two = (2 * left + right) / 3, (left + 2 * right) / 3
            if self._least(k, unit * math.exp(one), grown) <= self._least(
                k, unit * math.exp(two), grown
            ):
                right = two
            else:
                left = one
        return min(max(int(math.exp(right)), low), alone)

    def _least(self, k: int, steps: float, grown: float) -> float:
        """Growth with so many steps in tier ``k``, if later ones could be any number that is not less."""
        grown = self.tiers[k].growth(steps * self.step_s, grown)
        for tier, (least, most) in zip(self.tiers[k + 1 :], self.bounds[k + 1 :], strict=True):
            wanted = min(max(tier.optimum_s(grown) / self.step_s, min(least, most)), most)
            grown = tier.growth(max(wanted, steps) * self.step_s, grown)
        return grown


def _outward(start: int, end: int, direction: int) -> Iterator[int]:
    """Numbers from ``start`` to ``end``, a share of each apart; an end that is reached is one of them.

    The waste is flat where it is least, but not at a limit that cuts the valley: there the last step counts.
    """
    times = start
    for _ in range(_MOST_TRIES):
        left = (end - times) * direction
        if left < 0:
            return
        yield times
        times += direction * max(1, min(times // _FINE, left))


def _tier_words(tier: TierCost, steps: int, step_s: float, bounds: tuple[int, int]) -> str:
    interval_s = steps * step_s
    rate = tier.failures_per_s
    need = f"needed every {seconds(1 / rate)}" if rate else "never needed"
    at = ""
    if steps <= bounds[0] and bounds[0] > 1:
        at = ", as short as allowed"
    elif steps >= bounds[1]:
        at = ", as long as allowed"
    return (
        f"costs {seconds(tier.cost_s)}, {need} -> {seconds(interval_s)} = {steps} steps{at}; saving costs "
        f"{percent(tier.saving(interval_s))}, rework {percent(tier.rework(interval_s))}"
    )
