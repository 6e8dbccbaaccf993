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

from ray_ckpt.data.index import DataError, DataIndex
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
    """

    span: Span
    start: int
    stop: int


def plan_reads(
    order: GlobalOrder, streams: Iterable[int], start_step: int, stop_step: int
) -> Iterator[Read]:
    """The reads that feed the given streams through the global steps ``[start_step, stop_step)``.

    They come in the order in which training needs their first row, so that a consumer that takes them
    one after the other holds at most one span per stream. Nothing is made ahead of its use.
    """
    streams = tuple(streams)
    b, per_epoch = order.micro_batch, order.steps_per_epoch
    queue = [(start_step, j) for j in streams] if start_step < stop_step else []
    row = dict.fromkeys(streams, start_step * b)  # rows of the stream since the run began
    heapq.heapify(queue)
    while queue:
        _, stream = heapq.heappop(queue)
        epoch, offset = divmod(row[stream], per_epoch * b)
        span = order.span_at(epoch, stream, offset)
        start = offset - span.offset
        stop = min(span.num_rows, start + stop_step * b - row[stream])
        yield Read(span=span, start=start, stop=stop)
        row[stream] += stop - start
        if row[stream] < stop_step * b:
            heapq.heappush(queue, (row[stream] // b, stream))


def read_span(
    index: DataIndex, order: GlobalOrder, read: Read, on_corrupt: OnCorrupt = "fatal"
) -> pa.Table:
    """Reads one span in training order; every row group of it is read once.

    Args:
        index: the data.
        order: its global order.
        read: what to read.
        on_corrupt: "replace" puts the rows of another row group, drawn from (seed, epoch, row group), in
            the place of a damaged one. The order keeps its length and stays the same for any world; the
            rows that stand in are trained on twice in the epoch.

    Returns:
        Table of ``read.stop - read.start`` rows: ``tokens`` (list of integers), ``row`` (int64, row id),
        ``position`` (int64, place in the global order), ``stream`` (int64); with "replace" also
        ``replaced`` (int64, the damaged row whose place this row takes, or -1).

    Raises:
        DataError: a row group that cannot be read, or whose row count is not the index's.
    """
    layout = order.layout(read.span.epoch)
    permuted, _ = order.span_rows(read.span)
    wanted = permuted[read.start : read.stop]
    places = np.unique(np.searchsorted(layout.starts, wanted, side="right") - 1)
    tables, row_ids, meant, origins = [], [], [], []
    for place in places.tolist():
        group = int(layout.groups[place])
        first = int(order.group_starts[group])
        size = int(order.row_group_sizes[group])
        own = np.arange(first, first + size, dtype=np.int64)
        try:
            # Row ids are counted here, beside the bytes, and travel with them through every shuffle.
            table, rows = read_row_group(index, group), own
        except DamagedRowGroup as error:
            if on_corrupt == "fatal":
                raise
            table, rows = _stand_in(index, order, read.span.epoch, group, error)
        tables.append(table)
        row_ids.append(rows)
        meant.append(own)
        origins.append(np.arange(layout.starts[place], layout.starts[place + 1], dtype=np.int64))
    at = np.searchsorted(np.concatenate(origins), wanted)
    rows = np.concatenate(row_ids)[at]
    columns = {
        TOKENS: pa.concat_tables(tables).take(at).column(0),
        ROW: rows,
        POSITION: order.positions(read.span)[read.start : read.stop],
        STREAM: np.full(len(rows), read.span.stream, dtype=np.int64),
    }
    if on_corrupt == "replace":
        own = np.concatenate(meant)[at]
        columns[REPLACED] = np.where(own == rows, -1, own)
    return pa.table(columns)


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


def tokens_to_numpy(column: pa.ChunkedArray, seq_len: int) -> npt.NDArray[np.int64]:
    """A column of token lists as int64 [rows, seq_len].

    Raises:
        DataError: a row of another length, or a null.
    """
    return token_matrix(column, seq_len).astype(np.int64)


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
