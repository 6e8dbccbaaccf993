"""When to save: the exact optimum, inside limits, held while it is good enough, explained by its numbers."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt import policy
from ray_ckpt.policy.audit import audit
from ray_ckpt.policy.belief import FailureBelief
from ray_ckpt.policy.decision import Decision, IntervalLimits, Measured, decide, steps_to_next
from ray_ckpt.policy.interval import exact, overhead
from ray_ckpt.policy.slowdown import UploadCompany, slowdown
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.pace import Pace
from ray_ckpt.tracker.records import TrackerOptions

seconds = st.floats(min_value=1e-3, max_value=1e7)
stalls = st.floats(min_value=1e-3, max_value=1e4)


def measured(**changes: Any) -> Measured:
    values = {"step_s": 0.5, "stall_s": 2.0, "upload_s": 1.0, "world_size": 4}
    return Measured(**{**values, **changes})


def believed(mtbf_s: float, failures: int = 0) -> FailureBelief:
    return FailureBelief(mtbf_s=mtbf_s, low_s=mtbf_s / 2, high_s=2 * mtbf_s, failures=failures)


def decision(
    limits: IntervalLimits | None = None,
    mtbf_s: float = 3600,
    held: Decision | None = None,
    **changes: Any,
) -> Decision:
    return decide(measured(**changes), believed(mtbf_s), limits or IntervalLimits(), held)


# ---- decisions ------------------------------------------------------------------------------------


def test_the_reason_names_the_formula_and_its_numbers():
    found = decision(stall_s=60.0, step_s=11.56, mtbf_s=185.6 * 60, upload_s=5.0)
    assert (found.formula, found.every_steps) == ("exact", 97)
    assert found.interval_s == pytest.approx(97 * 11.56)
    assert found.reason == (
        "exact: stall C 60 s, MTBF M 3.09 h at 4 workers (prior, no failure yet, 90 %: 1.5 to 6.2 h), "
        "upload U 5 s -> 18.6 min = 97 steps of 11.6 s; saving costs 5.4 %, rework 5.1 %"
    )
    assert "1 worker " in decision(world_size=1).reason


def test_the_reason_says_how_many_failures_were_seen():
    for failures, words in ((1, "1 failure seen"), (2, "2 failures seen")):
        assert words in decide(measured(), believed(100, failures), IntervalLimits()).reason


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
        wanted = min(max(exact(stall_s, mtbf_s), floor), limits.max_s)
        off = (
            step_s * 1.0000001 + 2e-9 * wanted
        )  # limits are kept but for the last bits of a quotient
        assert abs(found.interval_s - wanted) <= off or found.every_steps == 1
        if math.ceil(floor / step_s) * step_s <= limits.max_s:
            assert floor * (1 - 1e-6) <= found.interval_s <= limits.max_s * (1 + 1e-6)
        return found.every_steps

    now = steps(stall, mtbf)
    assert steps(stall * factor, mtbf) >= now
    assert steps(stall, mtbf * factor) >= now


def test_the_interval_moves_when_the_stall_grows():
    small, large = decision(stall_s=0.5), decision(stall_s=8.0)
    assert large.interval_s == pytest.approx(4 * small.interval_s, rel=0.05)
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
    found = decision(limits, **changes)  # the optimum alone: 119 s
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


# ---- holding on -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(stalls, st.floats(1.0, 1e6), st.floats(0.5, 2), st.floats(0.5, 2))
def test_a_decision_changes_only_for_two_percent_of_the_waste(stall, share, longer, rarer):
    mtbf = stall * share
    limits = IntervalLimits(min_s=1e-3, max_s=1e7)
    numbers = {"step_s": 1e-3, "upload_s": 0.0}
    before = decision(limits, mtbf_s=mtbf, stall_s=stall, **numbers)
    numbers["stall_s"] = stall * longer
    free = decision(limits, mtbf_s=mtbf * rarer, **numbers)
    after = decision(limits, mtbf_s=mtbf * rarer, held=before, **numbers)

    def lost(found: Decision) -> float:
        return overhead(found.every_steps * 1e-3, stall * longer, mtbf * rarer)

    assert after.every_steps in (before.every_steps, free.every_steps)
    if after.every_steps == before.every_steps:
        assert lost(before) <= lost(free) / 0.98 + 1e-12
        if free.every_steps != before.every_steps:
            assert "less than 2 % better than now, so kept" in after.reason
    else:
        assert lost(before) - lost(free) >= 0.02 * lost(before) * (1 - 1e-9)
        assert "kept" not in after.reason


def test_noise_in_the_stall_does_not_move_the_interval_and_a_trend_does():
    held, changes = decision(), 0
    for stall_s in (2.1, 1.9, 2.2, 1.8, 2.05, 2.3):
        found = decision(held=held, stall_s=stall_s)
        changes += found.every_steps != held.every_steps
        held = found
    assert changes == 0
    for stall_s in (2.5, 3, 4, 5, 6, 7, 8):
        held = decision(held=held, stall_s=stall_s)
    assert held.every_steps == pytest.approx(decision(stall_s=8).every_steps, rel=0.25)


def test_what_breaks_a_limit_is_not_held():
    held = decision()
    assert decision(IntervalLimits(max_s=100), held=held).interval_s == 100
    assert decision(held=held, upload_s=125.0).interval_s == 125
    # Another kind of decision is none to hold on to.
    first = decision(stall_s=None)
    assert decision(held=first).every_steps == held.every_steps
    assert decision(IntervalLimits(fixed_steps=9), held=held).every_steps == 9


# ---- slower beside an upload ----------------------------------------------------------------------


def test_steps_slowed_by_uploads_make_saving_dearer_and_rarer():
    quick, slow = decision(upload_s=30.0), decision(upload_s=30.0, slowdown=0.2)
    assert slow.interval_s == pytest.approx(2 * quick.interval_s, rel=0.05)  # 2 s become 2 + 6 s
    assert "upload U 30 s slowing steps by 20 %" in slow.reason
    assert "slowing" not in quick.reason


def test_the_share_that_uploads_cost_is_measured_by_medians():
    alone = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 30.0]
    assert slowdown([1.25, 1.26, 1.24, 1.25, 9.0], alone) == pytest.approx(0.2, abs=0.01)
    assert slowdown([1.01, 0.99, 1.02, 1.0, 1.01], alone) == 0  # within the noise
    assert slowdown([0.5] * 9, alone) == 0  # an upload does not make steps quicker
    assert slowdown([2.0] * 4, alone) is None
    assert slowdown([2.0] * 9, []) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 60), st.floats(0.0, 0.6), st.integers(0, 4))
def test_the_steps_beside_uploads_are_found_in_the_stream(every, share, late):
    company, step_s = UploadCompany(), 0.5
    beside_steps = every // 2
    slow_s = step_s / (1 - share)
    upload_s = beside_steps * slow_s
    times: list[float] = []
    for _ in range(12):
        times += [slow_s] * beside_steps + [step_s] * (every - beside_steps)
    told = 0
    for save in range(11):
        # The save of step `save * every` is told when its upload is over, `late` steps of it untold.
        over = save * every + beside_steps - min(late, beside_steps)
        company.steps(times[told:over])
        told = over
        company.saved(told - save * every, upload_s)
    assert company.slowdown == pytest.approx(share, abs=1e-6)
    company.begin_attempt()
    assert company.slowdown == pytest.approx(share, abs=1e-6)


# ---- looking back ---------------------------------------------------------------------------------


def test_an_audit_says_in_one_line_who_paid_more():
    often = audit(useful_s=10_000, saving_s=400, rework_s=25, failures=9)
    assert (often.verdict, often.factor) == ("too often", 4)
    assert often.reason == (
        "saving took 4.0 % of the useful time (400 s), work done again 0.25 % (25 s, 9 failures): 16 times as "
        "much, an interval 4 times as long would have cost least"
    )
    rarely = audit(useful_s=10_000, saving_s=10, rework_s=1000, failures=20)
    assert (rarely.verdict, rarely.factor) == ("too rarely", pytest.approx(0.1))
    assert rarely.reason.endswith("an interval of 10 % of it would have cost least")
    assert audit(10_000, 100, 120, 5).verdict == "balanced"
    assert audit(10_000, 100, 0, 0).verdict == audit(10_000, 100, 0, 2).verdict == "too early"
    assert "\n" not in often.reason + rarely.reason


def test_what_is_done_again_for_uploads_is_no_fault_of_the_interval():
    assert audit(10_000, 10, 900, 20).verdict == "too rarely"
    assert audit(10_000, 10, 900, 20, upload_rework_s=890).verdict == "balanced"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**4), st.floats(0, 1e5), st.floats(0, 1e5))
def test_luck_alone_is_not_called_a_fault(failures, saving, rework):
    found = audit(1e6, saving, rework, failures)
    assert found.reason
    if found.verdict in ("too often", "too rarely"):
        assert failures >= 3
        low, high = sorted((saving, rework))
        assert high > 3 * low
    if found.verdict == "too often":
        assert found.factor > 1
    if found.verdict == "too rarely":
        assert found.factor < 1


@pytest.mark.parametrize("wrong", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, math.nan, 1), (1, 1, 1, -1)])
def test_impossible_totals_are_refused(wrong):
    with pytest.raises(ValueError, match="useful time of more than 0 s"):
        audit(*wrong)


def test_the_policy_is_arithmetic_and_imports_nothing_else_of_the_project():
    for path in sorted(Path(policy.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or top in ("numpy", "ray_ckpt"), path.name
                assert top != "ray_ckpt" or name.startswith("ray_ckpt.policy."), path.name
                assert top not in ("time", "datetime", "os", "pathlib", "random"), path.name
