"""What people are told of a checkpoint that only nodes have: as much as of any other, from the run's journal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt import cli
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.view.shelf_rows import ShelfRows
from ray_ckpt.view.told import chronicle_in
from tests.tier_world import World

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("quick_disk")]

THREE = Stack(
    use=("memory", "local", "durable"), local_folder="/of/each/node", replicas=1, memory_keep=3
)
METRICS = {"loss": 2.5, "validation_loss": 2.75}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Step 10 in all tiers, 20 in memory and local, 25 in memory."""
    made = World(tmp_path, THREE, {"local": 10, "durable": 1000})
    made.begin(["a", "b", "c"])
    for step in (10, 20, 25):
        assert made.save(step, metrics=METRICS, stall_s=0.25, guard={"param_norm": 7.5})
        made.settle()
    yield made
    made.fleet.close(drop_memory=False, generation=made.generation)


def call(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_ls_tells_of_it_what_its_manifest_says(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row["step"]: row for row in json.loads(call(capsys, "ls", world.run_dir, "--json"))}
    assert {step: row["tiers"] for step, row in rows.items()} == {
        25: ["memory"],
        20: ["memory", "local"],
        10: ["memory", "local", "durable"],
    }
    for step, row in rows.items():
        folder = world.fleet.root("a") / CHECKPOINTS_DIR / f"step-{step:08d}-g1"
        manifest = read_manifest(folder)
        assert row["bytes"] == manifest.total_bytes
        assert row["world_size"] == manifest.world_size
        assert row["sample_offset"] == manifest.sample_offset
        assert row["loss"] == manifest.metrics["loss"]
        assert row["committed_at"] == pytest.approx(manifest.committed_at, abs=1.0)
        assert (row["stall_s"], row["upload_s"]) == (0.25, 0.1)
        assert set(row["read_back"]) == set(row["tiers"]), "each tier was compared with it"
        assert row["verified_at"] == pytest.approx(time.time(), abs=60)
        assert row["fault"] is None
    table = {line.split()[0]: line for line in call(capsys, "ls", world.run_dir).splitlines()}
    for step in ("10", "20", "25"):
        assert " - " not in table[step], table[step]
    assert "committed on the nodes alone" in table["25"]


def test_show_tells_where_it_is_when_it_was_read_back_and_what_it_cost(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(step: int) -> dict[str, str]:
        lines = call(capsys, "show", world.run_dir, step).split("\n\n")[0].splitlines()
        return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines}

    durable, nodes = shown(10), shown(20)
    assert nodes["state"] == "committed on the nodes alone"
    for tier in ("memory", "local"):
        assert ", read back 2" in nodes[f"in {tier}"]
    assert "in durable" not in nodes
    assert ", read back 2" in durable["in durable"]
    for name in ("stall", "upload", "world_size", "metrics.loss", "guard.param_norm", "files"):
        assert nodes[name] == durable[name], name
    assert nodes["sample_offset"].startswith("20 ")
    told = json.loads(call(capsys, "show", world.run_dir, 25, "--json"))
    assert (told["loss"], told["stall_s"]) == (2.5, 0.25)
    assert "memory" in told["read_back"]


def test_a_copy_that_is_gone_is_not_said_to_have_been_read_back(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in ("a", "b", "c"):
        world.fleet.kill(node)  # with its memory; what its disk had cannot be had either
    world.fleet.dead.clear()
    for path in (world.base / "nodes").glob("*/memory"):
        path.rename(path.with_name("gone"))
    world.begin(["a", "b", "c"])
    left = world.run_dir / CHECKPOINTS_DIR / "step-00000025-g1"
    left.mkdir()  # of a copy that came to nothing
    rows = {row["step"]: row for row in json.loads(call(capsys, "ls", world.run_dir, "--json"))}
    assert rows[25]["tiers"] == []
    assert rows[25]["committed_at"] is None, "it is committed nowhere any more"
    assert rows[20]["tiers"] == ["local"]
    assert set(rows[20]["read_back"]) == {"local"}


def test_the_dashboard_tells_of_it_too(world: World) -> None:
    rows: list[dict[str, Any]] = []
    shelf = ShelfRows(chronicle_in(world.run_dir), None)
    rows = [shelf.row(entry) for entry in shelf.entries]
    assert [row["step"] for row in rows] == [25, 20, 10]
    for row in rows:
        assert (row["loss"], row["stall_s"], row["world_size"]) == (2.5, 0.25, 3)
        assert row["bytes"] > 0
