"""The feed of Ray Data: the global order, each row group once, bounded ahead, through killed workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray import cloudpickle

from ray_ckpt import facts
from ray_ckpt.config import Config
from ray_ckpt.data import feed as feed_module
from ray_ckpt.data.catalog import load_data
from ray_ckpt.data.feed import LocalFeed, RayFeed
from ray_ckpt.data.index import DataIndex, load_index
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan

pytestmark = pytest.mark.cluster

GROUPS, ROWS, SEQ_LEN = 60, 512, 8
G, B = 64, 8
OF_DATASETS = ("StreamingExecutor", "iter_threaded", "ray_ckpt-dataset")

# The workers of this Ray do not find the tests: they get what is defined here by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True, kw_only=True)
class Watched(DataIndex):
    """An index that tells of every row group that is read, in whatever process."""

    diary: str
    """File that gets a line for each read: the row group and the process."""
    kill_at: int = -1
    """Row group whose first reader is killed by SIGKILL."""

    def locate(self, group: int) -> tuple[str, int]:
        """Find a row group, and write that down."""
        with open(self.diary, "a") as file:
            file.write(f"{group} {os.getpid()}\n")
        mark = Path(f"{self.diary}.killed")
        if group == self.kill_at and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().locate(group)

    def groups_read(self) -> list[int]:
        """Row groups in the order of the reads."""
        path = Path(self.diary)
        return [int(line.split()[0]) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
        yield
        # A thread of a dataset that still asks Ray for something then would end this process.
        deadline = time.monotonic() + 20
        while any(thread.name.startswith(OF_DATASETS) for thread in threading.enumerate()):
            assert time.monotonic() < deadline, threading.enumerate()
            time.sleep(0.05)
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    rows = np.arange(GROUPS * ROWS).reshape(4, -1)
    for number, part in enumerate(rows):
        flat = pa.array(np.repeat(part, SEQ_LEN).astype(np.int32))
        table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN)})
        pq.write_table(table, root / f"part-{number}.parquet", row_group_size=ROWS)
    return root


@pytest.fixture
def watched(folder: Path, tmp_path: Path) -> Watched:
    return watch(folder, tmp_path / "diary")


def watch(folder: Path, diary: Path, kill_at: int = -1) -> Watched:
    found = load_index(folder)
    names = [name for name in DataIndex.__dataclass_fields__ if not name.startswith("_")]
    fields = {name: getattr(found, name) for name in names}
    return Watched(**fields, diary=str(diary), kill_at=kill_at)


def order_of(index: DataIndex) -> GlobalOrder:
    return GlobalOrder(row_group_sizes=index.row_group_sizes, global_batch=G, micro_batch=B, seed=7)


def plan(world_size: int = 1, rank: int = 0) -> BatchPlan:
    return BatchPlan(global_batch=G, micro_batch=B, world_size=world_size, rank=rank)


def ray_feed(index: DataIndex, world_size: int = 1, rank: int = 0, **more: object) -> RayFeed:
    return RayFeed(index=index, order=order_of(index), plan=plan(world_size, rank), **more)


def once(groups: list[int], order: GlobalOrder, epoch: int) -> None:
    """Each used row group was read once, but for those that the streams' borders cut."""
    layout = order.layout(epoch)
    used = order.steps_per_epoch * G
    borders = layout.first + order.stream_rows * np.arange(1, order.num_streams)
    expected: Counter[int] = Counter()
    for place, group in enumerate(layout.groups.tolist()):
        low, high = layout.starts[place : place + 2].tolist()
        if max(low, layout.first) < min(high, layout.first + used):
            expected[group] = 1 + int(np.count_nonzero((borders > low) & (borders < high)))
    assert Counter(groups) == expected


def double(table: pa.Table) -> pa.Table:
    tokens = pa.compute.multiply(table.column("tokens").combine_chunks().flatten(), 2)
    doubled = pa.FixedSizeListArray.from_arrays(tokens, SEQ_LEN)
    table = table.set_column(table.schema.get_field_index("tokens"), "tokens", doubled)
    return table.append_column("twice", pa.compute.multiply(table.column("position"), 2))


@pytest.mark.parametrize("kind", ["ray", "local"])
def test_all_ranks_together_read_each_row_group_once_an_epoch(watched, kind, monkeypatch):
    # Many small datasets: a seam must neither lose nor repeat.
    monkeypatch.setattr(feed_module, "TASKS_PER_DATASET", 5)
    order = order_of(watched)
    spe = order.steps_per_epoch
    positions, rows = [], []
    for rank in range(2):
        if kind == "ray":
            feed = ray_feed(watched, 2, rank, rows_per_task=1000, read_tasks=2)
        else:
            feed = LocalFeed(index=watched, order=order, plan=plan(2, rank))
        for step in feed.steps(spe, 2 * spe):
            for micro in step:
                assert np.array_equal(micro.tokens[:, 0], micro.rows)
                positions.append(micro.positions)
                rows.append(micro.rows)
    found = np.concatenate(positions)
    assert np.array_equal(np.sort(found), spe * G + np.arange(spe * G))
    assert np.array_equal(np.concatenate(rows), order.rows_at(found))
    once(watched.groups_read(), order, 1)


