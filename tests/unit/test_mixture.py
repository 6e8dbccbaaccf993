"""A mixture is one order too: exact proportions, every source's own epochs, any world, any resume."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pickle
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_ckpt.data import mixture, reader
from ray_ckpt.data.assemble import assemble
from ray_ckpt.data.catalog import DataSource, MixedIndex
from ray_ckpt.data.feed import LocalFeed, MicroBatch
from ray_ckpt.data.index import DataFile, DataIndex
from ray_ckpt.data.mixture import MixedOrder, mixed_order, split_ids
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.reader import plan_reads, read_span
from ray_ckpt.data.replaced import REPLACED_NAME, RecordedFeed
from ray_ckpt.data.rowgroup import DamagedRowGroup
from ray_ckpt.errors import ConfigError

SEQ_LEN = 3


def make_order(
    groups: Sequence[Sequence[int]], weights: Sequence[int], v: int, b: int, **more: Any
) -> MixedOrder:
    return mixed_order(
        [np.array(sizes, dtype=np.int64) for sizes in groups],
        names=[f"s{i}" for i in range(len(groups))],
        weights=weights,
        global_batch=v * b,
        micro_batch=b,
        **more,
    )


def tokens_of(ids: Any) -> np.ndarray:
    """The tokens that the test data holds at given row ids: source, and two digits of the row."""
    sources, rows = split_ids(np.asarray(ids, dtype=np.int64))
    return np.stack([sources, rows % 251, rows // 251], axis=1)


class World:
    """A mixture without files."""

    def __init__(self, groups: Sequence[Sequence[int]], order: MixedOrder) -> None:
        self.order = order
        self.reads: Counter[tuple[int, int]] = Counter()
        self.damaged: set[tuple[int, int]] = set()
        self._tables: dict[tuple[int, int], pa.Table] = {}
        pairs = enumerate(zip(groups, order.weights, strict=True))
        self.index = MixedIndex(
            sources=tuple(
                DataSource(name=f"s{i}", path=str(i), weight=weight)
                for i, weight in enumerate(order.weights)
            ),
            parts=tuple(
                DataIndex(
                    root=str(i),
                    files=(DataFile(path="part.parquet", row_groups=tuple(sizes)),),
                    column="tokens",
                    seq_len=SEQ_LEN,
                    vocab_size=None,
                    fingerprint="",
                    dtype="uint16",
                )
                for i, (sizes, _) in pairs
            ),
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While active, row groups come from here instead of from files."""

        def read(index: DataIndex, group: int) -> pa.Table:
            source = int(index.root)
            if (source, group) in self.damaged:
                raise DamagedRowGroup(f"source {source}: row group {group} is damaged.")
            self.reads[source, group] += 1
            if (source, group) not in self._tables:
                first = int(self.order.parts[source].group_starts[group])
                rows = np.arange(first, first + index.rows_in(group)) + (source << 48)
                flat = pa.array(tokens_of(rows).ravel(), type=pa.uint16())
                table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN)})
                self._tables[source, group] = table
            return self._tables[source, group]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "read_row_group", read)
            yield

    def plan(self, workers: int, rank: int) -> BatchPlan:
        return BatchPlan(
            global_batch=self.order.global_batch,
            micro_batch=self.order.micro_batch,
            world_size=workers,
            rank=rank,
        )

    def train(self, workers: int, start: int, stop: int, ahead: int = 0) -> list[int]:
        """Row ids in the order of training, as the ranks of one world get them together."""
        parts: list[list[MicroBatch]] = [[] for _ in range(start, stop)]
        for rank in range(workers):
            feed = LocalFeed(index=self.index, order=self.order, plan=self.plan(workers, rank))
            steps = feed.steps(start, stop + ahead)
            for part, batches in zip(parts, steps, strict=False):
                part.extend(batches)
        found: list[int] = []
        g = self.order.global_batch
        for step, part in enumerate(parts, start):
            positions = np.concatenate([m.positions for m in part])
            assert np.array_equal(positions, step * g + np.arange(g))
            rows = np.concatenate([m.rows for m in part])
            assert np.array_equal(np.concatenate([m.tokens for m in part]), tokens_of(rows))
            found += rows.tolist()
        return found

    def expected(self, start: int, stop: int) -> list[int]:
        g = self.order.global_batch
        return self.order.rows_at(np.arange(start * g, stop * g)).tolist()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    v, b = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    groups, weights = [], []
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(
            st.lists(
                st.one_of(st.just(0), st.integers(1, 4), st.integers(1, 25)), min_size=1, max_size=7
            )
        )
        if sum(sizes) < v:
            sizes.append(v - sum(sizes) + draw(st.integers(0, 9)))
        groups.append(sizes)
        weights.append(draw(st.integers(1, 7)))
    seed, window = draw(st.integers(-99, 99)), draw(st.integers(1, 4))
    return World(groups, make_order(groups, weights, v, b, seed=seed, window_groups=window))


