"""Trackers and holders that sleep, are replaced, and wake: they may write, and never commit, promote or delete."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from holding import Nodes
from test_tiers_killed import MEMORY, Life, Story, in_child

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.tiers import holder
from ray_ckpt.tracker import health, tierdesk

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(tierdesk, "QUICK_S", 0.3)
    monkeypatch.setattr(holder, "_FETCH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(health, "ASK_AFTER_S", 0.2)
    monkeypatch.setattr(health, "ANSWER_S", 0.3)


def committed(nodes: Nodes) -> set[tuple[str, str]]:
    """Every manifest there is, by its place and name."""
    roots = [nodes.run_dir, *(root for node in nodes.alive() for root in nodes.roots(node))]
    return {
        (str(root), entry.folder.name)
        for root in roots
        for entry in list_checkpoints(root)
        if entry.committed
    }


def until(what: str, holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@pytest.mark.parametrize(
    "point",
    [
        "holder.commit@2",
        "holder.copied",
        "wire.receive@2",
        "wire.send",
        "depot.piece",
        "depot.name",
        "depot.drop",
    ],
)
def test_a_frozen_holder_is_replaced_the_run_gets_on_and_what_wakes_changes_nothing(
    tmp_path: Path, point: str
) -> None:
    story = Story(tmp_path, MEMORY, 1)

    def life() -> None:
        me = Life(story.nodes, story.writer, "1", "", {"n001": f"{point}=stop"})
        kill, zombies = me.fleet.renew, []

        def abandon(node: str) -> None:
            """As on a node that cannot be reached: nobody ends what hangs there."""
            if node in me.fleet.children and is_stopped(me.fleet.children[node].pid):
                zombies.append(me.fleet.children.pop(node))
            else:
                kill(node)

        me.fleet.renew = abandon  # type: ignore[method-assign]
        me.begin(story.nodes.alive())
        for _ in range(40):
            me.save()
            for _ in range(10):
                me.look()
            if zombies:
                break
            time.sleep(0.05)
        assert zombies, "it did not freeze"
        assert me.save() or me.save() or me.save(), "no save succeeds beside a frozen holder"
        me.settle(me.step)
        me.core.interruption("hang", "a node", group="g1")
        me.begin(story.nodes.alive())
        me.settle_anything()
        before = committed(story.nodes)
        for zombie in zombies:
            os.kill(zombie.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert committed(story.nodes) == before
        assert me.save()
        me.settle(me.step)

    assert in_child(life) == 0
    story.check(point)
    story.end()


@pytest.mark.parametrize(
    "point",
    [
        "desk.commit@3",
        "desk.arrived",
        "desk.drop",
        "durable.seal",
        "commit.placed@3",
        "commit.check@3",
    ],
)
def test_a_frozen_tracker_is_replaced_and_changes_nothing_when_it_wakes(
    tmp_path: Path, point: str
) -> None:
    story = Story(tmp_path, MEMORY, 2)

    def frozen() -> None:
        me = Life(story.nodes, story.writer, "2", f"{point}=stop", {})
        me.begin(story.nodes.alive())
        for _ in range(200):
            me.saves(1)

    child = os.fork()
    if not child:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it ends with an error, as it must
            frozen()
        finally:
            os._exit(7)
    until(f"it freezes at {point}", lambda: is_stopped(child))
    story.check(point)

    def next_life() -> None:
        me = Life(story.nodes, story.writer, "3", "", {})
        me.begin(story.nodes.alive())
        me.saves(3)
        me.save()
        me.settle(me.step)

    assert in_child(next_life) == 0
    story.check(point)
    before = committed(story.nodes)
    os.kill(child, signal.SIGCONT)
    until("it ends", lambda: os.waitpid(child, os.WNOHANG)[0] != 0)
    assert committed(story.nodes) == before
    story.end()
