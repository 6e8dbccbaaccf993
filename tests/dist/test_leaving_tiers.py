"""Workers leave a node when their step is where the node's end cannot reach it, and not before."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker.departures import Drain
from tests.tier_world import World

pytestmark = pytest.mark.usefixtures("quick_disk")

NODES = ["a", "b", "c"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    stack = Stack(use=("memory", "durable"), replicas=1)
    made = World(tmp_path, stack, {"durable": 1000})
    made.begin(NODES)
    assert made.save(1)
    made.settle()  # the first one is in the durable tier, and the next is due in 1000 steps
    yield made
    made.fleet.close(drop_memory=False, generation=made.generation)


def drain(world: World, *nodes: str) -> None:
    deadline = time.time() + 600.0
    world.tracker.draining([Drain(node=n, name=n, deadline=deadline) for n in nodes])
    assert world.tracker.memory.leave is not None, "how long a save takes is not known"


@pytest.mark.parametrize("node", NODES)
def test_memory_on_nodes_that_stay_is_enough_once_it_is_there(world: World, node: str) -> None:
    drain(world, node)
    assert "not committed" in world.tracker.obstacle(world.generation, 5)
    name, desk = checkpoint_name(5, world.generation), world.tracker._places.desk
    desk.advance = lambda: None  # the holders are slow
    assert world.save(5)
    assert not desk.outlives(name, {node}), "every node has a part that is nowhere else"
    del desk.advance
    world.settle()
    assert world.tracker.obstacle(world.generation, 5) == ""
    assert not world.durable(name), "the durable tier is not waited for"
    world.tracker.interruption("worker_error", "the workers left", group="g1")
    world.fleet.kill(node)
    assert world.begin([n for n in NODES if n != node]).plan.name == name


@pytest.mark.parametrize("gone", list(itertools.combinations(NODES, 2)))
def test_more_nodes_than_replicas_take_a_copy_in_the_durable_tier(
    world: World, gone: tuple[str, ...]
) -> None:
    drain(world, *gone)
    assert world.save(5)
    name = checkpoint_name(5, world.generation)
    for _ in range(100):
        if not world.tracker.obstacle(world.generation, 5):
            break
        world.settle()
    outlives = world.tracker._places.desk.outlives(name, set(gone))
    assert world.durable(name) or outlives
    assert not all(
        world.tracker._places.desk.outlives(name, set(pair))
        for pair in itertools.combinations(NODES, 2)
    ), "one replica does not outlive any two nodes"