@settings(max_examples=12, deadline=None)
@given(worlds(), st.integers(0, 10**12), st.data())
def test_every_block_of_a_stream_has_the_exact_proportions(world, block, data):
    order = world.order
    stream = data.draw(st.integers(0, order.num_streams - 1))
    low = block * order.block_rows
    sources = order.sources_of(stream, low, low + 3 * order.block_rows).reshape(3, -1)
    for row in sources:
        assert tuple(np.bincount(row, minlength=len(order.weights))) == order.weights
    # Any piece of it is the same piece.
    i = data.draw(st.integers(0, 2 * order.block_rows))
    k = data.draw(st.integers(i, 3 * order.block_rows))
    assert order.sources_of(stream, low + i, low + k).tolist() == sources.ravel()[i:k].tolist()


def test_what_is_trained_has_the_exact_proportions():
    order = make_order([[40], [9, 0, 9], [13]], [4, 1, 2], 3, 2, seed=1)
    rows = order.rows_at(np.arange(3 * 2 * 7 * 2)).reshape(-1, 3, 2)
    for stream in range(3):
        sources = split_ids(rows[:, stream].ravel())[0].reshape(-1, 7)
        assert {tuple(np.bincount(block, minlength=3)) for block in sources} == {(4, 1, 2)}
        assert len({tuple(block) for block in sources}) > 1


@settings(max_examples=12, deadline=None)
@given(worlds(), st.integers(0, 10**12), st.data())
def test_rows_of_a_stream_and_of_its_sources_are_found_from_each_other(world, first, data):
    order = world.order
    stream = data.draw(st.integers(0, order.num_streams - 1))
    last = first + data.draw(st.integers(1, 60))
    sources = order.sources_of(stream, first, last)
    before, after = order.rows_before(stream, first), order.rows_before(stream, last)
    assert sum(before) == first
    for source, (low, high) in enumerate(zip(before, after, strict=True)):
        places = first + np.flatnonzero(sources == source)
        for cells in (1, mixture.CELLS):  # however many blocks are arranged at a time
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(mixture, "CELLS", cells)
                found = order.stream_places(stream, source, low, high)
            assert found.tolist() == places.tolist()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.data())
