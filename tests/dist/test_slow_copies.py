"""Copies that come in more slowly than saves: memory does not fill up with what waits to be copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.tiers.stack import Stack
from tests.tier_world import NODES, World

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("quick_disk")]

KEEP = 2
MEMORY = Stack(use=("memory", "durable"), replicas=2, memory_keep=KEEP)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, MEMORY, {"durable": 1000})
    made.begin(NODES)
    yield made
    made.fleet.close(drop_memory=False, generation=made.generation)


def held(world: World, node: str) -> set[int]:
    """Steps of which a node has something in memory."""
    folder = world.fleet.root(node) / CHECKPOINTS_DIR
    return {int(path.name.split("-")[1]) for path in folder.iterdir()} if folder.exists() else set()


def saves(world: World, steps: range) -> None:
    for step in steps:
        assert world.save(step), "saving goes on"
        world.settle()


@pytest.mark.parametrize("slow", ["verify", "replicate"])
@pytest.mark.parametrize("proved", [True, False])
def test_of_what_waits_to_be_copied_only_the_newest_few_stay(
    world: World, slow: str, proved: bool
) -> None:
    if proved:
        saves(world, range(10, 11))
    world.fleet.stuck = {(node, slow) for node in NODES}
    for step in range(20, 30):
        saves(world, range(step, step + 1))
        for node in NODES:
            assert {step - 1, step} & set(range(20, 30)) <= held(world, node), "the newest are kept"
            assert not proved or 10 in held(world, node), (
                "what is proved stays until another one is"
            )
            # Beside these only the one that is being copied.
            assert len(held(world, node)) <= proved + 1 + KEEP
    gone = [event for event in world.events("delete") if event["tier"] == "memory"]
    assert [event["step"] for event in gone] == list(range(21, 28))
    assert all("2 newer ones came before it could be read" in event["reason"] for event in gone)
    world.fleet.stuck = set()
    world.settle()
    assert world.events("replicated")[-1]["step"] == 29, (
        "then the newest one goes, not each of them"
    )
    assert all(held(world, node) <= {20, 28, 29} for node in NODES)
    assert world.begin(NODES).plan.name == checkpoint_name(29, 1)


def test_what_an_earlier_tracker_left_is_not_given_up_for_what_nobody_has_read(
    world: World,
) -> None:
    saves(world, range(10, 12))  # proved, as the tracker knows that dies now
    world.tracker = world.new_tracker()
    world.fleet.stuck = {(node, "verify") for node in NODES}
    saves(world, range(20, 26))
    assert all({10, 11, 24, 25} <= held(world, node) for node in NODES)
    assert all(len(held(world, node)) <= 2 + 1 + KEEP for node in NODES)
