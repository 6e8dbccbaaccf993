"""A stop waits for the save that it asked for, and for no other; nor for workers that have left. It ends one job."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt import stopping
from ray_ckpt.tracker.memory import RunMemory


class Tracker:
    """Answers with the states that a run goes through, the last one for ever."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = list(states)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, **kwargs: Any) -> Any:
        if method == "status":
            return self.states.pop(0) if len(self.states) > 1 else self.states[0]
        self.calls.append((method, kwargs))
        return {"request_save": 4, "durable": ""}.get(method)


def state(**changes: Any) -> dict[str, Any]:
    usual = {"attempt_open": True, "generation": 2, "settled_request": 3, "last_commit_step": 9}
    return usual | changes


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping.time, "sleep", lambda seconds: None)


def stop(tracker: Tracker, patience: int = 50) -> list[tuple[str, dict[str, Any]]]:
    left = [patience]

    def going_on() -> bool:
        left[0] -= 1
        return left[0] > 0

    stopping._save_and_note(tracker, "the job got SIGTERM", going_on)
    assert left[0] > 0, "it waited in vain"
    return tracker.calls


def test_a_save_that_was_under_way_is_not_the_one_that_is_waited_for() -> None:
    under_way = state(last_commit_step=10)
    mine = state(settled_request=4, last_commit_step=12)
    calls = stop(Tracker(state(), state(), under_way, under_way, mine))
    assert calls[1] == ("durable", {"generation": 2, "step": 12})
    assert calls[-1][1]["kind"] == "user_stop"


@pytest.mark.parametrize("gone", [{"attempt_open": False}, {"generation": 3}])
def test_workers_that_got_the_signal_too_and_left_are_not_waited_for(gone: dict[str, Any]) -> None:
    calls = stop(Tracker(state(), state(), state(**gone)))
    assert [method for method, _ in calls] == ["request_save", "interruption"]


def started(time_s: float, submitted_s: float, **changes: Any) -> dict[str, Any]:
    """A tracker's first words, at ``time_s``; its job was submitted at ``submitted_s``."""
    usual = {"event": "tracker_started", "time": time_s, "monotonic": time_s, "boot": "b"}
    return usual | {"submitted_ago_s": time_s - submitted_s} | changes


@pytest.mark.parametrize("attempt", [False, True])
@pytest.mark.parametrize(
    ("next_tracker", "asked_still"),
    [
        # The tracker died and was started again: the job is the same, and so is what is asked of it.
        (started(70.0, 40.0), True),
        (started(70.0, 40.0, time=5.0), True),
        # Another job, which may be long in coming up, or on another machine.
        (started(70.0, 65.0), False),
        (started(300.0, 65.0), False),
        (started(70.0, 65.0, monotonic=12.0, boot="c"), False),
        ({"event": "tracker_started", "time": 70.0}, False),
    ],
)
def test_a_stop_is_asked_of_one_job_and_not_of_the_next(
    next_tracker: dict[str, Any], asked_still: bool, attempt: bool
) -> None:
    """A job that was killed, or stopped while no attempt was open, has no word of its end on record."""
    memory = RunMemory()
    memory.apply(started(50.0, 40.0))
    if attempt:
        memory.apply({"event": "attempt_started", "generation": 1, "world_size": 2, "time": 55.0})
    memory.apply({"event": "stop_requested", "reason": "somebody", "time": 60.0})
    memory.apply(next_tracker)
    assert memory.stop_request == ("somebody" if asked_still else "")
