"""A node's memory that takes nothing any more does not keep a run from its durable folder."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worlds
from worlds import history, make_config, make_data, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.config import PolicyConfig, TiersConfig
from ray_ckpt.tracker.journal import read_lines

pytestmark = pytest.mark.dist

NODES = ["a", "b"]
FULL_AFTER = 4


def _memory(base: Path, node: str) -> Path:
    return base / "nodes" / node / "memory"


def _train_on_nodes(rank: int, world: int, config: Any, base: Path, fill: bool) -> dict[str, Any]:
    from ray_ckpt import session
    from ray_ckpt.facts import check_run, tracker_options
    from ray_ckpt.tracker.core import TrackerCore
    from tests.fleet import LocalFleet

    nodes = NODES[:world]
    os.environ["MEMORY"] = str(_memory(base, nodes[rank]))

    def core(config: Any) -> TrackerCore:
        fleet = LocalFleet(base / "nodes", config.tiers.stack(), config.run_dir)
        return TrackerCore(check_run(config, {}), tracker_options(config), fleet=fleet)

    worlds.make_core = core
    session.Session.__init__ = functools.partialmethod(  # type: ignore[method-assign]
        session.Session.__init__, nodes=nodes, node=nodes[rank]
    )

    def break_memory(_: Any, step: int) -> None:
        if (
            fill and step == FULL_AFTER and rank == 0
        ):  # whose wait for a save is over when it is committed
            shutil.rmtree(_memory(base, "b"))
            _memory(base, "b").write_text("nothing fits below a file")

    return train(rank, world, config, on_step=break_memory)


def test_after_two_failed_saves_one_goes_past_the_nodes_and_so_does_the_last(
    tmp_path: Path,
) -> None:
    make_data(tmp_path / "data", [16] * 12)
    config = make_config(
        tmp_path,
        steps=14,
        policy=PolicyConfig(interval_steps=1),
        tiers=TiersConfig(
            use=("memory", "durable"), memory_folder="$MEMORY", durable_every_steps=1000
        ),
    )
    run_world(_train_on_nodes, 2, config, tmp_path, True)
    events = list(read_lines(config.run_dir / "journal.jsonl"))
    commits = [(e["step"], e["tier"]) for e in events if e["event"] == "commit"]
    failed = [e["step"] for e in events if e["event"] == "save_failed"]
    assert [at for at in commits if at[0] <= FULL_AFTER] == [
        (step, "memory") for step in range(1, FULL_AFTER + 1)
    ]
    later = [at for at in commits if at[0] > FULL_AFTER]
    assert later
    assert all(tier == "durable" for _, tier in later)
    assert len([step for step in failed if step < later[0][0]]) == 2, "the third one goes past them"
    assert commits[-1] == (config.steps, "durable")
    assert sorted(history(config)) == list(range(1, config.steps + 1)), "no step waited for a save"
    whole = {entry.step for entry in list_checkpoints(config.run_dir) if entry.usable}
    assert {step for step, _ in later} <= whole
    # What went past the nodes is a checkpoint as any other: the run goes on from it.
    _memory(tmp_path, "b").unlink()
    longer = replace(config, steps=16)
    [result] = run_world(_train_on_nodes, 1, longer, tmp_path, False)
    assert result["started"] == config.steps
