"""What the ranks train on together is the global order, in order, once: for any world, any resume."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_ckpt.data import reader
from ray_ckpt.data.feed import LocalFeed, MicroBatch, assemble, group_reads
from ray_ckpt.data.index import DataError, DataFile, DataIndex, load_index
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.reader import Read, plan_reads, read_span, token_matrix

SEQ_LEN = 3


def tokens_of(rows: Any) -> np.ndarray:
    """The tokens that the test data holds at given row ids: different for every row."""
    rows = np.asarray(rows, dtype=np.int64)
    return np.stack([rows % 251, rows // 251, rows % 7], axis=1)


def token_table(rows: Any) -> pa.Table:
    flat = pa.array(tokens_of(rows).ravel(), type=pa.uint16())
    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN)})


class World:
    """A data set without files, whose row groups are counted when they are read."""

    def __init__(self, files: Sequence[Sequence[int]], v: int, b: int, **more: Any) -> None:
        self.index = DataIndex(
            root="/nowhere",
            files=tuple(
                DataFile(path=f"{i}.parquet", row_groups=tuple(groups))
                for i, groups in enumerate(files)
            ),
            column="tokens",
            seq_len=SEQ_LEN,
            vocab_size=None,
            fingerprint="",
        )
        self.order = GlobalOrder(
            row_group_sizes=self.index.row_group_sizes, global_batch=v * b, micro_batch=b, **more
        )
        self.reads: Counter[int] = Counter()
        self._tables: dict[int, pa.Table] = {}

    @property
    def v(self) -> int:
        return self.order.num_streams

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While active, row groups come from here instead of from files."""

        def read(index: DataIndex, group: int) -> pa.Table:
            self.reads[group] += 1
            if group not in self._tables:
                first = int(self.order.group_starts[group])
                rows = np.arange(first, first + int(self.order.row_group_sizes[group]))
                self._tables[group] = token_table(rows)
            return self._tables[group]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "read_row_group", read)
            yield

    def feed(self, world_size: int, rank: int) -> LocalFeed:
        plan = BatchPlan(
            global_batch=self.order.global_batch,
            micro_batch=self.order.micro_batch,
            world_size=world_size,
            rank=rank,
        )
        return LocalFeed(index=self.index, order=self.order, plan=plan)

    def train(self, world_size: int, start: int, stop: int, ahead: int = 0) -> list[np.ndarray]:
        """Row ids of each global batch, as the ranks of one world get them together.

        The feed is asked for steps up to ``stop + ahead`` and left there, as a run that is killed
        leaves what it has read ahead.
        """
        parts: list[list[MicroBatch]] = [[] for _ in range(start, stop)]
        for rank in range(world_size):
            feed = self.feed(world_size, rank)
            steps = feed.steps(start, stop + ahead)
            for part, batches in zip(parts, steps, strict=False):
                assert [m.index for m in batches] == list(feed.plan.micro_batches)
                part.extend(batches)
        batches = []
        for step, part in enumerate(parts, start):
            positions = np.concatenate([m.positions for m in part])
            first = step * self.order.global_batch
            assert np.array_equal(positions, first + np.arange(self.order.global_batch))
            rows = np.concatenate([m.rows for m in part])
            tokens = np.concatenate([m.tokens for m in part])
            assert tokens.dtype == np.int64
            assert np.array_equal(tokens, tokens_of(rows))
            batches.append(rows)
        return batches

    def expected(self, start: int, stop: int) -> list[np.ndarray]:
        g = self.order.global_batch
        return list(self.order.rows_at(np.arange(start * g, stop * g)).reshape(-1, g))


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    group = st.one_of(st.just(0), st.integers(1, 4), st.integers(1, 30))
    files = draw(st.lists(st.lists(group, max_size=7), min_size=1, max_size=4))
    v, b = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    short = v * b - sum(map(sum, files))
    if short > 0:
        files.append([short + draw(st.integers(0, 9))])
    return World(files, v, b, seed=draw(st.integers(0, 99)), window_groups=draw(st.integers(1, 5)))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.data())
def test_any_history_of_worlds_trains_the_global_order_once(world, data):
    spe = world.order.steps_per_epoch
    step, end = 0, min(2 * spe + 2, 16)
    if data.draw(st.booleans()):  # as well far into the run
        step = 1000 * spe - 2
        end += step
    first, trained = step, []
    with world.reading():
        while step < end:
            stop = data.draw(st.integers(step + 1, end), label="stop")
            workers = data.draw(st.integers(1, world.v), label="workers")
            ahead = data.draw(st.integers(0, 3), label="read ahead")
            trained += world.train(workers, step, stop, ahead)
            step = stop
    assert same(trained, world.expected(first, end))


