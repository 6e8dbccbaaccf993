"""A worker that dies while its group is waited for is noticed, and so is what it was that died."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from ray_ckpt.elastic import callbacks, pulse
from ray_ckpt.elastic.causes import Cause

SILENT = object()


class Worker:
    """Answers as it is told to: True, an error, or not at all."""

    def __init__(self) -> None:
        self.answer: Any = True
        self.asked = 0

    def execute_async(self, function: Any) -> Any:
        self.asked += 1
        return (self, self.asked)


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ref: Any) -> Any:
        if isinstance(ref[0].answer, Exception):
            raise ref[0].answer
        return ref[0].answer

    def wait(refs: list[Any], num_returns: int, timeout: float) -> Any:
        ready = [ref for ref in refs if ref[0].answer is not SILENT]
        return ready, [ref for ref in refs if ref not in ready]

    monkeypatch.setattr(pulse, "ray", SimpleNamespace(get=get, wait=wait))


def test_the_dead_are_told_once_and_the_silent_never() -> None:
    workers, now = [Worker() for _ in range(4)], [0.0]
    found = pulse.Pulse(workers, clock=lambda: now[0])
    workers[1].answer = SILENT
    now[0] += 2
    assert found.dead() == {}
    assert [worker.asked for worker in workers] == [1, 1, 1, 1]
    assert found.dead() == {}, "nobody is asked more often than once in a while"
    now[0] += 2
    assert found.dead() == {}
    assert [worker.asked for worker in workers] == [2, 1, 2, 2]
    workers[2].answer = RayActorError()
    workers[3].answer = RayTaskError("f", "an error of its own", ValueError())
    now[0] += 2
    assert found.dead() == {2: workers[2].answer}
    workers[1].answer = RayActorError()
    now[0] += 2
    assert found.dead() == {1: workers[1].answer}
    now[0] += 2
    assert found.dead() == {}


def test_a_resize_because_a_node_died_does_not_wait_for_a_save_and_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cluster's view shows a dead node before its workers' errors come: that looks like a wish to shrink."""
    told: list[tuple[str, dict[str, Any]]] = []

    class Tracker:
        def __init__(self, run: str) -> None:
            pass

        def call(self, method: str, **kwargs: Any) -> Any:
            told.append((method, kwargs))
            return {"request_save": 1, "status": {"settled_request": 0, "leaving": False}}.get(
                method
            )

    monkeypatch.setattr(callbacks, "RayTracker", Tracker)
    monkeypatch.setattr(pulse, "ASK_S", 0.0)
    group = callbacks._Group("r", 60.0)
    workers = [Worker() for _ in range(3)]
    workers[2].answer = RayActorError()
    group.start(workers)
    node_loss = Cause(kind="node_loss", text="node node3 died, with rank 2")
    monkeypatch.setattr(group, "cause", lambda: node_loss if group.errors.keys() == {2} else None)
    decisions = callbacks.ControllerDecisions(group, save_timeout_s=1e9)
    decisions.before_controller_execute_resize_decision(SimpleNamespace(num_workers=2))
    assert told[-1][0] == "interruption"
    assert told[-1][1]["kind"] == "node_loss"
    assert not group.workers
