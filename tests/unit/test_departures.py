"""The tracker's part in a planned end: when it tells the workers to leave, and what it calls that end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_refusals import bad
from test_tracker_core import Run

from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.policy.resize import ResizeRules
from ray_ckpt.tracker.core import TrackerOptions
from ray_ckpt.tracker.departures import Drain

OPTIONS = TrackerOptions(
    limits=IntervalLimits(fixed_steps=1000), prior_mtbf_s=3600.0, drain_margin_s=5.0
)
NODE = "node-a"  # where the workers of a `Run` are


def drain(run: Run, left_s: float | None, node: str = NODE) -> None:
    deadline = None if left_s is None else run.clock.now + left_s
    run.core.draining([Drain(node=node, name="spot-7", deadline=deadline)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that knows how long its steps and its saves take: half a second, and 4 s."""
    run = Run(tmp_path, OPTIONS)
    run.begin()
    run.train(10)
    run.save(stall_s=1.0, upload_s=3.0)
    run.train(10)
    return run


def until_told(run: Run, limit_s: float) -> float:
    """Trains until the workers are told to leave; returns when that was."""
    begun = run.clock.now
    while run.core._steering.leave() is None:
        assert run.clock.now < begun + limit_s, "nobody was told to leave"
        run.train(1)
    return run.clock.now


def test_the_order_comes_as_late_as_is_safe_and_says_why(run: Run) -> None:
    drain(run, 60.0)
    end = run.clock.now + 60.0
    assert run.train(1).leave is None
    told = until_told(run, 60.0)
    # 1.5 s until the order is heard, half a second of a step, 4 s for the save, and a margin of 5 s.
    assert end - told == pytest.approx(11.0, abs=1.0)
    [notice], [order] = run.journal("drain_notice"), run.journal("leave_requested")
    assert (notice["name"], round(notice["left_s"])) == ("spot-7", 60)
    assert order["saves"]
    assert "spot-7" in order["cause"]
    assert "a save needs 6.0 s" in order["reason"]


def test_the_workers_may_go_once_the_step_is_committed_and_no_step_is_lost(run: Run) -> None:
    drain(run, 8.0)
    leave = run.train(1).leave
    assert leave is not None
    assert leave.saves
    assert "is not committed" in run.core.obstacle(run.generation, run.step)
    run.save()
    assert run.core.obstacle(run.generation, run.step) == ""
    failures = run.core.memory.failures
    run.core.interruption("worker_error", "rank 0: LeavingError: the attempt ends", group="g1")
    [end] = run.journal("interruption")
    assert (end["kind"], end["lost_steps"], end["cause"]) == (
        "drain",
        0,
        "node spot-7 will be taken away",
    )
    assert run.core.memory.failures == failures, "the failure model does not hear of it"
    assert run.begin().directive.leave is None


def test_without_time_for_a_save_none_is_begun_and_the_last_one_stands(run: Run) -> None:
    drain(run, 5.0)
    leave = run.train(1).leave
    assert leave is not None
    assert not leave.saves
    assert "the last committed checkpoint stands" in run.journal("leave_requested")[0]["reason"]
    assert run.core.obstacle(run.generation, run.step) == "", "there is nothing to wait for"
    run.core.interruption("node_loss", "node spot-7 died", group="g1")
    [end] = run.journal("interruption")
    assert (end["kind"], end["lost_steps"]) == ("drain", 11)
    assert "node spot-7 died" in end["cause"]


def test_a_save_that_fails_is_tried_again_only_if_another_one_can_finish(run: Run) -> None:
    drain(run, 10.0)
    assert run.train(1).leave is not None
    failed = run.written(run.step, error="the disk is full")
    assert not run.core.commit(run.generation, failed)
    leave = run.train(1).leave
    assert leave is not None
    assert leave.saves
    run.clock.now += 5.0
    leave = run.train(1).leave
    assert leave is not None
    assert not leave.saves
    assert [line["saves"] for line in run.journal("leave_requested")] == [True, False]


