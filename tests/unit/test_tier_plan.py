"""Intervals of several tiers, chosen together: as good as trying all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.interval import exact, overhead
from ray_ckpt.policy.limits import IntervalLimits
from ray_ckpt.policy.tiers import (
    WORTH_CHANGING,
    TierCost,
    plan_intervals,
    plan_waste,
    unavoidable,
)

MOST = 48


@st.composite
def tier_lists(draw: st.DrawFn) -> list[TierCost]:
    return [
        TierCost(
            name=f"tier{k}",
            stall_s=draw(st.floats(0, 3)) if k == 0 else 0.0,
            upload_s=draw(st.floats(0, 3)) * (k + 1),
            slowdown=draw(st.floats(0, 0.5)),
            restart_s=draw(st.floats(0, 60)),
            failures_per_s=10 ** -draw(st.floats(1.5, 3 + k)),
        )
        for k in range(draw(st.integers(1, 3)))
    ]


def chains(bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """All plans inside the bounds, each number a multiple of the one before."""
    if not bounds:
        yield ()
        return
    (least, most), *rest = bounds
    for steps in range(least, most + 1):
        for more in chains(rest):
            if not more or more[0] % steps == 0:
                yield (steps, *more)


@settings(max_examples=40, deadline=None)
@given(tier_lists(), st.floats(0.3, 3), st.floats(0.5, 8), st.data())
def test_no_multiples_waste_less(tiers, step_s, least, data):
    most = [data.draw(st.integers(12, MOST)) for _ in tiers]
    limits = [IntervalLimits(min_s=least * step_s, max_s=n * step_s) for n in most]
    bounds = [limit.steps(step_s, tier.upload_s) for limit, tier in zip(limits, tiers, strict=True)]
    found = plan_intervals(tiers, step_s, limits)
    assert found.waste == plan_waste(tiers, step_s, found.every_steps)
    assert all(b % a == 0 for a, b in itertools.pairwise(found.every_steps))
    best = min((plan_waste(tiers, step_s, plan) for plan in chains(bounds)), default=None)
    if best is not None:
        assert all(a <= n <= b for n, (a, b) in zip(found.every_steps, bounds, strict=True)), (
            "there are multiples inside the limits"
        )
        assert found.waste <= best * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(tier_lists(), st.floats(0.001, 0.01))
@example(
    tiers=[
        TierCost(name="free", stall_s=0, failures_per_s=0.01),
        TierCost(name="limited", stall_s=0, upload_s=4, slowdown=2**-9, failures_per_s=10**-3.5),
        TierCost(name="needed", stall_s=0, failures_per_s=0.01),
    ],
    step_s=0.001,
)
def test_short_steps_are_searched_as_well_as_fractions_of_steps(tiers, step_s):
    limits = IntervalLimits(min_s=step_s, max_s=20_000.0)
    found = plan_intervals(tiers, step_s, limits)
    # No worse than any plan of multiples near the optimum of each tier alone.
    near = []
    for tier in tiers:
        wanted = min(max(tier.optimum_s(), tier.upload_s, step_s), 20_000.0)
        near.append([wanted * f for f in (0.5, 0.8, 1.0, 1.25, 2.0)])
    for wanted in itertools.product(*near):
        plan: list[int] = []
        for seconds, tier in zip(wanted, tiers, strict=True):
            unit = plan[-1] if plan else 1
            least, most = limits.steps(step_s, tier.upload_s)
            times = max(round(seconds / step_s / unit), math.ceil(least / unit), 1)
            plan.append(unit * times)
            if plan[-1] > most:
                break
        else:
            assert found.waste <= plan_waste(tiers, step_s, plan) * (1 + 1e-5) + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 10), st.floats(0, 1), st.floats(100, 1e6), st.floats(0, 100))
def test_one_tier_is_the_exact_optimum(stall, slowdown, mtbf, upload):
    tier = TierCost(
        name="durable",
        stall_s=stall,
        upload_s=upload,
        slowdown=slowdown,
        restart_s=5,
        failures_per_s=1 / mtbf,
    )
    limits = IntervalLimits(min_s=1e-3, max_s=1e7)
    found = plan_intervals([tier], 1e-3, limits)
    wanted = max(upload, exact(stall + slowdown * upload, mtbf))
    assert found.every_steps[0] * 1e-3 == pytest.approx(wanted, rel=1e-3, abs=2e-3)
    assert found.waste == pytest.approx(
        overhead(found.every_steps[0] * 1e-3, stall, mtbf, 5, upload=upload, slowdown=slowdown)
    )


def test_a_slower_tier_that_is_needed_more_rarely_is_saved_to_more_rarely():
    tiers = [
        TierCost(name="memory", stall_s=0.1, upload_s=0.5, slowdown=0.02, failures_per_s=1 / 3e4),
        TierCost(name="local", stall_s=0, upload_s=8, slowdown=0.05, failures_per_s=1 / 1e5),
        TierCost(name="durable", stall_s=0, upload_s=60, slowdown=0.05, failures_per_s=1 / 1e6),
    ]
    found = plan_intervals(tiers, 1.0, IntervalLimits(max_s=1e5))
    memory, local, durable = found.every_steps
    assert memory < local < durable
    for tier, steps, reason in zip(tiers, found.every_steps, found.reasons, strict=True):
        assert reason.startswith(f"{tier.name}: costs ")
        assert f"= {steps} steps" in reason
        # Near the optimum of each alone, saving and rework but for the upload cost the same.
        rework = tier.rework(steps) - tier.upload_s * tier.failures_per_s
        assert tier.saving(steps) == pytest.approx(rework, rel=0.5)
    # Saving to the durable tier at each save of the first would cost more.
    assert found.waste < plan_waste(tiers, 1.0, (memory, memory, memory))


@pytest.mark.parametrize("rate", [0.2, 0.02, 0.002])
def test_a_slow_tier_that_is_needed_often_pulls_the_faster_one_along(rate):
    # Alone the memory tier would be saved to every half hour; the durable one can not wait for that.
    tiers = [
        TierCost(name="memory", stall_s=0.02, failures_per_s=1e-8),
        TierCost(name="durable", stall_s=0, upload_s=0.5, slowdown=0.01, failures_per_s=rate),
    ]
    found = plan_intervals(tiers, 0.01, IntervalLimits(min_s=0.01, max_s=3000))
    both = [
        plan_waste(tiers, 0.01, (n, n * times))
        for n in {round(1.05**k) for k in range(2, 200)}
        for times in (1, 2, 3)
        if n * times >= 50
    ]
    assert found.waste <= min(both) * (1 + 1e-9)


def test_an_interval_is_never_shorter_than_the_upload():
    tiers = [
        TierCost(name="memory", stall_s=0.01, upload_s=20, failures_per_s=0.01),
        TierCost(name="durable", stall_s=0, upload_s=70, failures_per_s=0.01),
    ]
    found = plan_intervals(tiers, 1.0, IntervalLimits())
    assert found.every_steps[0] >= 20
    assert found.every_steps[1] >= 70


def test_a_tier_that_nothing_needs_is_saved_to_as_rarely_as_allowed():
    tiers = [
        TierCost(name="memory", stall_s=1, failures_per_s=1e-3),
        TierCost(name="durable", stall_s=0, upload_s=10, slowdown=0.1),
    ]
    found = plan_intervals(tiers, 1.0, IntervalLimits(max_s=900))
    assert 900 - found.every_steps[0] < found.every_steps[1] <= 900
    assert "never needed" in found.reasons[1]


def test_a_fixed_number_of_steps_holds_for_the_fastest_tier():
    tiers = [
        TierCost(name="memory", stall_s=1, failures_per_s=1e-3),
        TierCost(name="durable", stall_s=0, upload_s=10, slowdown=0.1, failures_per_s=1e-5),
    ]
    found = plan_intervals(tiers, 1.0, [IntervalLimits(fixed_steps=7), IntervalLimits()])
    assert found.every_steps[0] == 7
    assert found.every_steps[1] % 7 == 0
    with pytest.raises(ValueError, match="fastest tier"):
        plan_intervals(tiers, 1.0, [IntervalLimits(), IntervalLimits(fixed_steps=7)])


@settings(max_examples=40, deadline=None)
@given(tier_lists(), st.lists(st.floats(0.5, 2), min_size=3, max_size=3))
def test_what_is_held_changes_only_for_two_percent(tiers, factors):
    limits = IntervalLimits(min_s=1e-3, max_s=1e4)
    best = plan_intervals(tiers, 0.5, limits)
    unit, held = 1, []
    for steps, factor in zip(best.every_steps, factors, strict=False):
        unit *= max(1, round(steps / unit * factor))
        held.append(unit)
    found = plan_intervals(tiers, 0.5, limits, held=held)
    always = unavoidable(tiers)
    decided = plan_waste(tiers, 0.5, held) - always
    gain = plan_waste(tiers, 0.5, held) - best.waste
    allowed = all(
        a <= n <= b
        for n, (a, b) in zip(held, (limits.steps(0.5, t.upload_s) for t in tiers), strict=True)
    )
    if allowed and gain < WORTH_CHANGING * decided:
        assert found.every_steps == tuple(held)
    elif tuple(held) != best.every_steps:
        assert found.every_steps == best.every_steps
    # Held again, it stays: nothing flaps.
    again = plan_intervals(tiers, 0.5, limits, held=found.every_steps)
    assert again.every_steps == found.every_steps


def test_limits_that_no_multiples_keep_still_give_an_answer():
    tiers = [TierCost(name=str(k), stall_s=1 - k / 2, failures_per_s=1e-3) for k in range(3)]
    narrow = [
        IntervalLimits(min_s=50, max_s=60),
        IntervalLimits(min_s=70, max_s=80),
        IntervalLimits(min_s=10, max_s=20),
    ]
    found = plan_intervals(tiers, 1.0, narrow)
    assert all(b % a == 0 for a, b in itertools.pairwise(found.every_steps))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stall_s": -1.0}, "stall_s of tier 'x' must be 0 or more"),
        ({"upload_s": math.nan}, "upload_s"),
        ({"failures_per_s": math.inf}, "failures_per_s"),
        ({"slowdown": 1.5}, "share, 0 to 1"),
    ],
)
def test_impossible_costs_are_refused_by_name(wrong, words):
    with pytest.raises(ValueError, match=words):
        TierCost(**{"name": "x", "stall_s": 1.0, **wrong})
    with pytest.raises(ValueError, match="at least one tier"):
        plan_intervals([], 1.0, IntervalLimits())
    with pytest.raises(ValueError, match="limits for each"):
        plan_intervals([TierCost(name="x", stall_s=1.0)], 1.0, [])
