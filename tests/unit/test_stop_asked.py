"""A stop waits for the save that it asked for, and for no other; nor for workers that have left already."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt import stopping


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
