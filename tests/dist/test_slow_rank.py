"""A rank whose forward pass is slow is named, although every rank takes as long for a step as it does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from worlds import events, history, make_config, make_data, run_world

from ray_ckpt.config import ElasticConfig, PolicyConfig

pytestmark = pytest.mark.dist

SLEEP_S = 0.2


def train_slowly(rank: int, world: int, config: Any, slow: int) -> str:
    """:func:`worlds.train` with one rank that sleeps in each forward pass; returns where the rank is at the end."""
    import worlds

    from ray_ckpt.elastic.whereabouts import HERE

    opened = worlds.open_session

    def open_session(rank: int, config: Any) -> Any:
        session, state, model = opened(rank, config)
        if rank == slow:
            model.register_forward_pre_hook(lambda module, args: time.sleep(SLEEP_S))
        return session, state, model

    worlds.open_session = open_session
    worlds.train(rank, world, config)
    return HERE.now.phase


def test_a_slow_rank_is_named_with_its_factor(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 6)
    config = make_config(
        tmp_path,
        steps=8,
        global_batch=4,
        workers="1:2",
        policy=PolicyConfig(interval_steps=2),
        elastic=ElasticConfig(straggler_saves=2),
    )
    assert run_world(train_slowly, 2, config, 1) == ["done", "done"]
    (event,) = events(config, "straggler")
    assert (event["rank"], event["node"]) == (1, "rank 1")
    assert event["factor"] > 1.5
    assert event["pace_s"] >= SLEEP_S
    # By the time of their steps nobody could tell: both wait for the slow one.
    assert all(line["step_time_s"] >= SLEEP_S for line in history(config).values())
