"""When to save: the published formulas, inside limits, explained by their numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.decision import Decision, IntervalLimits, Measured, decide, steps_to_next
from ray_ckpt.policy.failures import FailureBelief
from ray_ckpt.policy.interval import waste, young
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.pace import Pace
from ray_ckpt.tracker.records import TrackerOptions

seconds = st.floats(min_value=1e-3, max_value=1e7)
stalls = st.floats(min_value=1e-3, max_value=1e4)


def measured(**changes: Any) -> Measured:
    values = {"step_s": 0.5, "stall_s": 2.0, "upload_s": 1.0, "world_size": 4}
    return Measured(**{**values, **changes})


def decision(
    limits: IntervalLimits | None = None, mtbf_s: float = 3600, **changes: Any
) -> Decision:
    return decide(
        measured(**changes), FailureBelief(prior_mtbf_s=mtbf_s), limits or IntervalLimits()
    )


# ---- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtbf", "period"),
    [(3_849_609, 68567), (962_402, 34584), (240_601, 17592), (60_150, 9096), (15_038, 4848)],
)
def test_young_gives_the_periods_of_aupy_2013_table_2(mtbf, period):
    assert young(600, mtbf) + 600 == pytest.approx(period, abs=0.6)


def test_young_gives_the_interval_of_llama_3():
    mtbf = 54 * 24 * 60 / 419
    assert mtbf == pytest.approx(185.6, abs=0.05)
    assert young(60, mtbf * 60) / 60 == pytest.approx(19.3, abs=0.05)


@settings(max_examples=100, deadline=None)
@given(stalls, seconds, st.floats(0, 1e5), st.floats(1.001, 100))
def test_waste_is_least_at_young(stall, mtbf, restart, factor):
    best = young(stall, mtbf)
    least = waste(best, stall, mtbf, restart)
    for other in (best * factor, best / factor):
        assert waste(other, stall, mtbf, restart) >= least * (1 - 1e-12)
    # At the optimum, saving and rework cost the same: sqrt(2 C / M) together.
    assert least - restart / mtbf == pytest.approx(math.sqrt(2 * stall / mtbf), rel=1e-6, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(stalls, seconds, st.floats(1.001, 1000))
def test_a_longer_stall_or_rarer_failures_save_more_rarely(stall, mtbf, factor):
    assert young(stall * factor, mtbf) > young(stall, mtbf)
    assert young(stall, mtbf * factor) > young(stall, mtbf)
    assert young(stall * 4, mtbf) == pytest.approx(2 * young(stall, mtbf))


def test_limits_of_the_formulas():
    assert young(0, 100) == 0
    assert waste(10, 0, 100) == pytest.approx(0.05)
    # Restart time is lost whatever the interval is.
    assert waste(10, 1, 100, restart=20) - waste(10, 1, 100) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("stall", "mtbf"), [(-1, 10), (1, 0), (1, -5), (math.nan, 10), (1, math.nan)]
)
def test_impossible_times_are_refused(stall, mtbf):
    for formula in (young, lambda c, m: waste(1, c, m)):
        with pytest.raises(ValueError, match="stall >= 0 s and mtbf > 0 s"):
            formula(stall, mtbf)
    with pytest.raises(ValueError, match="interval must be more than 0 s"):
        waste(0, 1, 10)


# ---- failures -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seconds, st.floats(0.1, 100), st.integers(0, 1000), st.floats(0, 1e7))
def test_a_failure_lowers_the_mtbf_and_quiet_time_raises_it(prior, weight, failures, exposure):
    def belief(**more: Any) -> FailureBelief:
        values = {"failures": failures, "exposure_s": exposure, **more}
        return FailureBelief(prior_mtbf_s=prior, prior_weight=weight, **values)

    now = belief().mtbf_s
    assert belief(failures=failures + 1).mtbf_s < now
    assert belief(exposure_s=exposure + prior).mtbf_s > now
    assert now > 0


def test_the_belief_starts_at_the_prior_and_ends_at_what_was_seen():
    assert FailureBelief(prior_mtbf_s=1000, prior_weight=7).mtbf_s == 1000
    seen = FailureBelief(prior_mtbf_s=1000, failures=10_000, exposure_s=10_000 * 50.0)
    assert seen.mtbf_s == pytest.approx(50, rel=0.01)
    # A prior worth n failures weighs as much as n failures that came at its rate.
    assert FailureBelief(
        prior_mtbf_s=1000, prior_weight=3, failures=3, exposure_s=600
    ).mtbf_s == pytest.approx((3 * 1000 + 600) / 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prior_mtbf_s": 0},
        {"prior_mtbf_s": math.nan},
        {"prior_weight": -1},
        {"prior_weight": math.nan},
        {"failures": -1},
        {"exposure_s": -0.5},
        {"exposure_s": math.nan},
    ],
)
def test_an_impossible_belief_is_refused(wrong):
    with pytest.raises(ValueError, match=r"more than 0|not be negative"):
        FailureBelief(**{"prior_mtbf_s": 10, **wrong})


# ---- decisions ------------------------------------------------------------------------------------


def test_the_reason_names_the_formula_and_its_numbers():
    found = decision(stall_s=60.0, step_s=11.56, mtbf_s=185.6 * 60, upload_s=5.0)
    assert (found.formula, found.every_steps) == ("young", 100)
    assert found.interval_s == pytest.approx(1156)
    for word in ("young: stall C 60 s", "MTBF M 3.09 h", "4 workers", "prior, no failure yet"):
        assert word in found.reason
    for word in ("sqrt(2 C M) = 19.3 min", "100 steps of 11.6 s"):
        assert word in found.reason
    assert "1 worker " in decision(world_size=1).reason


def test_the_reason_says_how_many_failures_were_seen():
    for failures, words in ((1, "1 failure seen"), (2, "2 failures seen")):
        belief = FailureBelief(prior_mtbf_s=100, failures=failures, exposure_s=10)
        assert words in decide(measured(), belief, IntervalLimits()).reason


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1e-3, 1e3),
    stalls,
    st.floats(0, 1e4),
    seconds,
    st.floats(1.0, 100),
    st.floats(0.001, 1e4),
    st.floats(1, 1e4),
)
def test_a_larger_stall_never_saves_more_often(step_s, stall, upload, mtbf, factor, least, more):
    limits = IntervalLimits(min_s=least, max_s=least * more)

    def steps(stall_s: float, mtbf_s: float) -> int:
        found = decision(limits, mtbf_s=mtbf_s, step_s=step_s, stall_s=stall_s, upload_s=upload)
        assert found.every_steps >= 1
        assert found.interval_s == pytest.approx(found.every_steps * step_s)
        # Never off by more than the rounding to whole steps, and that stays inside the limits.
        floor = max(least, upload)
        wanted = min(max(young(stall_s, mtbf_s), floor), limits.max_s)
        nearest = round(wanted / step_s) * step_s
        off = 0.5000001 if floor <= nearest <= limits.max_s else 1.0000001
        assert abs(found.interval_s - wanted) <= step_s * off or found.every_steps == 1
        if math.ceil(floor / step_s) * step_s <= limits.max_s:
            assert floor * (1 - 1e-6) <= found.interval_s <= limits.max_s * (1 + 1e-6)
        return found.every_steps

    now = steps(stall, mtbf)
    assert steps(stall * factor, mtbf) >= now
    assert steps(stall, mtbf * factor) >= now


def test_the_interval_moves_when_the_stall_grows():
    small, large = decision(stall_s=0.5), decision(stall_s=8.0)
    assert large.interval_s == pytest.approx(4 * small.interval_s, rel=0.02)
    assert "stall C 500 ms" in small.reason
    assert "stall C 8 s" in large.reason


@pytest.mark.parametrize(
    ("limits", "changes", "seconds", "words"),
    [
        (
            IntervalLimits(min_s=300, max_s=900),
            {},
            300,
            "raised to 300 s, the policy.min-interval-s",
        ),
        (IntervalLimits(min_s=1, max_s=60), {}, 60, "cut to 60 s, policy.max-interval-s"),
        (IntervalLimits(), {"upload_s": 500.0}, 500, "raised to 500 s, the upload time"),
        (IntervalLimits(), {"stall_s": 0.0, "upload_s": None}, 1, "raised to 1 s, the policy.min"),
    ],
)
def test_a_limit_that_was_hit_is_named(limits, changes, seconds, words):
    found = decision(limits, **changes)  # young alone: 120 s
    assert found.interval_s == seconds
    assert words in found.reason


def test_no_limit_is_named_when_none_was_hit():
    reason = decision().reason
    assert "raised" not in reason
    assert "cut" not in reason


def test_of_two_limits_the_one_that_decided_is_named():
    found = decision(IntervalLimits(max_s=200), upload_s=500.0)
    assert found.interval_s == 200
    assert "policy.max-interval-s" in found.reason


@pytest.mark.parametrize(
    ("limits", "changes"),
    [
        (IntervalLimits(min_s=130, max_s=900), {"step_s": 90.0}),  # 1 step of 90 s
        (IntervalLimits(max_s=100), {"step_s": 60.0}),  # 2 steps of 60 s
        (IntervalLimits(), {"step_s": 350.0, "upload_s": 500.0}),  # 1 step of 350 s
    ],
)
def test_whole_steps_stay_inside_the_limits_where_some_do(limits, changes):
    found = decision(limits, **changes)
    least = max(limits.min_s, changes.get("upload_s", 0))
    assert least <= found.interval_s <= limits.max_s


@pytest.mark.parametrize("missing", [{"step_s": None}, {"stall_s": None}])
def test_before_anything_is_measured_the_first_save_comes_early(missing):
    found = decision(IntervalLimits(first_steps=7), **missing)
    seconds = None if "step_s" in missing else 3.5
    assert (found.formula, found.every_steps, found.interval_s) == ("first", 7, seconds)
    assert found.reason.startswith("first: ")
    assert "7 steps" in found.reason


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10**6), st.none() | stalls, st.none() | stalls)
def test_a_fixed_interval_is_obeyed_whatever_is_measured(steps, step_s, stall_s):
    found = decision(IntervalLimits(fixed_steps=steps), step_s=step_s, stall_s=stall_s)
    assert (found.formula, found.every_steps) == ("fixed", steps)
    assert found.interval_s == (None if step_s is None else pytest.approx(steps * step_s))
    assert "policy.interval-steps" in found.reason


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1e5), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1e-9, 1e15))
def test_there_is_an_answer_for_strange_measurements(step_s, stall_s, upload_s, mtbf_s):
    found = decision(mtbf_s=mtbf_s, step_s=step_s, stall_s=stall_s, upload_s=upload_s)
    assert found.every_steps >= 1
    assert found.reason


def test_a_job_that_never_fails_saves_as_rarely_as_allowed():
    assert decision(IntervalLimits(max_s=900), mtbf_s=math.inf).interval_s == 900


def test_no_stall_in_a_job_that_never_fails_has_an_answer():
    assert decision(stall_s=0.0, mtbf_s=math.inf).every_steps >= 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_s": 0}, "policy.min-interval-s"),
        ({"min_s": -1}, "policy.min-interval-s"),
        ({"min_s": math.nan}, "policy.min-interval-s"),
        ({"min_s": 10, "max_s": 9}, "policy.max-interval-s"),
        ({"max_s": math.nan}, "policy.max-interval-s"),
        ({"max_s": math.inf}, "policy.max-interval-s"),
        ({"fixed_steps": -1}, "policy.interval-steps"),
        ({"first_steps": 0}, "policy.first-save-steps"),
    ],
)
def test_wrong_limits_are_refused_by_name(wrong, words):
    with pytest.raises(ValueError, match=words):
        IntervalLimits(**wrong)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_decision_keeps_the_limits_as_soon_as_the_step_time_is_known(data):
    least = data.draw(st.floats(0.01, 100))
    limits = IntervalLimits(
        min_s=least,
        max_s=least * data.draw(st.floats(1, 1e4)),
        first_steps=data.draw(st.integers(1, 50)),
    )
    memory = RunMemory()
    pace = Pace(TrackerOptions(limits=limits, prior_mtbf_s=86400.0), memory, [])
    for _ in range(data.draw(st.integers(1, 12))):
        happens = data.draw(st.sampled_from(["steps", "steps", "steps", "commit", "attempt"]))
        if happens == "steps":
            step_s = data.draw(st.floats(1e-3, 10))
            if pace.steps([step_s] * data.draw(st.integers(1, 60))):
                pace.decide(memory)
        elif happens == "commit":
            memory.stalls_s.append(data.draw(stalls))
            memory.uploads_s.append(data.draw(st.floats(0, 100)))
            pace.decide(memory)
        else:
            pace.begin_attempt()
            pace.decide(memory)
        step_s = pace.step_time_s
        if step_s is None:
            assert pace.decision.every_steps == limits.first_steps
        elif math.ceil(limits.min_s / step_s) * step_s <= limits.max_s:
            seconds = pace.decision.every_steps * step_s
            assert limits.min_s * (1 - 1e-6) <= seconds <= limits.max_s * (1 + 1e-6)


def test_the_first_save_of_a_very_small_model_waits_for_the_least_interval():
    found = decision(step_s=0.004, stall_s=None)
    assert (found.formula, found.every_steps, found.interval_s) == ("first", 250, 1.0)
    assert "policy.min-interval-s = 1 s" in found.reason


def test_a_failed_save_is_tried_again_soon_and_then_more_and_more_rarely():
    assert [steps_to_next(20, n) for n in range(7)] == [20, 2, 4, 8, 16, 20, 20]
    assert [steps_to_next(1, n) for n in (0, 1, 5000)] == [1, 1, 1]
