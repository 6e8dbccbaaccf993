"""Damage of each kind in each tier of the nodes, in a replica alone, and in all of them: no byte of it is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.checkpoint.manifest import encode_manifest, read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.tiers.stack import Stack
from tests.tier_world import NODES, World

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("quick_disk")]

THREE = Stack(use=("memory", "local", "durable"), local_folder="/of/each/node", replicas=1)
PATH = "__1_0.distcp"  # node b wrote it


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Steps 10 and 20, each in every tier."""
    made = World(tmp_path, THREE, {"local": 1, "durable": 1})
    made.begin(NODES)
    for step in (10, 20):
        assert made.save(step)
        made.settle()
    yield made
    made.fleet.close(drop_memory=False, generation=made.generation)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _swap(path: Path) -> None:
    """The same file of the checkpoint before, which is as long and as whole as it was written."""
    path.write_bytes((path.parents[1] / checkpoint_name(10, 1) / path.name).read_bytes())


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A manifest that says something else, sealed as one that is right."""
    path.write_bytes(encode_manifest(change(json.loads(path.read_bytes()))))


def _of_manifest(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: change(path.with_name(MANIFEST_NAME))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": _flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "missing": lambda path: path.unlink(),
    "extra": lambda path: path.with_name("__9_0.distcp").write_bytes(b"of nobody"),
    "swapped": _swap,
    "manifest flipped": _of_manifest(_flip),
    "manifest half-written": _of_manifest(lambda path: path.write_bytes(path.read_bytes()[:300])),
    "manifest empty": _of_manifest(lambda path: path.write_bytes(b"")),
    "manifest missing": _of_manifest(lambda path: path.unlink()),
    "manifest of a later schema": _of_manifest(
        lambda path: _rewrite(path, lambda document: {**document, "schema": 99})
    ),
}
WHERE = {
    "what its own node wrote": [("b", "memory")],
    "a replica": [("c", "memory")],
    "all memory": [("b", "memory"), ("c", "memory")],
    "a disk": [("b", "local")],
    "all that nodes have": [("b", "memory"), ("c", "memory"), ("b", "local")],
}


def restored(world: World, nodes: list[str]) -> None:
    """Every worker gets the newest checkpoint as it was written, or the attempt goes by another one."""
    world.tracker.interruption("worker_error", "it failed", group=f"g{world.generation}")
    plan = world.begin(nodes).plan
    for _ in range(3):
        assert plan is not None
        assert plan.manifest.step == 20, "a good copy of each file is somewhere"
        if not plan.sources:
            folder = world.run_dir / CHECKPOINTS_DIR / plan.name
            assert verify_files(folder, read_manifest(folder)) == []
            return
        folders = {node: world.provided(plan, node) for node in nodes}
        for node, folder in folders.items():
            if folder is not None:
                faults = verify_files(folder, plan.manifest)
                assert [f for f in faults if f.path != "__9_0.distcp"] == [], (node, faults)
        if all(folders.values()):
            world.tracker.restored(world.generation, 20, 0.1, plan.name, "r")
            return
        plan = world.tracker.not_gathered(world.generation, plan.name, "a copy was bad")
    raise AssertionError("it never ends")


def _cases() -> list[Any]:
    """Each kind with each place; in the default run each kind in two places."""
    places = list(WHERE)
    return [
        pytest.param(
            how, where, id=f"{how}, {where}", marks=[] if (at - nth) % len(places) < 2 else [pytest.mark.slow]
        )
        for nth, how in enumerate(DAMAGES)
        for at, where in enumerate(places)
    ]  # fmt: skip


@pytest.mark.parametrize(("how", "where"), _cases())
def test_damage_anywhere_on_the_nodes_costs_nothing_but_the_copy(
    world: World, how: str, where: str
) -> None:
    name = checkpoint_name(20, 1)
    for node, tier in WHERE[where]:
        place = world.fleet.root(node, tier) / CHECKPOINTS_DIR / name / PATH
        assert place.exists(), "it is where it should be"
        DAMAGES[how](place)
    restored(world, NODES)
    world.settle()
    # Whatever of it is offered later is good again, and the next save is as any other.
    assert world.save(30)
    world.settle()
    assert world.events("replicated")[-1]["step"] == 30
    restored_again = world.begin(["a", "d"]).plan
    assert restored_again.manifest.step == 30