STREAMS = 7
LAYOUT = [[11, 0, 5, 30, 1], [], [2, 2, 2, 17], [0], [40, 6, 9]]  # 125 rows: 8 steps of 14, 13 left


@pytest.mark.parametrize("workers", range(1, STREAMS + 1))
def test_every_world_size_reads_each_row_group_once_an_epoch(workers):
    world = World(LAYOUT, STREAMS, 2, seed=workers, window_groups=2)
    spe = world.order.steps_per_epoch
    for epoch in (0, 1):
        layout = world.order.layout(epoch)
        low = layout.first
        high = low + spe * world.order.global_batch
        borders = low + world.order.stream_rows * np.arange(1, STREAMS)
        expected: Counter[int] = Counter()
        for place, group in enumerate(layout.groups.tolist()):
            begin, end = layout.starts[place : place + 2].tolist()
            if max(begin, low) < min(end, high):  # else empty, or left out this epoch
                expected[group] = 1 + int(np.count_nonzero((borders > begin) & (borders < end)))
        world.reads.clear()
        with world.reading():
            found = world.train(workers, epoch * spe, (epoch + 1) * spe)
        assert same(found, world.expected(epoch * spe, (epoch + 1) * spe))
        assert world.reads == expected
        assert sum(expected.values()) <= len(expected) + STREAMS - 1


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_resume_reads_again_only_the_windows_in_which_it_lands(cut):
    groups = [4] * 60
    world = World([groups], 5, 2, seed=1, window_groups=3)
    spe = world.order.steps_per_epoch
    with world.reading():
        world.train(2, 0, spe)
        whole = sum(world.reads.values())
        world.reads.clear()
        found = world.train(2, 0, cut) + world.train(5, cut, spe)
        assert same(found, world.expected(0, spe))
        assert sum(world.reads.values()) <= whole + world.v * world.order.window_groups


def test_what_is_read_first_does_not_grow_with_the_offset():
    world = World([[8] * 400], 4, 2, seed=1, window_groups=2)
    spe = world.order.steps_per_epoch
    for start in (0, 1, spe // 2, spe - 1, spe, 1000 * spe + 7):
        world.reads.clear()
        with world.reading():
            next(world.feed(1, 0).steps(start, start + 10**9))
        assert sum(world.reads.values()) <= world.v * world.order.window_groups


@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize(("before", "between", "after"), [(1, 7, 3), (3, 2, 7), (7, 3, 1)])
def test_a_stop_near_an_epoch_boundary_loses_and_repeats_nothing(delta, before, between, after):
    world = World(LAYOUT, STREAMS, 2, seed=5)
    spe = world.order.steps_per_epoch
    for boundary in (spe, 2 * spe):
        cut = boundary + delta
        with world.reading():
            found = world.train(before, boundary - 3, cut, ahead=2)
            found += world.train(between, cut, cut + 1, ahead=4)  # resumed twice in a row
            found += world.train(after, cut + 1, boundary + 4)
        assert same(found, world.expected(boundary - 3, boundary + 4))


def test_no_step_reads_nothing():
    world = World(LAYOUT, STREAMS, 2)
    with world.reading():
        assert list(world.feed(2, 1).steps(5, 5)) == []
        assert list(plan_reads(world.order, [0, 1], 7, 5)) == []
    assert not world.reads


@settings(max_examples=12, deadline=None)
@given(worlds(), st.data())
def test_reads_come_in_the_order_of_need_and_hold_one_span_a_stream(world, data):
    low = data.draw(st.integers(0, world.v - 1))
    streams = range(low, data.draw(st.integers(low + 1, world.v)))
    start = data.draw(st.integers(0, 40))
    stop = start + data.draw(st.integers(1, 12))
    order = world.order
    ends = dict.fromkeys(streams, start * order.micro_batch)
    needed = []
    for read in plan_reads(order, streams, start, stop):
        stream = read.span.stream
        assert 0 <= read.start < read.stop <= read.span.num_rows
        position = int(order.positions(read.span)[read.start])
        step, rest = divmod(position, order.global_batch)
        row = step * order.micro_batch + rest % order.micro_batch
        assert row == ends[stream]  # nothing left out, nothing twice
        ends[stream] = row + read.stop - read.start
        needed.append((step, stream))
    assert needed == sorted(needed)
    assert set(ends.values()) == {stop * order.micro_batch}


def test_streams_may_be_any_iterable():
    order = World(LAYOUT, STREAMS, 2).order
    assert list(plan_reads(order, iter([1, 2]), 0, 3)) == list(plan_reads(order, [1, 2], 0, 3))


@settings(max_examples=12, deadline=None)
@given(worlds(), st.integers(1, 60))
def test_read_tasks_keep_every_read_in_order(world, rows_per_task):
    reads = list(plan_reads(world.order, range(world.v), 1, 9))
    tasks = list(group_reads(iter(reads), rows_per_task))
    assert [read for task in tasks for read in task] == reads
    sizes = [[read.stop - read.start for read in task] for task in tasks]
    assert all(sum(task) >= rows_per_task for task in sizes[:-1])
    assert all(sum(task[:-1]) < rows_per_task for task in sizes)


# ---- blocks on their way to training --------------------------------------------------------------


SMALL = World([[3] * 40], 4, 2, seed=2, window_groups=2)
PLAN = BatchPlan(global_batch=8, micro_batch=2, world_size=2, rank=1)


@functools.cache
def blocks_of(streams: Sequence[int], stop: int) -> tuple[pa.Table, ...]:
    """The blocks that a feed would read for some streams of the small world."""
    with SMALL.reading():
        reads = plan_reads(SMALL.order, streams, 2, stop)
        return tuple(read_span(SMALL.index, SMALL.order, read) for read in reads)


def assembled(blocks: Iterable[pa.Table], stop: int) -> Iterator[int]:
    """Row ids in the order of training."""
    for step in assemble(blocks, PLAN, SEQ_LEN, 2, stop):
        for micro in step:
            yield from micro.rows.tolist()


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_blocks_may_be_joined_and_cut_anywhere(data):
    blocks = blocks_of(PLAN.micro_batches, 16)
    whole = pa.concat_tables(blocks)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.num_rows), max_size=20)))
    pieces = [
        whole.slice(low, high - low)  # some of them empty
        for low, high in zip([0, *cuts], [*cuts, whole.num_rows], strict=True)
    ]
    if data.draw(st.booleans()):
        pieces = [piece.combine_chunks() for piece in pieces]
    assert list(assembled(pieces, 16)) == list(assembled(blocks, 16))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["twice", "swapped", "late", "lost", "rows swapped", "row lost"]), st.data())
