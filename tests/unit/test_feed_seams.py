"""From one dataset to the next: the next is started early, never two ahead, and the order stays."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from ray_ckpt.data import feed as feed_module
from ray_ckpt.data.feed import RayFeed
from ray_ckpt.data.index import DataFile, DataIndex
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.reader import Read, read_span

TASKS, FIRST = 8, 6


@dataclass(frozen=True, kw_only=True)
class WithoutRay(RayFeed):
    """The feed of Ray Data with its datasets read in place."""

    events: list[str] = field(default_factory=list)
    fail_at: int = -1

    def _iterate(self, tasks: Sequence[Sequence[Read]]) -> Iterator[pa.Table]:
        number = sum(event.startswith("start") for event in self.events)
        self.events.append(f"start {number}")
        if number == self.fail_at:
            raise OSError("no cluster")

        def tables() -> Iterator[pa.Table]:
            for task in tasks:
                for read in task:
                    yield read_span(self.index, self.order, read)
            self.events.append(f"end {number}")

        return tables()


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> WithoutRay:
    monkeypatch.setattr(feed_module, "TASKS_PER_DATASET", TASKS)
    monkeypatch.setattr(feed_module, "FIRST_STEPS", FIRST)
    groups = (5,) * 200
    index = DataIndex(
        root="/nowhere",
        files=(DataFile(path="x.parquet", row_groups=groups),),
        column="tokens",
        seq_len=1,
        vocab_size=None,
        fingerprint="",
    )

    def read(index: DataIndex, group: int) -> pa.Table:
        rows = np.arange(group * 5, group * 5 + 5)
        return pa.table({"tokens": pa.array(rows[:, None].tolist())})

    monkeypatch.setattr("ray_ckpt.data.reader.read_row_group", read)
    order = GlobalOrder(row_group_sizes=np.array(groups), global_batch=8, micro_batch=2)
    plan = BatchPlan(global_batch=8, micro_batch=2, world_size=1, rank=0)
    return WithoutRay(index=index, order=order, plan=plan, rows_per_task=20)


def test_the_next_dataset_starts_while_the_present_one_has_rows(feed):
    steps = 300
    found = [m for step in feed.steps(0, steps) for m in step]
    assert np.array_equal(np.concatenate([m.positions for m in found]), np.arange(steps * 8))
    datasets = sum(event.startswith("end") for event in feed.events)
    assert datasets > 10
    for number in range(1, datasets):
        at = feed.events.index(f"start {number}")
        assert at < feed.events.index(f"end {number - 1}")
        if number > 1:  # one ahead at most
            assert at > feed.events.index(f"end {number - 2}")


def test_a_short_run_starts_only_what_it_needs(feed):
    assert len(list(feed.steps(0, 2))) == 2
    assert feed.events == [], "what the first steps need is read without Ray Data"
    assert len(list(feed.steps(0, 20))) == 20
    assert [event for event in feed.events if event.startswith("start")] == ["start 0"]


@pytest.mark.parametrize("start", [0, 3, 4, 9, 119])
def test_the_first_steps_do_not_wait_for_ray_data(feed, start):
    """Its start takes seconds: meanwhile what they need is there, wherever in a window they begin."""
    started = threading.Event()

    class Slow(WithoutRay):
        def _iterate(self, tasks: Sequence[Sequence[Read]]) -> Iterator[pa.Table]:
            assert started.wait(20)
            return super()._iterate(tasks)

    slow = Slow(index=feed.index, order=feed.order, plan=feed.plan, rows_per_task=20)
    steps = slow.steps(start, 300)
    found = list(itertools.islice(steps, FIRST))
    assert slow.events == []
    started.set()
    found += steps
    positions = np.concatenate([micro.positions for step in found for micro in step])
    assert np.array_equal(positions, np.arange(start * 8, 300 * 8))


def test_an_error_of_a_start_in_the_background_is_raised_where_it_is_needed(feed):
    feed = WithoutRay(
        index=feed.index, order=feed.order, plan=feed.plan, rows_per_task=20, fail_at=2
    )
    done: list[int] = []
    with pytest.raises(OSError, match="no cluster"):
        done.extend(len(step) for step in feed.steps(0, 300))
    assert len(done) > 20
