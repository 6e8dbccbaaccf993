"""A run grows where it is worth a restart, at a good moment, and is never kept from becoming smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.resize import (
    SOON_S,
    Moment,
    ResizeRules,
    decide_resize,
    speedup,
    usable,
)

RULES = ResizeRules(micro_batches=24, total_steps=10**6, settle_s=5.0, cooldown_s=60.0)
CALM = Moment(
    workers=2,
    steps_left=10**5,
    step_s=1.0,
    restart_s=30.0,
    mtbf_s=86400.0,
    save_due_s=200.0,
    interval_s=400.0,
    still_s=10.0,
    since_growth_s=None,
)
moments = st.builds(
    Moment,
    workers=st.integers(1, 24),
    steps_left=st.integers(0, 10**5),
    step_s=st.none() | st.floats(0.01, 100),
    restart_s=st.none() | st.floats(0, 1000),
    mtbf_s=st.floats(1, 1e6),
    save_due_s=st.none() | st.floats(-100, 1000),
    interval_s=st.floats(0, 1000),
    still_s=st.floats(0, 100),
    since_growth_s=st.none() | st.floats(0, 1000),
)
sizes = st.lists(st.integers(1, 24), max_size=4).map(lambda found: tuple(sorted(set(found))))


@settings(max_examples=40)
@given(moments, st.integers(0, 40), sizes)
def test_becoming_smaller_is_never_argued_about(
    moment: Moment, possible: int, preferred: tuple[int, ...]
) -> None:
    decision = decide_resize(possible, moment, replace(RULES, sizes=preferred))
    if possible < moment.workers:
        assert decision.workers == usable(possible, preferred, 24) < moment.workers
    else:
        assert decision.workers >= moment.workers


@settings(max_examples=40)
@given(moments, st.integers(0, 40), sizes)
def test_a_growth_is_worth_it_calm_and_of_a_size_that_is_used(
    moment: Moment, possible: int, preferred: tuple[int, ...]
) -> None:
    rules = replace(RULES, sizes=preferred)
    decision = decide_resize(possible, moment, rules)
    if decision.workers <= moment.workers:
        return
    assert decision.workers <= min(possible, rules.micro_batches)
    fitting = [size for size in preferred if size <= possible]
    assert decision.workers in (fitting or [min(possible, 24)])
    assert moment.still_s >= rules.settle_s
    assert moment.since_growth_s is None or moment.since_growth_s >= rules.cooldown_s
    faster = speedup(moment.workers, decision.workers, 24)
    assert faster >= 1 + rules.min_gain
    if moment.restart_s is not None:
        assert (moment.mtbf_s - moment.restart_s) * faster > moment.mtbf_s


@settings(max_examples=40)
@given(moments, st.integers(0, 40), sizes)
def test_with_a_gain_of_0_only_the_moment_counts(
    moment: Moment, possible: int, preferred: tuple[int, ...]
) -> None:
    calm = replace(moment, still_s=10.0, since_growth_s=None, save_due_s=None)
    rules = replace(RULES, sizes=preferred, min_gain=0.0)
    assert decide_resize(possible, calm, rules).workers == (
        usable(possible, preferred, 24)
        if possible < moment.workers
        else max(moment.workers, usable(possible, preferred, 24))
    )


@pytest.mark.parametrize(
    ("possible", "change", "why", "words"),
    [
        (4, {}, "grow", "4 workers make steps 2.00 times as fast as 2"),
        (2, {}, "same", "as many as the run uses"),
        (4, {"still_s": 4.0}, "settling", "for one restart and not several"),
        (4, {"since_growth_s": 59.0}, "cooldown", "--elastic.cooldown-s 60"),
        (4, {"save_due_s": SOON_S}, "save_due", "right after it"),
        (4, {"save_due_s": 0.0}, "grow", "4 workers"),
        (23, {"workers": 12}, "gain", "(24 micro-batches in 2 and 2 passes)"),
        (4, {"restart_s": 60.0, "mtbf_s": 100.0}, "cost", "before the next failure"),
        (4, {"restart_s": 49.0, "mtbf_s": 100.0}, "grow", "4 workers"),
        (4, {"steps_left": 30}, "end", "30 steps are left"),
        (4, {"steps_left": 31}, "grow", "4 workers"),
        (4, {"begun": False}, "starting", "2 workers start"),
        (4, {"leaves": True}, "leaving", "the restart after that takes them in"),
    ],
)
def test_each_rule_has_its_words(
    possible: int, change: dict[str, float], why: str, words: str
) -> None:
    decision = decide_resize(possible, replace(CALM, **change), RULES)
    assert decision.why == why
    assert words in decision.reason
    assert (decision.workers == possible) == (why in ("grow", "same"))


def test_a_save_that_is_always_due_soon_does_not_keep_a_run_from_growing() -> None:
    often = replace(CALM, interval_s=10.0)
    after = [decide_resize(4, replace(often, save_due_s=s), RULES).why for s in (10.0, 6.0, 5.0)]
    assert after == ["grow", "grow", "save_due"]


def test_preferred_sizes_are_used_where_one_fits() -> None:
    assert [usable(n, (2, 8, 16), 24) for n in (0, 1, 2, 7, 8, 15, 99)] == [0, 1, 2, 2, 8, 8, 16]
    assert [usable(n, (), 24) for n in (0, 7, 99)] == [0, 7, 24]
