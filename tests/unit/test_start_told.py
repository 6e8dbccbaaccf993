"""Ray's callbacks make the marks of a restart, and an end or a start that cannot be told stops nothing."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.elastic import callbacks
from ray_ckpt.elastic.causes import Cause
from ray_ckpt.elastic.startmarks import StartMarks
from ray_ckpt.errors import StorageError
from ray_ckpt.tracker.records import Verdict


class RestartingState:
    """Named as Ray's own."""


class RunningState:
    """Named as Ray's own."""


class Workers:
    """A group of two."""

    def get_workers(self) -> list[Any]:
        return [object(), object()]


class Controller:
    """Calls the callbacks as Ray Train's controller does, with a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.told, self.is_deaf = 100.0, [], False
        self.watch, _, self.decisions = callbacks.make_callbacks(
            "run", save_timeout_s=1.0, node_loss_wait_s=1.0
        )
        self.group = self.decisions._group
        self.group.marks = StartMarks(lambda: self.now)
        monkeypatch.setattr(callbacks, "RayTracker", lambda run: self)
        monkeypatch.setattr(callbacks, "hear_sigterm", lambda workers: None)
        monkeypatch.setattr(callbacks.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(self.group, "cause", self.find)

    def find(self) -> Cause:
        self.now += 20.0  # as long as the cluster takes to notice a dead node
        return Cause(kind="node_loss", text="gone")

    def call(self, method: str, **more: Any) -> Any:
        if self.is_deaf:
            raise StorageError("the tracker is gone")
        self.told.append((method, more))
        if method == "request_save":
            return 1
        return (
            Verdict(go_on=True, reason="")
            if method == "interruption"
            else {"settled_request": 0, "leaving": False}
        )

    def look(self, times: int) -> None:
        """The controller finds no room for a group, each second."""
        state = RestartingState()
        for _ in range(times):
            self.decisions.after_controller_state_update(state, state)
            self.now += 1.0

    def start(self, *, comes_up: bool = True) -> None:
        self.decisions.before_controller_execute_resize_decision(None)
        self.now += 4.0
        if not comes_up:
            self.decisions.before_controller_execute_failure_decision(None)
            return
        assert self.watch.before_init_train_context([]) == {}
        self.now += 2.0
        self.watch.after_worker_group_start(Workers())

    def starts(self) -> list[dict[str, Any]]:
        return [more for method, more in self.told if method == "group_started"]


@pytest.fixture
def controller(monkeypatch):
    return Controller(monkeypatch)


def test_waiting_for_room_is_told_apart_from_starting(controller):
    controller.start()
    controller.look(3)  # with a group, nobody looks for room
    state = RunningState()
    controller.decisions.after_controller_state_update(state, state)
    controller.decisions.before_controller_execute_failure_decision(None)
    controller.look(7)
    controller.start(comes_up=False)
    controller.look(1)
    controller.start()
    usual = {"world_size": 2, "spares": 0, "asked_ago_s": 6.0, "workers_ago_s": 2.0}
    assert controller.starts() == [{**usual, "waited_s": 0.0}, {**usual, "waited_s": 7 + 4 + 1.0}]
    (ended,) = [more for method, more in controller.told if method == "interruption"]
    assert (ended["kind"], ended["noticed_ago_s"]) == ("node_loss", 20.0)


def test_a_resize_counts_from_when_its_save_is_done(controller, monkeypatch):
    controller.start()

    def save(tracker: Any, workers: int) -> None:
        controller.now += 9.0

    monkeypatch.setattr(controller.decisions, "_save_first", save)

    class Resize:
        num_workers = 3

    controller.decisions.before_controller_execute_resize_decision(Resize())
    controller.now += 5.0
    controller.watch.before_init_train_context([])
    controller.watch.after_worker_group_start(Workers())
    assert controller.starts()[1]["asked_ago_s"] == 5.0
    assert [more["kind"] for method, more in controller.told if method == "interruption"] == [
        "resize"
    ]


def test_a_tracker_that_cannot_be_told_keeps_no_group_from_training(controller):
    controller.is_deaf = True
    controller.start()
    assert len(controller.group.workers) == 2