def test_the_deadline_ends_the_wait_for_a_save(run: Run) -> None:
    drain(run, 9.0)
    assert run.train(1).leave is not None
    run.clock.now += 5.0  # too late for another one, but the one that was begun may finish
    leave = run.train(1).leave
    assert leave is not None
    assert leave.saves
    run.clock.now += 5.0
    leave = run.train(1).leave
    assert leave is not None
    assert not leave.saves


@pytest.mark.parametrize(
    "make",
    [
        lambda run: drain(run, None),
        lambda run: (run.core.memory.uploads_s.clear(), drain(run, 600.0)),
    ],
    ids=["nobody says when", "no save was measured"],
)
def test_what_is_not_known_is_no_reason_to_wait(run: Run, make: Callable[[Run], Any]) -> None:
    make(run)
    leave = run.train(1).leave
    assert leave is not None
    assert leave.saves


def test_nodes_without_workers_of_the_run_may_go(run: Run) -> None:
    drain(run, 1.0, node="node-of-others")
    assert run.train(1).leave is None
    assert run.journal("drain_notice", "leave_requested") == []


def test_a_terminated_worker_is_a_planned_end_from_the_first_word_on(run: Run) -> None:
    run.core.terminated(run.generation, run.step, {1: NODE})
    run.core.terminated(run.generation, run.step, {1: NODE})
    leave = run.train(1).leave
    assert leave is not None
    assert (leave.kind, leave.saves) == ("preempted", True)
    [order] = run.journal("leave_requested")
    assert "rank 1 got SIGTERM" in order["cause"]
    run.save()
    run.open()  # the program ended, and a new one begins: nobody told the end
    run.begin()
    [end] = run.journal("interruption")
    assert (end["kind"], end["lost_steps"]) == ("preempted", 0)
    assert run.core.memory.failures == 0


def test_a_tracker_that_died_goes_by_the_order_on_record(run: Run) -> None:
    drain(run, 8.0)
    assert run.train(1).leave is not None
    before = run.core.memory
    run.open()
    assert run.core.memory.leave == before.leave is not None
    assert run.train(1).leave is not None


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.floats(0.5, 60.0),
    st.lists(st.floats(0.1, 20.0), min_size=1, max_size=3),
    st.lists(st.sampled_from(["step", "save", "fail", "wait"]), max_size=12),
)
def test_whatever_happens_there_is_an_order_before_the_node_is_gone(
    tmp_path_factory: pytest.TempPathFactory,
    left_s: float,
    uploads_s: list[float],
    happenings: list[str],
) -> None:
    run = Run(tmp_path_factory.mktemp("run"), OPTIONS)
    run.begin()
    for upload_s in uploads_s:
        run.train(5)
        run.save(upload_s=upload_s)
    drain(run, left_s)
    end = run.clock.now + left_s
    for what in happenings:
        if what == "wait":
            run.clock.now += 5.0
        else:
            run.train(1)
        if what == "save":
            run.save()
        elif what == "fail":
            run.core.commit(run.generation, run.written(run.step, error="no"))
    run.clock.now = max(run.clock.now, end)
    leave = run.train(1).leave
    assert leave is not None, "the node is gone"
    orders = run.journal("leave_requested")
    assert len(orders) <= 2, "an order is given once, and taken back at most once"
    assert orders[-1]["saves"] is leave.saves is False, "no save is begun for a node that is gone"


