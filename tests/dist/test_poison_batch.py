"""A global batch that breaks every attempt is left out, and the run comes to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from killing import run_struck
from worlds import events, history, make_config, make_core, make_data

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.config import ElasticConfig, PolicyConfig
from ray_ckpt.skips import Skip, position_of_step

pytestmark = pytest.mark.dist

POISON = 5  # the sixth global batch


def train_poisoned(rank: int, world: int, config: Any) -> Any:
    """:func:`worlds.train`, whose model cannot take one global batch."""
    import worlds

    opened = worlds.open_session

    def open_session(rank: int, config: Any) -> Any:
        session, state, model = opened(rank, config)

        def look(module: Any, args: Any) -> None:
            if session._state and position_of_step(session.progress.step, session._skips) == POISON:
                raise ValueError("no such token: 17")

        model.register_forward_pre_hook(look)
        return session, state, model

    worlds.open_session = open_session
    return worlds.train(rank, world, config)


def test_a_batch_that_breaks_every_attempt_is_left_out(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    elastic = ElasticConfig(same_failure_tries=2, on_crash_loop="skip", leash_s=0)
    config = make_config(tmp_path, policy=PolicyConfig(interval_steps=2), elastic=elastic)
    for attempt in (1, 2):
        ended = run_struck(train_poisoned, 1, config)
        assert "no such token: 17" in ended.errors[0]
        # As the controller tells it, to a tracker that has only what is on record.
        verdict = make_core(config).interruption(
            "worker_error",
            "rank 0: ValueError: no such token: 17",
            group=str(attempt),
            at_step=POISON + 1,  # as the worker answers that has failed
        )
        assert verdict.go_on
    assert run_struck(train_poisoned, 1, config).errors == []
    (loop,) = events(config, "crash_loop")
    assert (loop["action"], loop["step"], loop["to_step"]) == ("skip", POISON, 4)
    assert list(history(config)) == list(range(1, 13))
    newest = list_checkpoints(config.run_dir)[0]
    assert newest.manifest is not None
    assert (newest.step, newest.manifest.skipped) == (12, (Skip(from_step=4, steps=2),))
    assert len({line["sample_digest"] for line in history(config).values()}) == 12
