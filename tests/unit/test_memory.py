"""What the tracker remembers is a fold of the journal: any cut of it, at any time, gives the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.tracker.checkpoint_memory import RECENT_SAVES
from ray_ckpt.tracker.memory import PLANNED, RunMemory

Event = dict[str, Any]

steps = st.integers(0, 10**6)
times = st.floats(0, 2e9)
small = st.floats(0, 1e4)
kinds = st.sampled_from(["worker_error", "node_loss", "hang", "lost", *sorted(PLANNED)])


def event(event: str, **fields: Any) -> st.SearchStrategy[Event]:
    return st.fixed_dictionaries({"event": st.just(event), "time": times, **fields})


events = st.lists(
    st.one_of(
        event("attempt_started", generation=st.integers(1, 99), world_size=st.integers(1, 64)),
        event("restored", generation=st.integers(1, 99), step=steps, lost_steps_more=steps),
        event("interruption", kind=kinds, step=steps, lost_steps=steps, exposure_s=small),
        event("commit", step=steps, name=st.text(max_size=5), stall_s=small, upload_s=small,
              exposure_s=small),
        event("save_failed", step=steps, name=st.just("x"), error=st.just("y")),
        event("save_requested", number=st.integers(1, 99), reason=st.just("z")),
        event("finished", step=steps, exposure_s=small),
        event("tracker_started", generation=st.integers(1, 99)),
        event("something of a later version"),
    ),
    max_size=30,
)  # fmt: skip


def fold(lines: list[Event]) -> RunMemory:
    memory = RunMemory()
    for line in lines:
        memory.apply(line)
    return memory


def started(generation: int = 1, world_size: int = 2) -> Event:
    return {"event": "attempt_started", "generation": generation, "world_size": world_size}


def interrupted(step: int, kind: str = "worker_error") -> Event:
    return {"event": "interruption", "kind": kind, "step": step, "lost_steps": 0, "exposure_s": 1.0}


def committed(step: int, stall_s: float = 1.0, upload_s: float = 2.0) -> Event:
    return {
        "event": "commit",
        "time": 5.0,
        "step": step,
        "name": f"step-{step}",
        "stall_s": stall_s,
        "upload_s": upload_s,
        "exposure_s": 1.0,
    }


@settings(max_examples=60, deadline=None)
@given(events, st.data())
def test_stopping_anywhere_and_reading_again_remembers_the_same(lines, data):
    live = fold(lines)
    cut = data.draw(st.integers(0, len(lines)))
    again = fold([json.loads(json.dumps(line)) for line in lines[:cut]])
    for line in lines[cut:]:
        again.apply(line)
    assert again == live


@settings(max_examples=60, deadline=None)
@given(events)
def test_counts_are_those_of_the_journal(lines):
    memory = fold(lines)

    def of(name: str) -> list[Event]:
        return [line for line in lines if line["event"] == name]

    ends = of("interruption")
    assert memory.interruptions.total() == len(ends)
    assert memory.failures == sum(line["kind"] not in PLANNED for line in ends)
    more = sum(line["lost_steps_more"] for line in of("restored"))
    assert memory.lost_steps == sum(line["lost_steps"] for line in ends) + more
    assert memory.commits == len(of("commit"))
    assert memory.failed_saves == len(of("save_failed"))
    assert memory.failed_in_a_row <= memory.failed_saves
    assert memory.save_requests == max((line["number"] for line in of("save_requested")), default=0)
    assert memory.last_commit_step == (of("commit")[-1]["step"] if of("commit") else None)
    assert len(memory.stalls_s) == min(RECENT_SAVES, memory.commits)
    assert (memory.stall_s is None) == (memory.upload_s is None) == (memory.commits == 0)
    # A clock that was set back does not make the run younger.
    told = [line for line in lines if line["event"] != "tracker_started"]
    assert memory.first_time == (told[0]["time"] if told else None)


@settings(max_examples=60, deadline=None)
@given(events)
def test_the_generation_and_the_best_step_only_grow(lines):
    memory, generation, best = RunMemory(), 0, 0
    for line in lines:
        memory.apply(line)
        assert memory.generation >= generation
        assert memory.best_step >= best
        generation, best = memory.generation, memory.best_step
    # Every line that carries a number proves that it was given out.
    told = [line for line in lines if line["event"] != "tracker_started"]
    assert memory.generation == max((line.get("generation", 0) for line in told), default=0)


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"event": None},
        {"event": "apply"},
        {"event": "x", "time": "y"},
    ],
)
def test_lines_it_does_not_know_change_nothing(line):
    assert fold([line]) == RunMemory()


def test_a_tracker_that_starts_is_no_attempt():
    line = {
        "event": "tracker_started",
        "time": 1.0,
        "generation": 3,
        "host": "h",
        "pid": 1,
        "events_read": 0,
    }
    assert dataclasses.replace(fold([line]), tracker=None) == RunMemory()


def test_an_attempt_is_open_until_it_ends():
    memory = RunMemory()
    assert not memory.attempt_open
    for end in (interrupted(3), {"event": "finished", "step": 9, "exposure_s": 2.0}):
        memory.apply(started())
        assert memory.attempt_open
        memory.apply(committed(2))
        assert memory.attempt_open
        memory.apply(end)
        assert not memory.attempt_open
    assert memory.finished_step == 9
    memory.apply(started(2))
    assert memory.finished_step is None


def test_attempts_that_win_no_step_are_counted_in_a_row():
    memory = RunMemory()
    counts = []
    for step in (0, 5, 5, 4, 6, 6):
        memory.apply(interrupted(step))
        counts.append(memory.fruitless)
    assert counts == [1, 0, 1, 2, 0, 1]


def test_a_planned_end_neither_adds_to_the_count_nor_takes_from_it():
    memory = RunMemory()
    for step, kind, count in (
        (0, "worker_error", 1), (0, "resize", 1), (0, "hang", 2), (3, "drain", 0), (3, "drain", 0),
    ):  # fmt: skip
        memory.apply(interrupted(step, kind))
        assert memory.fruitless == count


def test_any_line_of_an_attempt_tells_that_it_began():
    memory = fold([started(1), {"event": "restored", "generation": 2, "step": 5}])
    assert (memory.generation, memory.attempt_open, memory.kept_step) == (2, True, 5)


def test_measurements_follow_the_last_saves_and_shrug_off_an_odd_one():
    memory = fold([committed(n, stall_s=1.0, upload_s=10.0) for n in range(5)])
    memory.apply(committed(6, stall_s=100.0, upload_s=1000.0))
    assert (memory.stall_s, memory.upload_s) == (1.0, 10.0)
    for n in range(7, 7 + RECENT_SAVES):
        memory.apply(committed(n, stall_s=3.0, upload_s=30.0))
    assert (memory.stall_s, memory.upload_s) == (3.0, 30.0)


def test_a_commit_ends_a_row_of_failed_saves():
    failed = {"event": "save_failed", "step": 1, "name": "x", "error": "y"}
    memory = fold([failed, failed, committed(2), failed])
    assert (memory.failed_saves, memory.failed_in_a_row) == (3, 1)


# ---- exposure by size -----------------------------------------------------------------------------


def told(memory: RunMemory) -> dict[int, tuple[float, dict[str, int]]]:
    return {s.world_size: (s.exposure_s, dict(s.failures)) for s in memory.seen()}


def test_exposure_and_failures_belong_to_the_size_that_had_them():
    memory = fold(
        [
            started(1, 512),
            committed(10) | {"exposure_s": 100.0},
            interrupted(15, "node_loss") | {"exposure_s": 150.0},
            started(2, 64),
            committed(20) | {"exposure_s": 180.0},
            interrupted(30, "resize") | {"exposure_s": 250.0},
            started(3, 512),
            interrupted(35, "worker_error") | {"exposure_s": 260.0},
        ]
    )
    assert told(memory) == {
        64: (100.0, {}),
        512: (160.0, {"node_loss": 1, "worker_error": 1}),
    }


def test_exposure_since_the_last_event_belongs_to_the_present_size():
    memory = fold([started(1, 8), committed(10) | {"exposure_s": 100.0}, started(2, 4)])
    memory.exposure_s += 30.0  # steps that the living tracker was told of
    assert told(memory) == {4: (30.0, {}), 8: (100.0, {})}
    memory.apply(committed(12) | {"exposure_s": 130.0})
    assert told(memory) == {4: (30.0, {}), 8: (100.0, {})}


@settings(max_examples=40, deadline=None)
@given(events)
def test_sizes_share_out_all_failures_and_all_exposure(lines):
    memory = fold(lines)
    assert sum(sum(s.failures.values()) for s in memory.seen()) == memory.failures
    most = max((line["exposure_s"] for line in lines if "exposure_s" in line), default=0.0)
    assert sum(s.exposure_s for s in memory.seen()) == pytest.approx(most)


def test_a_journal_of_the_run_can_still_be_read():
    lines = [started(1, 8), committed(5), interrupted(9), {"event": "finished", "step": 9}]
    for line in lines:
        line.pop("exposure_s", None)
    memory = fold(lines)
    assert told(memory) == {8: (0.0, {"worker_error": 1})}
    assert (memory.exposure_s, memory.finished_step) == (0.0, 9)
