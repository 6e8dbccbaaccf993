"""What real workers leave on record adds up to the time that they took."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import events, history, make_config, make_data, run_world, train

from ray_ckpt.config import PolicyConfig
from ray_ckpt.tracker.recall import read_ledger

pytestmark = pytest.mark.dist

PAUSE_S = 0.2


def _train_announced(rank: int, world: int, config: Any, stop_after: int | None) -> Any:
    """Trains with a tracker that says when its job began, and looks at something after each step."""
    import worlds

    from ray_ckpt.clocks import now

    begun, make_core = now(), worlds.make_core

    def make(config: Any) -> Any:
        core = make_core(config)
        core.announce(begun)
        return core

    worlds.make_core = make
    return train(rank, world, config, stop_after, on_step=lambda *_: time.sleep(PAUSE_S))


def test_the_ledger_of_a_run_that_was_left_and_went_on_is_its_wall_time(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    config = replace(make_config(tmp_path), policy=PolicyConfig(interval_steps=5))
    run_world(_train_announced, 2, config, 8)  # saves step 5, and leaves
    begun = time.monotonic()
    run_world(_train_announced, 2, config, None)
    most_s = time.monotonic() - begun
    ledger = read_ledger(config.run_dir)
    assert ledger is not None
    first, last = events(config)[0], events(config, "finished")[0]
    wall_s = last["monotonic"] - first["monotonic"] + first["submitted_ago_s"]
    assert ledger.wall_s == pytest.approx(wall_s, rel=1e-3)
    assert sum(ledger.buckets.values()) == pytest.approx(wall_s, rel=1e-3)
    lines = history(config)
    useful_s = sum(x["step_time_s"] - x["data_wait_s"] - x["between_s"] for x in lines.values())
    assert 0 < ledger.buckets["useful"] <= useful_s
    assert ledger.lost_steps == 3
    assert ledger.buckets["rework"] > 0
    # Between two steps somebody looked at something; after the last of an attempt nobody asked for another.
    assert ledger.buckets["evaluation"] == pytest.approx((7 + 6) * PAUSE_S, rel=0.3)
    assert ledger.buckets["unknown"] == 0
    assert ledger.buckets["idle"] > 0
    (restart,) = ledger.restarts
    assert (restart.kind, restart.complete, restart.world_size) == ("lost", True, 2)
    assert 0 < restart.seconds < most_s
