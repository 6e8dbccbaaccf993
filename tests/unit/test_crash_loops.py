"""A failure that comes again at the same place ends the run, or sends it further back; others are told apart."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tracker_core import OPTIONS, Run

from ray_ckpt.checkpoint.guard import GuardRule
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.config import ElasticConfig
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.loops import (
    FAST_S,
    MOST_BACKOFF_S,
    Failure,
    LoopRule,
    backoff_s,
    loops,
    normalised,
    over_budget,
    parse_budgets,
    story,
)
from ray_ckpt.skips import Skip
from ray_ckpt.tracker.records import TrackerOptions, Verdict

BOOM = "rank 1: ValueError: bad row 17"


def failure(
    step: int = 7, kind: str = "worker_error", cause: str = BOOM, at_s: float = 0.0
) -> Failure:
    return Failure(generation=1, kind=kind, cause=cause, step=step, exposure_s=at_s)


# ---- pure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rank 1: ValueError: bad row 17", "rank 30: ValueError: bad row 4"),
        ("hang on node 10.0.0.1: x", "hang on node worker-b: x"),
        ("OSError: /tmp/a1/b/c.txt is gone", "OSError: /data/c.txt is gone"),
        ("object at 0x7f1a in use", "object at 0xdeadbeef in use"),
        ("took 12.5 s", "took 3 s"),
    ],
)
def test_what_differs_from_one_time_to_the_next_is_no_difference(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


def test_other_errors_differ() -> None:
    assert normalised("rank 0: ValueError: bad row") != normalised("rank 0: TypeError: bad row")
    assert failure().signature != failure(kind="hang").signature


@given(st.integers(2, 5), st.integers(0, 8), st.integers(0, 3))
def test_a_loop_is_so_many_in_a_row_and_not_one_less(tries: int, count: int, slack: int) -> None:
    rule = LoopRule(tries=tries)
    before = [failure(cause="rank 0: other")]
    same = [failure(step=7 + (i % 2) * slack) for i in range(count)]
    assert loops([*before, *same], rule, slack) == (count >= tries)
    assert not loops([*same, *before], rule, slack)


@pytest.mark.parametrize("kind", ["node_loss", "lost", "storage"])
def test_what_the_program_cannot_be_the_reason_of_is_no_loop(kind: str) -> None:
    assert not loops([failure(kind=kind)] * 9, LoopRule(), 0)


def test_failures_further_apart_than_the_slack_are_no_loop() -> None:
    assert not loops([failure(7), failure(8), failure(9)], LoopRule(), 1)
    assert loops([failure(7), failure(8), failure(9)], LoopRule(), 2)


def test_a_budget_counts_one_kind_within_its_window_of_training() -> None:
    rule = LoopRule(budgets={"worker_error": 3, "node_loss": 0}, window_s=100.0)
    far, near = failure(at_s=0.0), failure(at_s=950.0)
    assert over_budget([far, near, replace(near, exposure_s=1000.0)], rule) == ""
    assert "3 failures of kind worker_error" in over_budget([far, near, near, near], rule)
    assert over_budget([near, near, failure(kind="node_loss", at_s=950.0)], rule) == ""
    assert over_budget([failure(kind="node_loss")] * 50, rule) == ""


@given(
    st.lists(
        st.tuples(st.sampled_from(["worker_error", "hang", "node_loss", "lost"]), st.floats(0, 500))
    )
)
def test_a_wait_is_bounded_and_never_for_what_has_its_reason_elsewhere(
    told: list[tuple[str, float]],
) -> None:
    failures, at_s = [], 0.0
    for kind, gap_s in told:
        at_s += gap_s
        failures.append(failure(kind=kind, at_s=at_s))
    wait_s = backoff_s(failures, LoopRule(backoff_s=1.0))
    assert 0 <= wait_s <= MOST_BACKOFF_S
    if not failures or failures[-1].kind in ("node_loss", "lost"):
        assert wait_s == 0
    assert backoff_s(failures, LoopRule(backoff_s=0.0)) == 0


def test_fast_failures_wait_longer_each_time_and_progress_ends_it() -> None:
    rule = LoopRule(backoff_s=2.0)
    waits = [backoff_s([failure(at_s=float(i)) for i in range(n)], rule) for n in range(1, 8)]
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert backoff_s([failure(at_s=0.0), failure(at_s=1.0), failure(at_s=1.0 + FAST_S)], rule) == 0


def test_budgets_are_read_or_refused_with_the_form() -> None:
    assert parse_budgets(" worker_error=20, node_loss=0 ") == {"worker_error": 20, "node_loss": 0}
    assert parse_budgets("") == {}
    for wrong in ("worker_error", "worker_error=x", "resize=3", "worker_error=-1"):
        with pytest.raises(ConfigError, match=r"--elastic\.max-failures .* KIND=NUMBER"):
            ElasticConfig(max_failures=wrong)
    rule = ElasticConfig(
        max_failures="hang=4", on_crash_loop="skip", same_failure_tries=5
    ).loop_rule()
    assert (rule.budgets, rule.on_loop, rule.tries) == ({"hang": 4}, "skip", 5)


def test_a_story_has_every_failure_with_its_step_cause_nodes_and_files() -> None:
    told = story([replace(failure(), nodes=("node-b",), files="hangs/x"), failure(8)])
    assert (
        told.splitlines()[0]
        == f"  attempt 1 ended at step 7 on node node-b (worker_error): {BOOM}; see hangs/x"
    )
    assert "step 8" in told.splitlines()[1]


# ---- the tracker ----------------------------------------------------------------------------------


def options(**rule: object) -> TrackerOptions:
    guard = GuardRule(max_rollbacks=2)
    return replace(OPTIONS, loops=LoopRule(**rule), guard=guard, max_fruitless=99)


def fail(run: Run, cause: str = BOOM, kind: str = "worker_error", **more: object) -> Verdict:
    return run.core.interruption(kind, cause, group=f"g{run.generation}", **more)


def crash(run: Run, to_step: int, cause: str = BOOM) -> Verdict:
    """An attempt that fails once it has done ``to_step``."""
    run.begin()
    run.train(to_step - run.step, step_time_s=1.0)
    return fail(run, cause, at_step=to_step + 1)


def saved(run: Run, *steps: int) -> None:
    run.begin()
    for step in steps:
        run.train(step - run.step, step_time_s=1.0)
        run.save()


def test_the_same_failure_at_the_same_step_stops_the_run_with_the_story(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=3))
    saved(run, 5)
    run.train(2, step_time_s=1.0)
    assert fail(run).go_on
    assert crash(run, 7).go_on
    last = crash(run, 7)
    assert not last.go_on
    assert "3 times in a row after step 7" in last.reason
    assert last.reason.count(BOOM) == 3
    assert "--elastic.on-crash-loop rollback" in last.reason
    (event,) = run.journal("crash_loop")
    assert event["action"] == "stop"
    # Told again, the answer is the same, and nothing is counted twice.
    assert fail(run) == last
    assert len(run.journal("crash_loop")) == 1
    # Whoever starts the run again gets as many tries, also from a tracker that only reads the journal.
    run.open()
    assert crash(run, 7).go_on
    assert crash(run, 7).go_on
    assert not crash(run, 7).go_on


def test_commits_in_between_do_not_hide_a_loop(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=3))
    for first in (4, 5, 6):
        saved(run, first)
        run.train(7 - first, step_time_s=1.0)
        verdict = fail(run)
    assert not verdict.go_on


def test_failures_at_other_steps_or_of_another_kind_are_no_loop(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=3))
    saved(run, 5)
    run.train(2, step_time_s=1.0)
    assert fail(run).go_on
    assert all(crash(run, step).go_on for step in (12, 7, 12, 7))
    assert crash(run, 7, "rank 0: other").go_on
    assert crash(run, 7).go_on
    assert run.journal("crash_loop") == []


def test_a_rollback_goes_one_checkpoint_further_back_each_time_and_then_stops(
    tmp_path: Path,
) -> None:
    # Each time back begins a new count of attempts that got nowhere, too.
    run = Run(tmp_path, replace(options(tries=2, on_loop="rollback"), max_fruitless=3))
    saved(run, 2, 4, 6)
    run.train(1, step_time_s=1.0)
    fail(run)
    verdict = crash(run, 7)
    assert verdict.go_on
    assert "back to step 4" in verdict.reason
    assert run.begin().plan.manifest.step == 4  # type: ignore[union-attr]
    run.train(3, step_time_s=1.0)
    fail(run)
    run.open()  # what was decided is on record
    verdict = crash(run, 7)
    assert "back to step 2" in verdict.reason
    assert run.begin().plan.manifest.step == 2  # type: ignore[union-attr]
    run.train(5, step_time_s=1.0)
    fail(run)
    last = crash(run, 7)
    assert not last.go_on
    assert "--guard.max-rollbacks 2" in last.reason


def test_without_a_checkpoint_further_back_a_rollback_stops(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=2, on_loop="rollback"))
    saved(run, 4)
    run.train(3, step_time_s=1.0)
    fail(run)
    last = crash(run, 7)
    assert not last.go_on
    assert "no checkpoint further back" in last.reason


def test_a_skip_leaves_out_the_batches_since_the_newest_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=2, on_loop="skip"))
    saved(run, 2, 4)
    run.train(3, step_time_s=1.0)
    fail(run, at_step=8)
    verdict = crash(run, 7)
    assert verdict.go_on
    attempt = run.begin()
    assert attempt.plan is not None
    assert attempt.plan.manifest.step == 4
    assert attempt.skips == (Skip(from_step=4, steps=4),), "the step that fails is the eighth"


def test_a_skip_reaches_the_step_that_was_worked_on_or_that_may_have_been(tmp_path: Path) -> None:
    """A worker that dies takes the lines of its last steps with it."""
    for asked, steps in ((True, 6), (False, 8)):
        run = Run(tmp_path / str(asked), options(tries=2, on_loop="skip"))
        saved(run, 2, 4)
        more = {"at_step": 10} if asked else {}
        for _ in range(2):
            run.train(3, step_time_s=0.06)  # up to 5 steps in a bundle
            fail(run, **more)
            skips = run.begin().skips
        assert skips == (Skip(from_step=4, steps=steps if asked else 4 + 5),)


def test_a_skip_is_possible_before_the_first_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=2, on_loop="skip"))
    crash(run, 3)
    assert crash(run, 3).go_on
    attempt = run.begin()
    assert attempt.plan is None
    assert attempt.skips == (Skip(from_step=0, steps=4),)


def test_a_budget_stops_the_run_and_a_new_start_has_a_new_one(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=99, budgets={"worker_error": 3}))
    assert all(crash(run, 10 * i, f"rank 0: {'abc'[i]}").go_on for i in (1, 2))
    last = crash(run, 40, "rank 0: d")
    assert not last.go_on
    assert "3 failures of kind worker_error" in last.reason
    assert crash(run, 50, "rank 0: e").go_on


def test_fast_failures_are_told_to_wait_and_lost_nodes_are_not(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=99))
    assert crash(run, 1, "rank 0: a").wait_s == 0
    assert crash(run, 2, "rank 0: b").wait_s == 1
    assert crash(run, 3, "rank 0: c").wait_s == 2
    run.begin()
    assert fail(run, "node x died", "node_loss").wait_s == 0


# ---- while a checkpoint is restored ---------------------------------------------------------------


def fail_in_restore(run: Run, kind: str = "worker_error") -> str:
    """An attempt whose restore fails; returns the checkpoint."""
    plan = run.core.begin_attempt(2, ["node-a"]).plan
    assert plan is not None
    assert run.core.interruption(
        kind, "the process of rank 0 died", group=f"g{run.generation}"
    ).go_on
    return plan.name


def test_failures_while_a_copy_is_restored_count_against_it_and_not_against_the_run(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, replace(options(tries=2), max_fruitless=2))
    saved(run, 2, 4)
    fail(run)
    older, newer = sorted(run.usable())
    assert [fail_in_restore(run) for _ in range(2)] == [newer, newer]
    assert run.core.memory.fruitless == 0
    run.open()
    plan = run.core.begin_attempt(2, ["node-a"]).plan
    assert plan is not None
    assert plan.name == older
    assert "2 attempts failed while they restored it" in plan.reason
    # The last one is never given up; these count against the run.
    assert run.core.interruption("worker_error", "again", group="x1").go_on
    run.core.begin_attempt(2, ["node-a"])
    assert not run.core.interruption("worker_error", "again", group="x2").go_on


def test_a_restore_that_succeeds_clears_the_copy(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=2))
    saved(run, 2, 4)
    fail(run)
    newer = fail_in_restore(run)
    run.begin()
    assert run.core.memory.restore_failures[newer] == 0
    fail(run)
    assert [fail_in_restore(run) for _ in range(2)] == [newer, newer]


def test_a_copy_that_is_the_only_one_left_is_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=2))
    saved(run, 2, 4)
    fail(run)
    newer = [fail_in_restore(run) for _ in range(2)][-1]
    (older,) = [name for name in run.usable() if name != newer]
    shutil.rmtree(run.dir / "checkpoints" / older)
    plan = run.core.begin_attempt(2, ["node-a"]).plan
    assert plan is not None
    assert plan.name == newer


def test_a_lost_node_and_a_rejected_copy_say_nothing_of_the_plan(tmp_path: Path) -> None:
    run = Run(tmp_path, options(tries=2))
    saved(run, 2, 4)
    fail(run)
    newer = fail_in_restore(run, "node_loss")
    assert run.core.memory.restore_failures[newer] == 0
    # The newer one fails verification: what fails then is the restore of another one.
    plan = run.core.begin_attempt(2, ["node-a"]).plan
    assert plan is not None
    fault = Fault(path="__0_0.distcp", fault="not as written")
    other = run.core.reject(run.generation, newer, [fault])
    assert other is not None
    assert other.name != newer
    fail(run)
    assert not run.core.memory.restore_failures
