"""A holder that hangs delays the saves, and nothing else: what a tracker does while one of its commits waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from holding import Nodes
from test_tiers_killed import MEMORY, Life

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME
from ray_ckpt.errors import StaleGenerationError
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker import health
from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines
from ray_ckpt.tracker.turn import Turn
from tests.fleet import LocalFleet
from tests.tier_world import World

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("quick_disk")]

TWO = Stack(use=("memory", "durable"), replicas=1)


def until(what: str, holds: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "step_time_s": 0.1, "sample_offset": step, "world_size": 3}


def test_while_a_commit_waits_for_a_stopped_holder_the_tracker_serves_all_other_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    nodes = Nodes(tmp_path, MEMORY)
    for number in range(3):
        nodes.boot(f"n{number}")
    reader, writer = os.pipe()
    me, turn = Life(nodes, writer, "1", "", {}), Turn()
    me.core._places.desk._waiting = turn.given_up  # type: ignore[attr-defined]
    me.begin(nodes.alive())

    def events(kind: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(nodes.run_dir / JOURNAL_NAME) if e["event"] == kind]

    try:
        for _ in range(6):  # the first one is durable, and the sixth is due
            assert me.save()
            if me.step == 1:
                me.settle(1)
        time.sleep(0.3)  # holders have copied it, and nobody has asked them yet
        assert [e["step"] for e in events("promote")] == [1]
        stopped = me.fleet.children["n2"]
        os.kill(stopped.pid, signal.SIGSTOP)
        outcome = list[bool]()

        def commit() -> None:
            with turn:
                outcome.append(me.save())

        thread = threading.Thread(target=commit)
        thread.start()
        until("the commit begins", lambda: me.step == 7)
        time.sleep(0.1)
        began_s = time.monotonic()
        with turn:
            told = me.core.steps(me.generation, [line(step) for step in range(1, 9)])
            assert me.core.status()["step"] == 8
            number = me.core.request_save("somebody asks")
            assert me.core.steps(me.generation, []).save_request == number
        assert told.every_steps > 0, "decisions go on"

        def arrived() -> bool:
            with turn:
                me.core.advance()
            return [e["step"] for e in events("promote")] == [1, 6]

        until("another tier gets its copy", arrived, 5.0)
        assert time.monotonic() - began_s < 5.0
        assert thread.is_alive(), "and all the while the commit waits"
        os.kill(stopped.pid, signal.SIGCONT)
        thread.join(20)
        assert outcome == [True], "a holder that only slept commits its part"
        assert [e["step"] for e in events("commit")] == list(range(1, 8))
    finally:
        me.fleet.close(drop_memory=False, generation=0)
        os.close(reader)
        os.close(writer)


def waiting_once(do: Callable[[], Any], *, answered: bool) -> Callable[[], Any]:
    """What others do in their turn while a commit waits, before or after its nodes have answered."""
    left = [do]

    @contextmanager
    def waiting() -> Iterator[None]:
        if left and not answered:
            left.pop()()
        yield
        if left:
            left.pop()()

    return waiting


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, TWO, {"durable": 20})
    made.begin(["a", "b"])
    assert made.save(10)
    made.settle()
    yield made
    made.fleet.close(drop_memory=False, generation=made.generation)


def test_a_commit_that_another_attempt_overtook_while_it_waited_changes_nothing(
    world: World,
) -> None:
    old = world.generation
    plans = list[Any]()
    world.waiting = waiting_once(  # type: ignore[method-assign]
        lambda: plans.append(world.begin(["a", "b"]).plan), answered=True
    )
    with pytest.raises(StaleGenerationError, match="attempt 2 began"):
        world.save(15)
    assert world.generation == old + 1
    assert [e["step"] for e in world.events("commit")] == [10]
    assert not world.events("save_failed")
    # All nodes had committed it: it is what the attempt that began restores.
    [plan] = plans
    assert plan.name == "step-00000015-g1"
    assert world.provided(plan, "a") is not None
    world.tracker.restored(world.generation, 15, 0.1, plan.name, "r")
    assert world.save(20)


def test_a_holder_that_was_replaced_while_a_commit_waited_is_not_ended_for_it(
    world: World,
) -> None:
    def replace() -> None:
        world.fleet.renew("b")
        world.fleet.gather(["b"])

    world.waiting = waiting_once(replace, answered=False)  # type: ignore[method-assign]
    assert not world.save(15)
    assert "another one took its place" in world.events("save_failed")[-1]["error"]
    new = world.fleet.holders["b"]
    world.settle()
    assert world.save(20)
    assert world.fleet.holders["b"] is new
    place = world.fleet.root("b") / CHECKPOINTS_DIR / "step-00000020-g1" / MANIFEST_NAME
    assert place.exists()


def test_a_holder_that_was_silent_when_the_attempt_ended_is_not_waited_for_again(
    world: World,
) -> None:
    before = dict(world.fleet.holders)
    world.fleet.stuck = {("b", "inventory")}
    world.tracker.interruption("worker_error", "it failed", group="g1")
    assert world.fleet.holders == before, "nobody is ended while nobody waits for a new one"
    world.fleet.stuck = set()
    attempt = world.begin(["a", "b"])
    assert world.fleet.holders["a"] is before["a"]
    assert world.fleet.holders["b"] is not before["b"]
    assert attempt.plan.name == "step-00000010-g1", "the new one finds what the old one held"
    assert world.provided(attempt.plan, "b") is not None


def test_whoever_was_waited_for_in_vain_is_asked_at_once_whether_it_lives(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path / "nodes", TWO, tmp_path / "run")
    fleet.gather(["a", "b"])
    fleet.stuck = {("a", "alive"), ("b", "alive")}
    checks, hung, now_s = health.Health(fleet), dict[str, float](), 0.0
    checks.hurry("b", now_s)
    while len(hung) < 2:
        hung |= dict.fromkeys(checks.look(["a", "b"], now_s), now_s)
        now_s += 1.0
        assert now_s < 300
    assert hung["b"] == health.ANSWER_S
    assert hung["a"] == health.ASK_AFTER_S + health.ANSWER_S
    fleet.close(drop_memory=False, generation=0)
