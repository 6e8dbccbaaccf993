"""Disks of nodes that are really full, or really broken: that tier waits, and the others and the training go on.

The errors are the kernel's: a small tmpfs, and a disk in a file whose end is cut off below it. Where a test may not
mount, it skips; the same errors are put in by name in ``test_tier_faults.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_tiers_killed import in_child

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.tiers.stack import Stack
from tests.mounts import BreakableDisk, fill, mount_apart, mount_small
from tests.tier_world import World

pytestmark = pytest.mark.dist

NODES = ["a", "b", "c"]
THREE = Stack(
    use=("memory", "local", "durable"), local_folder="/of/each/node", replicas=1, pause_s=0.0, tries=2
)  # fmt: skip
NOT_ALLOWED = 77


class NotAllowed(Exception):
    """This machine does not let a test mount."""


def alone(action: Callable[[], None]) -> None:
    """Runs it in a process of its own, whose disks are seen by nobody else."""

    def guarded() -> None:
        import os

        try:
            if not mount_apart():
                raise NotAllowed
            action()
        except NotAllowed:
            os._exit(NOT_ALLOWED)

    code = in_child(guarded)
    if code == NOT_ALLOWED:
        pytest.skip("a disk cannot be mounted here; the same errors are put in by other tests")
    assert code == 0, "what went wrong is told above"


def need(mounted: bool) -> None:
    if not mounted:
        raise NotAllowed


def settle(world: World) -> None:
    for _ in range(20):
        world.tracker.advance()


def told(world: World, kind: str, tier: str) -> list[int]:
    return [event["step"] for event in world.events(kind) if event["tier"] == tier]


def restorable(world: World, step: int) -> None:
    """The newest one is given back, whole, to every node that has room for it."""
    plan = world.begin(NODES).plan
    assert plan.name == checkpoint_name(step, world.generation - 1)
    for node in ("a", "b"):
        folder = world.provided(plan, node)
        assert folder is not None
        assert verify_files(folder, plan.manifest) == []
    world.tracker.restored(world.generation, step, 0.1, plan.name, "r")


def copies(world: World, step: int, path: str, tier: str) -> set[str]:
    """Nodes that have a file of a checkpoint."""
    name = checkpoint_name(step, 1)
    roots = {node: world.fleet.root(node, tier) / CHECKPOINTS_DIR / name / path for node in NODES}
    return {node for node, place in roots.items() if place.exists()}


def test_the_full_memory_of_one_node_costs_no_replica(tmp_path: Path) -> None:
    def life() -> None:
        world = World(tmp_path, THREE, {"local": 1, "durable": 1})
        place = tmp_path / "nodes" / "c" / "memory"
        need(mount_small(place, "256k"))
        world.begin(NODES)
        assert world.save(10)
        settle(world)
        assert copies(world, 10, "__1_0.distcp", "memory") == {"b", "c"}
        assert world.save(20)
        filler = fill(place)  # workers have written: what comes now are copies
        settle(world)
        assert copies(world, 20, "__1_0.distcp", "memory") == {"b", "a"}, "another node takes it"
        assert told(world, "replicated", "memory") == [10, 20]
        assert told(world, "promote", "durable") == [10, 20]
        half = (world.fleet.root("c") / CHECKPOINTS_DIR).rglob(".*")
        assert {path.name for path in half} <= {".metadata"}
        restorable(world, 20)
        filler.unlink()
        assert world.save(30)
        settle(world)
        assert [(e["step"], e["copies"]) for e in world.events("replicated")][-1] == (30, 2)
        world.fleet.close(drop_memory=False, generation=world.generation)

    alone(life)


def test_where_all_memory_is_full_replicas_are_given_up_and_all_else_goes_on(
    tmp_path: Path,
) -> None:
    def life() -> None:
        world = World(tmp_path, THREE, {"local": 1, "durable": 1})
        places = [tmp_path / "nodes" / node / "memory" for node in NODES]
        need(all(mount_small(place, "256k") for place in places))
        world.begin(NODES)
        assert world.save(10)
        settle(world)
        assert world.save(20)
        fillers = [fill(place) for place in places]
        settle(world)
        [failed] = [e for e in world.events("promote_failed") if e["tier"] == "memory"]
        assert failed["step"] == 20
        assert "the tier is full" in failed["error"]
        assert told(world, "promote", "local") == [10, 20]
        assert told(world, "promote", "durable") == [10, 20]
        for filler in fillers:
            filler.unlink()
        restorable(world, 20)
        assert world.save(30)
        settle(world)
        assert [(e["step"], e["copies"]) for e in world.events("replicated")][-1] == (30, 2)
        world.fleet.close(drop_memory=False, generation=world.generation)

    alone(life)


@pytest.mark.parametrize("how", ["full", "broken"])
def test_a_disk_of_one_node_that_takes_nothing_keeps_nothing_else_waiting(
    tmp_path: Path, how: str
) -> None:
    """What the node cannot keep another one does, which has a replica of it in memory."""

    def life() -> None:
        world = World(tmp_path, THREE, {"local": 1, "durable": 1})
        place = tmp_path / "nodes" / "b" / "local"
        disk = BreakableDisk(tmp_path / "disk", place)
        need(disk.mount() if how == "broken" else mount_small(place, "256k"))
        world.begin(NODES)
        assert world.save(10)
        settle(world)
        assert copies(world, 10, "__1_0.distcp", "local") == {"b"}
        if how == "broken":
            disk.spoil()
            depot = world.fleet.holders["b"]._depots["local"]
            [fault] = depot.verify(checkpoint_name(10, 1), ["__1_0.distcp"])
            assert "Input/output error" in fault.fault
            assert fault.unreadable, "an error is no evidence against the bytes"
        else:
            fill(place)
        for step in (20, 30):
            assert world.save(step), "training and saving go on"
            settle(world)
        for tier in ("local", "durable"):
            assert told(world, "promote", tier) == [10, 20, 30]
        assert told(world, "replicated", "memory") == [10, 20, 30]
        assert [e["tries"] for e in world.events("promote") if e["tier"] == "local"] == [1, 2, 2]
        assert copies(world, 30, "__1_0.distcp", "local") == {"c"}
        restorable(world, 30)
        world.fleet.close(drop_memory=False, generation=world.generation)

    alone(life)


def test_where_all_disks_of_the_nodes_break_the_tier_is_given_up_and_told(tmp_path: Path) -> None:
    def life() -> None:
        world = World(tmp_path, THREE, {"local": 1, "durable": 1})
        disks = [
            BreakableDisk(tmp_path / f"disk-{node}", tmp_path / "nodes" / node / "local")
            for node in NODES
        ]
        need(all(disk.mount() for disk in disks))
        world.begin(NODES)
        assert world.save(10)
        settle(world)
        for disk in disks:
            disk.spoil()
        assert world.save(20)
        settle(world)
        [failed] = [e for e in world.events("promote_failed") if e["tier"] == "local"]
        assert failed["step"] == 20
        # Which of the two a write gets is the kernel's business.
        assert any(word in failed["error"] for word in ("Input/output error", "No space left"))
        assert told(world, "promote", "durable") == [10, 20]
        assert told(world, "replicated", "memory") == [10, 20]
        restorable(world, 20)
        world.fleet.close(drop_memory=False, generation=world.generation)

    alone(life)