def test_a_block_twice_late_lost_or_out_of_order_is_never_trained_on(fault, data):
    blocks = list(blocks_of(PLAN.micro_batches, 16))
    good = list(assembled(blocks, 16))
    stream = data.draw(st.sampled_from(list(PLAN.micro_batches)))
    mine = [i for i, block in enumerate(blocks) if block.column("stream")[0].as_py() == stream]
    at = data.draw(st.integers(0, len(mine) - 2), label="which")
    i, k = mine[at], mine[at + 1]
    row = data.draw(st.integers(0, blocks[i].num_rows - 2))
    if fault == "twice":
        blocks.insert(data.draw(st.integers(i, k)), blocks[i])
    elif fault == "swapped":
        blocks[i], blocks[k] = blocks[k], blocks[i]
    elif fault == "late":
        blocks.insert(mine[-1] + 1, blocks[i])
        del blocks[i]
    elif fault == "lost":
        del blocks[i]
    elif fault == "rows swapped":
        rows = np.arange(blocks[i].num_rows)
        rows[[row, row + 1]] = rows[[row + 1, row]]
        blocks[i] = blocks[i].take(rows)
    else:
        blocks[i] = blocks[i].take(np.delete(np.arange(blocks[i].num_rows), row))
    trained: list[int] = []
    with pytest.raises(RuntimeError, match="out of order: step"):
        trained.extend(assembled(blocks, 16))
    assert trained == good[: len(trained)]


def test_the_message_says_where_and_what_a_transform_must_keep():
    blocks = blocks_of(PLAN.micro_batches, 9)
    with pytest.raises(
        RuntimeError, match=r"step 2, micro-batch 2 .* position 20.*position column"
    ):
        list(assembled(blocks[2:], 9))


def test_blocks_that_end_too_soon_are_told_in_words():
    blocks = blocks_of(PLAN.micro_batches, 9)
    with pytest.raises(RuntimeError, match="step 8"):
        list(assembled(blocks[:-1], 9))


def test_a_stream_of_another_rank_is_told_in_words():
    with pytest.raises(RuntimeError, match="stream 0"):
        list(assembled(blocks_of(range(4), 9), 9))


# ---- real files -----------------------------------------------------------------------------------

FILES = [[4, 3, 0, 9], [], [0], [6, 6, 1, 12], [5]]


