"""A row group is read through passing errors; damage is found, named, and replaced only when asked."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from ray_ckpt.data import rowgroup
from ray_ckpt.data.feed import LocalFeed, MicroBatch, Transform
from ray_ckpt.data.index import DataError, DataIndex, load_index
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.reader import REPLACED, OnCorrupt
from ray_ckpt.data.replaced import REPLACED_NAME, RecordedFeed
from ray_ckpt.data.rowgroup import DamagedRowGroup, read_row_group

GROUPS, ROWS, SEQ_LEN = 10, 12, 4
G, B = 8, 2


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowgroup.time, "sleep", lambda _: None)


@pytest.fixture
def index(tmp_path: Path) -> DataIndex:
    """Two files with page checksums; token 0 of a row is its row id."""
    row = 0
    for number in range(2):
        schema = pa.schema([("tokens", pa.list_(pa.int32(), SEQ_LEN))])
        path = tmp_path / f"part-{number}.parquet"
        with pq.ParquetWriter(
            path, schema, compression="none", use_dictionary=False, write_page_checksum=True
        ) as writer:
            for _ in range(GROUPS // 2):
                rows = np.arange(row, row + ROWS)
                values = np.repeat(rows, SEQ_LEN).reshape(ROWS, SEQ_LEN).tolist()
                writer.write_table(pa.table({"tokens": values}, schema=schema))
                row += ROWS
    return load_index(tmp_path)


def damage(index: DataIndex, group: int) -> str:
    """Flips a bit in the values of a row group; returns the file."""
    path, local = index.locate(group)
    chunk = pq.read_metadata(path).row_group(local).column(0)
    content = bytearray(Path(path).read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 4
    Path(path).write_bytes(bytes(content))
    return path


def order_of(index: DataIndex) -> GlobalOrder:
    return GlobalOrder(row_group_sizes=index.row_group_sizes, global_batch=G, micro_batch=B, seed=3)


def feed_of(
    index: DataIndex,
    world_size: int = 1,
    rank: int = 0,
    on_corrupt: OnCorrupt = "fatal",
    transform: Transform | None = None,
) -> LocalFeed:
    plan = BatchPlan(global_batch=G, micro_batch=B, world_size=world_size, rank=rank)
    return LocalFeed(
        index=index, order=order_of(index), plan=plan, on_corrupt=on_corrupt, transform=transform
    )


def flat(steps: Iterator[list[MicroBatch]] | Sequence[list[MicroBatch]]) -> list[MicroBatch]:
    return [micro for step in steps for micro in step]


# ---- errors that pass, and errors that stay -------------------------------------------------------


class Flaky:
    """Fails some times with an error, then reads."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.calls = times, error, 0
        self.real = rowgroup._read

    def __call__(self, path: str, local: int, column: str) -> pa.Table:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.real(path, local, column)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_an_error_that_passes_costs_a_second_read(index, monkeypatch, caplog, code):
    flaky = Flaky(len(rowgroup.RETRY_WAITS_S), OSError(code, "server away"))
    monkeypatch.setattr(rowgroup, "_read", flaky)
    assert read_row_group(index, 7).num_rows == ROWS
    assert caplog.text.count("reading again") == len(rowgroup.RETRY_WAITS_S)


def test_an_error_that_stays_is_told_and_is_not_damage(index, monkeypatch):
    flaky = Flaky(99, OSError(errno.EIO, "server away"))
    monkeypatch.setattr(rowgroup, "_read", flaky)
    path, local = index.locate(7)
    with pytest.raises(DataError, match=rf"{path}: row group {local} .*server away") as caught:
        read_row_group(index, 7)
    assert not isinstance(caught.value, DamagedRowGroup)
    assert flaky.calls == len(rowgroup.RETRY_WAITS_S) + 1
    with pytest.raises(DataError, match="server away"):  # what cannot be reached is not replaced
        flat(feed_of(index, on_corrupt="replace").steps(0, 15))


def test_a_missing_file_is_not_waited_for(index, monkeypatch):
    flaky = Flaky(99, FileNotFoundError(errno.ENOENT, "gone"))
    monkeypatch.setattr(rowgroup, "_read", flaky)
    with pytest.raises(DataError, match="gone"):
        read_row_group(index, 7)
    assert flaky.calls == 1


def test_a_flipped_bit_is_found_by_the_checksum_and_named(index):
    path = damage(index, 6)
    with pytest.raises(DamagedRowGroup, match=rf"{path}: row group 1 .*on-corrupt replace"):
        read_row_group(index, 6)
    with pytest.raises(DamagedRowGroup, match=rf"{path}: row group 1 "):
        flat(feed_of(index).steps(0, 15))


