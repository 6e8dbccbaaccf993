"""From a place in the global order to rows of tokens: what is read, in what order.

Pure planning (:func:`plan_reads`) apart from the function that reads (:func:`read_span`).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_ckpt.data.catalog import Index
from ray_ckpt.data.index import DataError, DataIndex
from ray_ckpt.data.mixture import Order, row_ids
from ray_ckpt.data.order import GlobalOrder, Int64s, Span
from ray_ckpt.data.permute import mix, permute
from ray_ckpt.data.rowgroup import DamagedRowGroup, read_row_group

logger = logging.getLogger(__name__)

POSITION, ROW, STREAM, TOKENS = "position", "row", "stream", "tokens"
REPLACED = "replaced"

OnCorrupt = Literal["fatal", "replace"]

STAND_IN_TRIES = 16
"""Row groups tried in the place of a damaged one."""

_STAND_IN = 4  # the purpose of a draw, as those in order.py


@dataclass(frozen=True, kw_only=True)
class Read:
    """A span, and the part of it that is wanted.

    Attributes:
        span: the window of one stream.
        start: first wanted row of the span.
        stop: one past the last.
        source: whose span it is, in a mixture.
    """

    span: Span
    start: int
    stop: int
    source: int = 0


def plan_reads(
    order: Order, streams: Iterable[int], start_step: int, stop_step: int
) -> Iterator[Read]:
    """The reads that feed the given streams through the global steps ``[start_step, stop_step)``.

    They come in the order in which training needs their first row, so that a consumer that takes them
    one after the other holds at most one span per stream and source. Nothing is made ahead of its use.
    """
    b = order.micro_batch
    queue: list[_Need] = []
    if start_step < stop_step:
        for j in streams:
            rows = order.rows_before(j, start_step * b)
            stops = order.rows_before(j, stop_step * b)
            for source, (row, stop) in enumerate(zip(rows, stops, strict=True)):
                if row < stop:
                    queue.append(_need(order, j, source, row, stop))
    heapq.heapify(queue)
    while queue:
        *_, stream, _, source, row, end = heapq.heappop(queue)
        part = order.parts[source]
        epoch, offset = divmod(row, part.stream_rows)
        span = part.span_at(epoch, stream, offset)
        start = offset - span.offset
        stop = min(span.num_rows, start + end - row)
        yield Read(span=span, start=start, stop=stop, source=source)
        row += stop - start
        if row < end:
            heapq.heappush(queue, _need(order, stream, source, row, end))


# Step, stream and row of the micro-batch that needs it; source, its next row, and one past its last.
_Need = tuple[int, int, int, int, int, int]


def _need(order: Order, stream: int, source: int, row: int, stop: int) -> _Need:
    place = int(order.stream_places(stream, source, row, row + 1)[0])
    step, rest = divmod(place, order.micro_batch)
    return step, stream, rest, source, row, stop


def read_span(index: Index, order: Order, read: Read, on_corrupt: OnCorrupt = "fatal") -> pa.Table:
    """Reads one span in training order; every row group of it is read once.

    Args:
        index: the data.
        order: its global order.
        read: what to read.
        on_corrupt: "replace" puts the rows of another row group of the source, drawn from (seed, epoch, row
            group), in the place of a damaged one. The order keeps its length and stays the same for any
            world; the rows that stand in are trained on twice in the epoch.

    Returns:
        Table of ``read.stop - read.start`` rows: ``tokens`` (list of integers), ``row`` (int64, row id),
        ``position`` (int64, place in the global order), ``stream`` (int64); with "replace" also
        ``replaced`` (int64, the damaged row whose place this row takes, or -1).

    Raises:
        DataError: a row group that cannot be read, or whose row count is not the index's.
    """
    part, part_index = order.parts[read.source], index.parts[read.source]
    layout = part.layout(read.span.epoch)
    permuted, _ = part.span_rows(read.span)
    wanted = permuted[read.start : read.stop]
    places = np.unique(np.searchsorted(layout.starts, wanted, side="right") - 1)
    tables, row_numbers, meant, origins = [], [], [], []
    for place in places.tolist():
        group = int(layout.groups[place])
        first = int(part.group_starts[group])
        size = int(part.row_group_sizes[group])
        own = np.arange(first, first + size, dtype=np.int64)
        try:
            # Row ids are counted here, beside the bytes, and travel with them through every shuffle.
            table, rows = read_row_group(part_index, group), own
        except DamagedRowGroup as error:
            if on_corrupt == "fatal":
                raise
            table, rows = _stand_in(part_index, part, read.span.epoch, group, error)
        tables.append(table)
        row_numbers.append(rows)
        meant.append(own)
        origins.append(np.arange(layout.starts[place], layout.starts[place + 1], dtype=np.int64))
    at = np.searchsorted(np.concatenate(origins), wanted)
    rows = np.concatenate(row_numbers)[at]
    columns = {
        TOKENS: _tokens(pa.concat_tables(tables).take(at).column(0), index),
        ROW: row_ids(read.source, rows),
        POSITION: _positions(order, read),
        STREAM: np.full(len(rows), read.span.stream, dtype=np.int64),
    }
    if on_corrupt == "replace":
        own = np.concatenate(meant)[at]
        columns[REPLACED] = np.where(own == rows, -1, row_ids(read.source, own))
    return pa.table(columns)


def _positions(order: Order, read: Read) -> Int64s:
    """Global positions of the rows of a read."""
    span, b = read.span, order.micro_batch
    low = span.epoch * order.parts[read.source].stream_rows + span.offset
    places = order.stream_places(span.stream, read.source, low + read.start, low + read.stop)
    return places // b * order.global_batch + span.stream * b + places % b


def _tokens(column: pa.ChunkedArray, index: Index) -> pa.ChunkedArray | pa.Array:
    """Tokens of a source in the one type of its mixture: Ray Data takes blocks of one schema."""
    if len(index.parts) == 1:
        return column
    dtype = np.dtype(index.dtype)
    if column.type == pa.list_(pa.from_numpy_dtype(dtype), index.seq_len):
        return column
    flat = token_matrix(column, index.seq_len).astype(dtype).ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), index.seq_len)


def _stand_in(
    index: DataIndex, order: GlobalOrder, epoch: int, group: int, damage: DamagedRowGroup
) -> tuple[pa.Table, Int64s]:
    """Rows, and their ids, that take the place of a damaged row group: as many as it should have."""
    count = len(order.row_group_sizes)
    candidates = permute(
        np.arange(min(count, STAND_IN_TRIES)), count, mix(order.seed, epoch, group, _STAND_IN)
    )
    for candidate in candidates.tolist():
        if candidate == group or not order.row_group_sizes[candidate]:
            continue
        try:
            table = read_row_group(index, candidate)
        except DamagedRowGroup:
            continue
        logger.warning(
            "%s Row group %d of the data stands in for it in epoch %d.", damage, candidate, epoch
        )
        rows = np.arange(order.row_group_sizes[group], dtype=np.int64) % table.num_rows
        return table.take(rows), order.group_starts[candidate] + rows
    raise DataError(
        f"{damage} So are {len(candidates)} others that were tried in its place: the data is beyond use."
    ) from damage


def token_matrix(column: pa.ChunkedArray | pa.Array, seq_len: int) -> npt.NDArray[Any]:
    """A column of token lists as [rows, seq_len] of its own integer type, without a copy if possible.

    Raises:
        DataError: a row of another length, or a null.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return list_matrix(array, "token", seq_len)


def list_matrix(array: pa.Array, what: str, length: int | None = None) -> npt.NDArray[Any]:
    """An array of lists of one length as [rows, length], without a copy if possible.

    Args:
        array: the lists.
        what: they hold.
        length: of each; None takes that of the first.

    Raises:
        DataError: a row of another length, or a null.
    """
    # Row by row: a long row would lend its values to the short one behind it, and the total be right.
    lengths = pc.list_value_length(array)
    ends = pc.min_max(lengths).as_py()
    if length is None:
        length = ends["min"] or 0
    if lengths.null_count or (len(array) and (ends["min"], ends["max"]) != (length, length)):
        raise DataError(
            f"a row does not have {length} {what}s: every row must have the same length. Prepare the "
            "data again with the sequence length of the run."
        )
    values = array.flatten()
    if values.null_count:
        raise DataError(
            f"a row has null in place of a {what} ({values.null_count} in {len(array)} rows): prepare "
            "the data again."
        )
    return values.to_numpy(zero_copy_only=False).reshape(len(array), length)