@pytest.fixture(scope="module", params=["fixed uint16", "variable int32"])
def folder(request, tmp_path_factory):
    """A data folder of several files, some empty, with row groups of odd sizes."""
    root = tmp_path_factory.mktemp("data")
    kind = pa.list_(pa.uint16(), SEQ_LEN) if "fixed" in request.param else pa.list_(pa.int32())
    schema, row = pa.schema([("tokens", kind)]), 0
    for number, groups in enumerate(FILES):
        with pq.ParquetWriter(root / f"part-{number}.parquet", schema) as writer:
            for rows in groups:
                values = tokens_of(np.arange(row, row + rows)).tolist()
                writer.write_table(pa.table({"tokens": pa.array(values, type=kind)}))
                row += rows
    return root


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_files_are_trained_in_the_global_order_and_read_once(folder, monkeypatch, workers):
    index = load_index(folder)
    world = World([file.row_groups for file in index.files], 4, 2, seed=4, window_groups=2)
    world.index = index
    real = reader.read_row_group

    def counted(index: DataIndex, group: int) -> pa.Table:
        world.reads[group] += 1
        return real(index, group)

    monkeypatch.setattr(reader, "read_row_group", counted)
    spe = world.order.steps_per_epoch
    found = world.train(workers, 0, spe)
    assert same(found, world.expected(0, spe))
    used = np.count_nonzero(index.row_group_sizes)
    assert set(world.reads) <= set(np.flatnonzero(index.row_group_sizes).tolist())
    assert sum(world.reads.values()) <= used + world.v - 1
    assert same(world.train(workers, spe - 1, spe + 2), world.expected(spe - 1, spe + 2))


def test_a_row_group_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "part.parquet"
    with pq.ParquetWriter(path, token_table([0]).schema, compression="none") as writer:
        for start in range(0, 40, 10):
            writer.write_table(token_table(np.arange(start, start + 10)))
    index = load_index(tmp_path)
    order = GlobalOrder(row_group_sizes=index.row_group_sizes, global_batch=40, micro_batch=40)
    [read] = plan_reads(order, [0], 0, 1)
    assert read == Read(span=read.span, start=0, stop=40)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"{path}: row group \d cannot be read"):
        read_span(index, order, read)
    path.unlink()
    with pytest.raises(DataError, match=rf"{path}: row group \d cannot be read.*restore the file"):
        read_span(index, order, read)


def test_a_file_that_changed_after_it_was_indexed_is_named(tmp_path):
    path: Path = tmp_path / "part.parquet"
    pq.write_table(token_table(np.arange(20)), path)
    index = load_index(tmp_path)
    pq.write_table(token_table(np.arange(19)), path)
    order = GlobalOrder(row_group_sizes=index.row_group_sizes, global_batch=4, micro_batch=2)
    [read] = plan_reads(order, [0], 0, 1)
    with pytest.raises(DataError, match=rf"{path}: row group 0 has 19 rows, the index says 20"):
        read_span(index, order, read)


# ---- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64())])
def test_slices_of_lists_give_their_own_tokens(kind):
    whole = pa.chunked_array([pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], type=kind)])
    assert token_matrix(whole.slice(1, 2), 2).tolist() == [[3, 4], [5, 6]]
    assert token_matrix(whole.slice(4), 2).shape == (0, 2)


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[1, 2], []], [[1, 2, 3], [4, 5]], [[1, 2], None]])
def test_a_row_of_another_length_is_refused(rows):
    with pytest.raises(DataError, match="does not have 2 tokens"):
        token_matrix(pa.array(rows, type=pa.list_(pa.int32())), 2)


@pytest.mark.parametrize("rows", [[[1, 2, 3], [4]], [[1], [2, 3, 4]], [[1, 2, 3, 4], None]])
def test_lengths_that_cancel_are_refused(rows):
    with pytest.raises(DataError):
        token_matrix(pa.array(rows, type=pa.list_(pa.int32())), 2)


def test_a_token_that_is_null_is_refused():
    with pytest.raises(DataError):
        token_matrix(pa.array([[1, None], [3, 4]], type=pa.list_(pa.int32())), 2)


def test_lists_of_fixed_size_are_looked_at_as_well():
    kind = pa.list_(pa.uint16(), 2)
    whole = pa.array([[1, 2], [3, 4], [5, 6]], type=kind)
    assert token_matrix(whole.slice(1), 2).tolist() == [[3, 4], [5, 6]]
    with pytest.raises(DataError, match="does not have 3 tokens"):
        token_matrix(whole, 3)
    for rows in ([[1, 2], None], [[1, None], [3, 4]]):
        with pytest.raises(DataError):
            token_matrix(pa.array(rows, type=kind), 2)