def test_a_file_that_is_written_again_is_not_read_by_its_old_footer(index, tmp_path):
    read_row_group(index, 0)
    path = Path(index.locate(0)[0])
    rows = np.arange(ROWS * GROUPS // 2)
    values = np.repeat(rows + 500, SEQ_LEN).reshape(-1, SEQ_LEN).tolist()
    schema = pa.schema([("tokens", pa.list_(pa.int32(), SEQ_LEN))])
    pq.write_table(pa.table({"tokens": values}, schema=schema), path, row_group_size=ROWS)
    assert read_row_group(index, 0).column(0)[0].as_py() == [500] * SEQ_LEN


# ---- other rows in the place of damaged ones ------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1, 4])
def test_stand_ins_are_the_same_for_every_world_and_resume(index, epoch):
    damage(index, 2)
    damage(index, 6)
    order = order_of(index)
    spe = order.steps_per_epoch
    start, stop = epoch * spe, (epoch + 1) * spe
    whole = flat(feed_of(index, on_corrupt="replace").steps(start, stop))
    assert len(whole) == spe * G // B
    used = np.concatenate([micro.rows for micro in whole])
    meant = order.rows_at(np.concatenate([micro.positions for micro in whole]))
    replaced = np.concatenate([micro.columns[REPLACED] for micro in whole])
    lost = np.isin(meant // ROWS, [2, 6])
    assert lost.any()
    # Rows say where they are from, and whose place they take.
    assert np.array_equal(used[~lost], meant[~lost])
    assert np.array_equal(replaced, np.where(lost, meant, -1))
    assert not np.isin(used // ROWS, [2, 6]).any()
    tokens = np.concatenate([micro.tokens for micro in whole])
    assert np.array_equal(tokens[:, 0], used)
    for world_size, cut in [(3, 5), (4, 1)]:
        parts = [
            flat(feed_of(index, world_size, rank, "replace").steps(low, high))
            for low, high in [(start, start + cut), (start + cut, stop)]
            for rank in range(world_size)
        ]
        micros = [micro for part in parts for micro in part]
        positions = np.concatenate([micro.positions for micro in micros]).tolist()
        rows = np.concatenate([micro.rows for micro in micros]).tolist()
        found = dict(zip(positions, rows, strict=True))
        assert found == dict(
            zip(np.concatenate([m.positions for m in whole]).tolist(), used.tolist(), strict=True)
        )


def test_every_replaced_row_group_is_written_down_once(index, tmp_path):
    path = damage(index, 6)
    spe = order_of(index).steps_per_epoch
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    feed = RecordedFeed(
        feed=feed_of(index, on_corrupt="replace"),
        index=index,
        order=order_of(index),
        run_dir=run_dir,
        facts={"rank": 0, "generation": 5},
    )
    assert len(list(feed.steps(0, spe))) == spe
    [line] = map(json.loads, (run_dir / REPLACED_NAME).read_text().splitlines())
    assert (line["file"], line["row_group"], line["rows"], line["epoch"]) == (path, 1, ROWS, 0)
    assert (line["rank"], line["generation"]) == (0, 5)
    assert 1 <= line["step"] <= spe
    # In a later segment the feed counts from its beginning, and the line has the step of the run all the same.
    list(replace(feed, steps_before=100).steps(0, spe))
    _, later = map(json.loads, (run_dir / REPLACED_NAME).read_text().splitlines())
    assert later["step"] == 100 + line["step"]


def test_data_that_is_all_damaged_ends_the_run(index):
    for group in range(GROUPS):
        damage(index, group)
    with pytest.raises(DataError, match="beyond use"):
        flat(feed_of(index, on_corrupt="replace").steps(0, 1))


# ---- transforms -----------------------------------------------------------------------------------


def negated(table: pa.Table) -> pa.Table:
    """Changes the tokens and adds columns, from the rows and their positions alone."""
    tokens = table.column("tokens").combine_chunks()
    changed = pa.FixedSizeListArray.from_arrays(pa.compute.negate(tokens.flatten()), SEQ_LEN)
    at = table.schema.get_field_index("tokens")
    table = table.set_column(at, "tokens", changed)
    mask = pa.array(np.stack([table.column("position").to_numpy() % 5] * 3, axis=1).tolist())
    table = table.append_column("mask", mask)
    return table.append_column("weight", pa.array(table.column("row").to_numpy() / 2))


def test_a_transform_changes_tokens_and_adds_columns_for_any_world(index):
    spe = order_of(index).steps_per_epoch
    for world_size in (1, 3):
        for rank in range(world_size):
            for micro in flat(feed_of(index, world_size, rank, transform=negated).steps(0, spe)):
                assert np.array_equal(micro.tokens[:, 0], -micro.rows)
                assert np.array_equal(micro.columns["weight"], micro.rows / 2)
                assert micro.columns["mask"].shape == (B, 3)
                assert np.array_equal(micro.columns["mask"][:, 1], micro.positions % 5)


def take(*rows: int) -> Transform:
    return lambda table: table.take(list(rows) + list(range(2, table.num_rows)))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (take(1, 0), "keep rows, their order"),
        (take(0), "keep rows, their order"),
        (take(0, 1, 1), "keep rows, their order"),
        (lambda table: table.slice(0, 0), "keep every row"),
        (lambda table: table.drop_columns(["position"]), r"\['position'\] are missing"),
    ],
)
def test_a_transform_that_loses_the_order_is_refused(index, transform, message):
    with pytest.raises(RuntimeError, match=message):
        flat(feed_of(index, transform=transform).steps(0, 15))


def test_a_transform_that_makes_other_lengths_is_refused(index):
    def cut(table: pa.Table) -> pa.Table:
        rows: Any = [row[:-1] for row in table.column("tokens").to_pylist()]
        return table.set_column(0, "tokens", pa.array(rows))

    with pytest.raises(DataError, match=f"does not have {SEQ_LEN} tokens"):
        flat(feed_of(index, transform=cut).steps(0, 15))