def test_any_history_of_worlds_trains_the_mixture_once(world, data):
    step = data.draw(st.sampled_from([0, 0, 1, 1000, 10**9]), label="start")
    first, end = step, step + data.draw(st.integers(2, 12))
    trained: list[int] = []
    with world.reading():
        while step < end:
            stop = data.draw(st.integers(step + 1, end), label="stop")
            workers = data.draw(st.integers(1, world.order.num_streams), label="workers")
            trained += world.train(workers, step, stop, data.draw(st.integers(0, 3)))
            step = stop
    assert trained == world.expected(first, end)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_every_epoch_of_a_source_uses_its_rows_once_but_for_a_tail(world):
    order, per_epoch = world.order, {}
    longest = max(order.epoch_steps(i) for i in range(len(order.parts)))
    steps = min(int(2 * longest) + 2, 900 // order.global_batch + 1)
    with world.reading():
        rows = world.train(1, 0, steps)
    sources, own = split_ids(np.array(rows))
    positions = np.arange(len(rows))
    streams = positions % order.global_batch // order.micro_batch
    for stream in range(order.num_streams):
        for source, part in enumerate(order.parts):
            mine = own[(streams == stream) & (sources == source)]
            # A stream goes on to the next epoch of a source when it has used its share of this one.
            for epoch in range(len(mine) // part.stream_rows):
                share = mine[epoch * part.stream_rows :][: part.stream_rows]
                per_epoch.setdefault((source, epoch), []).append(share)
    for (source, _), shares in per_epoch.items():
        part, used = order.parts[source], np.concatenate(shares)
        assert len(np.unique(used)) == len(used)
        assert used.max() < part.num_rows
        if len(shares) == order.num_streams:
            assert len(used) == part.num_rows - part.num_rows % order.num_streams


GROUPS = [[5, 0, 11, 3], [30, 1, 7, 9, 4], [2, 2, 2, 1]]  # 19, 51 and 7 rows
SKEWED = World(GROUPS, make_order(GROUPS, [2, 3, 1], 5, 2, seed=4, window_groups=2))


@pytest.mark.parametrize("source", range(3))
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_a_stop_near_the_end_of_a_sources_epoch_loses_and_repeats_nothing(source, delta):
    order = SKEWED.order
    for epoch, stream in ((1, min), (2, max)):  # the first that ends, and the last
        rows = epoch * order.parts[source].stream_rows
        ends = [int(order.stream_places(j, source, rows, rows + 1)[0]) // 2 for j in range(5)]
        boundary = stream(ends)
        start, cut = max(0, boundary - 3), max(1, boundary + delta)
        with SKEWED.reading():
            found = SKEWED.train(2, start, cut, ahead=2)
            found += SKEWED.train(5, cut, cut + 1, ahead=4)  # resumed twice in a row
            found += SKEWED.train(3, cut + 1, boundary + 4)
        assert found == SKEWED.expected(start, boundary + 4)


def test_sources_of_different_size_begin_new_epochs_at_different_times():
    order = SKEWED.order
    epochs = [[0, 0, 0]]
    for position in range(39 * order.global_batch):  # 13 blocks of each stream
        source = order.source_at(position)[0]
        now = list(epochs[-1])
        now[source] = max(now[source], order.epoch_at(position))
        if now != epochs[-1]:
            epochs.append(now)
    assert all(sum(b) - sum(a) == 1 for a, b in itertools.pairwise(epochs))
    steps = [order.epoch_steps(i) for i in range(3)]
    assert steps == pytest.approx([3 * 6 / 2 / 2, 10 * 6 / 3 / 2, 1 * 6 / 1 / 2])
    rows = (part.stream_rows for part in order.parts)
    assert epochs[-1] == [(13 * w - 1) // n for w, n in zip(order.weights, rows, strict=True)]


@settings(max_examples=8, deadline=None)
@given(worlds(), st.data())
def test_reads_come_in_the_order_of_need_and_hold_one_span_a_stream_and_source(world, data):
    order, b = world.order, world.order.micro_batch
    start = data.draw(st.integers(0, 40))
    stop = start + data.draw(st.integers(1, 12))
    needed, rows = [], 0
    ends = {
        (j, i): n
        for j in range(order.num_streams)
        for i, n in enumerate(order.rows_before(j, start * b))
    }
    for read in plan_reads(order, range(order.num_streams), start, stop):
        part, key = order.parts[read.source], (read.span.stream, read.source)
        low = read.span.epoch * part.stream_rows + read.span.offset + read.start
        assert low == ends[key]
        ends[key] += read.stop - read.start
        rows += read.stop - read.start
        place = int(order.stream_places(*key, low, low + 1)[0])
        needed.append((place // b, read.span.stream, place % b))
    assert needed == sorted(needed)
    assert rows == (stop - start) * order.global_batch


def test_every_world_reads_a_row_group_once_a_stream_and_epoch():
    groups = [[8] * 30, [8] * 10]
    world = World(groups, make_order(groups, [3, 1], 4, 2, seed=3))  # 30 steps: each source once
    with world.reading():
        whole = world.train(1, 0, 30)
        assert len(set(whole)) == len(whole) == 240
        counts = dict(world.reads)
        assert sum(counts.values()) <= 40 + 2 * (4 - 1)
        for workers in (2, 3, 4):
            world.reads.clear()
            assert world.train(workers, 0, 30) == whole
            assert dict(world.reads) == counts


def merged(blocks: Sequence[pa.Table], plan: BatchPlan, start: int, stop: int) -> Iterator[int]:
    """Row ids in the order of training."""
    for step in assemble(blocks, plan, SEQ_LEN, start, stop, order=SKEWED.order):
        for micro in step:
            yield from micro.rows.tolist()


@pytest.fixture(scope="module")
def whole():
    """What a rank reads and trains on: its plan, its reads, their blocks, the rows."""
    plan = SKEWED.plan(2, 1)
    with SKEWED.reading():
        reads = list(plan_reads(SKEWED.order, plan.micro_batches, 2, 40))
        blocks = [read_span(SKEWED.index, SKEWED.order, read) for read in reads]
    return plan, reads, blocks, list(merged(blocks, plan, 2, 40))


@pytest.mark.parametrize("fault", ["twice", "swapped", "late", "lost", "row lost"])
@pytest.mark.parametrize("source", range(3))
def test_a_block_twice_late_lost_or_out_of_order_is_never_trained_on(whole, fault, source):
    plan, reads, blocks, good = whole[0], whole[1], list(whole[2]), whole[3]
    stream = plan.micro_batches[-1]
    mine = [k for k, r in enumerate(reads) if (r.source, r.span.stream) == (source, stream)]
    i, k = mine[1], mine[2]
    if fault == "twice":
        blocks.insert(k, blocks[i])
    elif fault == "swapped":
        blocks[i], blocks[k] = blocks[k], blocks[i]
    elif fault == "late":
        blocks.insert(mine[-1] + 1, blocks[i])
        del blocks[i]
    elif fault == "lost":
        del blocks[i]
    else:
        blocks[i] = blocks[i].slice(1)
    trained: list[int] = []
    with pytest.raises(RuntimeError, match="out of order: step"):
        trained.extend(merged(blocks, plan, 2, 40))
    assert trained == good[: len(trained)]


def test_blocks_may_be_joined_and_cut_anywhere():
    plan = SKEWED.plan(1, 0)
    with SKEWED.reading():
        reads = plan_reads(SKEWED.order, plan.micro_batches, 0, 20)
        whole = pa.concat_tables([read_span(SKEWED.index, SKEWED.order, r) for r in reads])
    for size in (1, 7, 1000):
        pieces = [whole.slice(i, size) for i in range(0, whole.num_rows, size)]
        assert list(merged(pieces, plan, 0, 20)) == SKEWED.expected(0, 20)


def test_rows_that_stand_in_for_damaged_ones_are_of_their_source_and_written_down(tmp_path: Path):
    world = World(GROUPS, SKEWED.order)
    world.damaged = {(1, 3)}
    feed = RecordedFeed(
        feed=LocalFeed(
            index=world.index, order=world.order, plan=world.plan(1, 0), on_corrupt="replace"
        ),
        index=world.index,
        order=world.order,
        run_dir=tmp_path,
        facts={"rank": 0},
    )
    with world.reading():
        rows = [r for step in feed.steps(0, 25) for m in step for r in m.rows.tolist()]
    expected = world.expected(0, 25)
    for found, meant in zip(rows, expected, strict=True):
        assert found >> 48 == meant >> 48
        lost = meant >> 48 == 1 and 38 <= meant - (1 << 48) < 47
        assert (found != meant) == lost
    lines = [json.loads(line) for line in (tmp_path / REPLACED_NAME).read_text().splitlines()]
    # Steps in which an epoch of source 1 is met: its 51 rows last 10 steps.
    assert [(line["file"], line["row_group"], line["rows"]) for line in lines] == [
        ("1/part.parquet", 3, 9)
    ] * len(lines)
    assert [line["epoch"] for line in lines] == [0, 1, 2]


def test_seeds_and_weights_name_different_orders():
    def rows(weights: Sequence[int], seed: int) -> tuple[int, ...]:
        order = make_order([[30], [30]], weights, 3, 2, seed=seed)
        return tuple(order.rows_at(np.arange(60)).tolist())

    names = [((1, 1), 0), ((1, 1), 1), ((1, 1), -1), ((2, 1), 0), ((2, 2), 0), ((1, 1), 2**40)]
    assert len({rows(*name) for name in names}) == len(names)
    # Two sources of the same files are shuffled apart.
    sources, own = split_ids(np.array(rows((1, 1), 0)))
    assert own[sources == 0].tolist() != own[sources == 1].tolist()


def test_a_pretended_mixture_of_10_to_the_12_rows_answers_at_once():
    tracemalloc.start()
    try:
        start = time.process_time()
        order = make_order([[10**7] * 10**5, [10**6] * 10**4], [97, 3], 512, 8, seed=11)
        positions = np.random.default_rng(0).integers(0, 10**13, size=20)
        rows = order.rows_at(positions)
        next(plan_reads(order, [511], 10**9, 2 * 10**9))
        spent = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spent < 2.0
    assert peak < 40e6  # some arrays of one entry a row group
    assert set(split_ids(rows)[0].tolist()) == {0, 1}


def test_an_order_travels_without_what_it_has_computed():
    order = make_order([[10] * 2000, [7] * 2000], [2, 1], 4, 2, seed=1)
    rows = order.rows_at(np.arange(50)).tolist()
    small = pickle.dumps(order.without_caches())
    assert len(small) < 2 * 2000 * 8 + 2000 < len(pickle.dumps(order))
    assert pickle.loads(small).rows_at(np.arange(50)).tolist() == rows


def test_a_source_with_less_than_a_row_for_each_stream_is_named():
    make_order([[4], [1, 3]], [1, 1], 4, 2)
    with pytest.raises(ConfigError, match=r"--data s1=.* 3 rows, .* 4 micro-batches"):
        make_order([[4], [1, 2]], [1, 1], 4, 2)


@pytest.mark.parametrize(
    ("more", "digest"),
    [
        (
            {"row_group_sizes": [7, 1, 0, 12, 9, 3, 20, 5], "global_batch": 10, "micro_batch": 2},
            "b844deb991c6b4d7",
        ),
        (
            {
                "row_group_sizes": [11, 0, 5, 30, 1, 2, 2, 2, 17, 0, 40, 6, 9],
                "global_batch": 14,
                "micro_batch": 2,
                "seed": 5,
                "window_groups": 2,
            },
            "1aa2ec68747e1a77",
        ),
        (
            {"row_group_sizes": [1000] * 50, "global_batch": 96, "micro_batch": 8, "seed": -3},
            "356ffa51a6a6b245",
        ),
    ],
)
def test_the_order_of_one_source_is_what_it_was_before_there_were_mixtures(more, digest):
    order = GlobalOrder(**{**more, "row_group_sizes": np.array(more["row_group_sizes"])})
    per_epoch = order.steps_per_epoch * order.global_batch
    positions = np.concatenate([np.arange(200), 7 * per_epoch - 50 + np.arange(100)])
    rows = order.rows_at(positions).astype("<i8").tobytes()
    assert hashlib.sha256(rows).hexdigest().startswith(digest)


def test_the_order_of_a_mixture_stays_what_it_is():
    rows = SKEWED.order.rows_at(np.arange(300)).astype("<i8").tobytes()
    assert hashlib.sha256(rows).hexdigest()[:16] == "84832332efbd64ee"
