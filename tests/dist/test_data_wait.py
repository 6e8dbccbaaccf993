"""What training waits for is told: the line of a step says how much of its time was the data's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import history, make_config, make_data, run_world, train

pytestmark = pytest.mark.dist

SLOW, PAUSE_S = (5, 9), 0.3


class _SlowFeed:
    """A feed that is late with some steps."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def steps(self, start: int, stop: int) -> Iterator[Any]:
        for step, micro_batches in enumerate(self._feed.steps(start, stop), start + 1):
            time.sleep(PAUSE_S if step in SLOW else 0)
            yield micro_batches


def _train_slowly(rank: int, world: int, config: Any) -> dict[str, Any]:
    from ray_ckpt.session import Session

    feed = Session._feed
    Session._feed = lambda session: _SlowFeed(feed(session))  # type: ignore[method-assign]
    return train(rank, world, config)


def test_each_steps_line_says_how_long_it_waited_for_data(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    config = make_config(tmp_path)
    run_world(_train_slowly, 1, config)
    lines = history(config)
    assert len(lines) == config.steps
    assert all(0 <= line["data_wait_s"] <= line["step_time_s"] for line in lines.values())
    assert all(lines[step]["data_wait_s"] >= PAUSE_S for step in SLOW)
    quick = sorted(line["data_wait_s"] for step, line in lines.items() if step not in SLOW)
    assert quick[len(quick) // 2] < PAUSE_S / 2