def test_an_offer_is_taken_when_it_has_been_still_and_put_on_record_once(tmp_path: Path) -> None:
    rules = ResizeRules(micro_batches=8, total_steps=10**6, settle_s=3.0, cooldown_s=100.0)
    now = [0.0]
    run = Run(
        tmp_path,
        TrackerOptions(limits=IntervalLimits(fixed_steps=1000), prior_mtbf_s=1e6, resize=rules),
    )
    run.core._resizes._monotonic = lambda: now[0]
    run.begin(workers=2)
    run.train(10)
    seen = []
    for second, possible in enumerate([2, 3, 4, 4, 4, 4, 4]):
        now[0] = float(second)
        seen.append(run.core.resize(possible, 2).workers)
    assert seen == [2, 2, 2, 2, 2, 4, 4], "one restart, for both nodes"
    assert [(line["possible"], line["why"]) for line in run.journal("resize_decision")] == [
        (3, "settling"),
        (4, "settling"),
        (4, "grow"),
    ]
    run.core.interruption("resize", "room for 4", group="g1")
    assert run.core.resize(8, 4).why == "starting", "a group is not restarted before it has begun"
    run.begin(workers=4)
    now[0] = 100.0
    run.core.resize(8, 4)
    now[0] = 104.0
    assert run.core.resize(8, 4).why == "cooldown"
    run.clock.now += 100.0
    assert run.core.resize(8, 4).why == "grow"
    assert run.core.resize(1, 4).workers == 1, "becoming smaller waits for nothing"
    drain(run, 600.0)
    assert run.core.resize(8, 4).why == "leaving"


def test_a_start_that_took_long_makes_a_run_think_twice(tmp_path: Path) -> None:
    rules = ResizeRules(micro_batches=8, total_steps=10**6, settle_s=0.0)
    limits = IntervalLimits(fixed_steps=1000)
    run = Run(tmp_path, TrackerOptions(limits=limits, prior_mtbf_s=600.0, resize=rules))
    run.core.group_started(2, asked_ago_s=500.0, workers_ago_s=1.0, waited_s=0.0)
    run.begin(workers=2)
    run.train(10)
    assert run.core.memory.starts_s[-1][1] == pytest.approx(501.0, abs=2.0)
    assert run.core.resize(4, 2).why == "cost"
    assert run.fold().starts_s == run.core.memory.starts_s


def test_a_save_that_was_under_way_does_not_settle_a_request(run: Run) -> None:
    number = run.core.request_save("a resize", hold_s=60.0)
    run.save(request=number - 1)
    assert run.core.status()["settled_request"] < number
    run.train(1)
    run.save(request=number)
    assert run.core.status()["settled_request"] == number
    assert run.fold().settled_request == number


def test_a_save_that_the_guard_refuses_settles_a_request_too(run: Run) -> None:
    number = run.core.request_save("a resize")
    run.train(1)
    assert not run.core.commit(run.generation, run.written(run.step, request=number, guard=bad()))
    assert run.core.status()["settled_request"] == number


@pytest.mark.parametrize("left_s", [3.0, 600.0])
def test_a_run_that_stands_still_goes_at_once_with_what_it_has(run: Run, left_s: float) -> None:
    """As a node that has the runs saved and then drains itself: there is no time for another save, nor need."""
    number = run.core.request_save("the node goes", hold_s=90.0)
    run.save(request=number)
    drain(run, left_s)
    leave = run.train(0).leave
    assert leave is not None
    assert leave.saves
    assert run.core.obstacle(run.generation, run.step) == ""
    assert "stands still" in run.journal("leave_requested")[0]["reason"]


def test_a_run_that_stood_still_and_went_on_is_not_saved_any_more(run: Run) -> None:
    number = run.core.request_save("the node goes", hold_s=1.0)
    run.save(request=number)
    run.train(1)
    drain(run, 3.0)
    leave = run.train(0).leave
    assert leave is not None
    assert not leave.saves


def test_once_the_workers_may_go_every_request_is_settled(run: Run) -> None:
    drain(run, 8.0)
    assert run.train(1).leave is not None
    number = run.core.request_save("a resize, at the same time", hold_s=60.0)
    run.save()
    assert run.core.status()["settled_request"] < number
    assert run.core.status()["leaving"]
    for _ in range(2):
        assert run.core.obstacle(run.generation, run.step) == ""
    assert run.core.status()["settled_request"] == number
    assert [line["step"] for line in run.journal("left")] == [run.step]
    assert run.fold().settled_request == number