def test_a_transform_runs_in_ray_data_and_keeps_the_order(watched):
    order, driver = order_of(watched), os.getpid()
    for step in ray_feed(watched, transform=double).steps(3, GROUPS * ROWS // G):
        for micro in step:
            assert np.array_equal(micro.rows, order.rows_at(micro.positions))
            assert np.array_equal(micro.tokens[:, 1], 2 * micro.rows)
            assert np.array_equal(micro.columns["twice"], 2 * micro.positions)
    readers = [int(line.split()[1]) for line in Path(watched.diary).read_text().splitlines()]
    # What the first steps need is read here: a window of each stream.
    assert 0 < readers.count(driver) <= G // B * order.window_groups
    assert len(set(readers)) > 1


def test_a_transform_that_drops_rows_stops_the_run(watched):
    with pytest.raises(RuntimeError, match="keep rows, their order"):
        list(ray_feed(watched, transform=lambda table: table.slice(1)).steps(0, 9))


def test_a_consumer_that_stands_still_stops_the_reading(watched, monkeypatch):
    monkeypatch.setattr(feed_module, "TASKS_PER_DATASET", 1000)
    monkeypatch.setattr("ray_ckpt.data.source.MIN_BUFFER_BYTES", 1)
    epochs = 20
    order = order_of(watched)
    steps = ray_feed(watched, rows_per_task=512).steps(0, epochs * order.steps_per_epoch)
    next(steps)
    counts = [0, -1]
    deadline = time.monotonic() + 15
    while counts[-1] != counts[-2] and time.monotonic() < deadline:
        time.sleep(1.5)
        counts.append(len(watched.groups_read()))
    assert counts[-1] == counts[-2]
    assert counts[-1] < epochs * GROUPS / 4
    steps.close()


def test_a_killed_reader_is_run_again_and_the_order_stays(folder, tmp_path):
    order = order_of(load_index(folder))
    victim = int(
        order.layout(0).groups[GROUPS // 2 - 1]
    )  # not of the first window of a stream, which this process reads
    index = watch(folder, tmp_path / "diary", kill_at=victim)
    found = [m for step in ray_feed(index).steps(0, order.steps_per_epoch) for m in step]
    assert Path(f"{index.diary}.killed").exists()
    assert index.groups_read().count(victim) >= 2
    positions = np.concatenate([m.positions for m in found])
    assert np.array_equal(positions, np.arange(len(positions)))
    assert np.array_equal(np.concatenate([m.rows for m in found]), order.rows_at(positions))


def test_an_error_of_the_data_ends_the_feed_with_its_words(folder, tmp_path):
    other = tmp_path / "data"
    other.mkdir()
    for path in folder.glob("*.parquet"):
        (other / path.name).write_bytes(path.read_bytes())
    index = load_index(other)
    victim = other / "part-2.parquet"
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 2] + content[-8:])
    with pytest.raises(Exception, match=rf"{victim}: row group \d+ cannot be read"):
        list(ray_feed(index).steps(0, 400))


def test_a_mixture_comes_through_ray_as_its_order_says(folder: Path, tmp_path: Path) -> None:
    """Two sources of other sizes, through several of the smaller one's epochs, on ranks that do not divide V."""
    small = tmp_path / "small"
    small.mkdir()
    flat = pa.array(np.repeat(np.arange(300), SEQ_LEN).astype(np.int32))
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN)})
    pq.write_table(table, small / "part.parquet", row_group_size=70)
    config = Config(
        data=(f"web={folder}:5", f"code={small}:2"),
        global_batch=G,
        micro_batch=B,
        seq_len=SEQ_LEN,
        workers="1",
    )
    index = load_data(config.sources)
    order = facts.order_of(index, config)
    positions, rows = [], []
    for rank in range(3):
        feed = RayFeed(index=index, order=order, plan=plan(3, rank), rows_per_task=200)
        for step in feed.steps(3, 43):
            for micro in step:
                positions.append(micro.positions)
                rows.append(micro.rows)
    found = np.concatenate(positions)
    assert np.array_equal(np.sort(found), np.arange(3 * G, 43 * G))
    assert np.array_equal(np.concatenate(rows), order.rows_at(found))
    from_small = np.concatenate(rows) >> 48 == 1
    assert from_small.mean() == pytest.approx(2 / 7, abs=0.02)


def test_a_feed_that_nobody_asks_leaves_the_processor_to_training(watched: Watched) -> None:
    """Its buffers are full: Ray Data's loop must not go round and round beside the steps."""
    steps = ray_feed(watched).steps(0, 20 * GROUPS * ROWS // G)  # more than the buffers hold
    for _ in range(4):
        next(steps)
    time.sleep(2)  # until it has read as far ahead as it may
    before, window_s = time.process_time(), 2.0
    time.sleep(window_s)
    share = (time.process_time() - before) / window_s
    steps.close()
    assert share < 0.25, f"{share:.0%} of a processor, for nothing"
