"""From a place in the global order to rows of tokens: what is read, in what order.

Pure planning (:func:`plan_reads`) apart from the one function that opens files (:func:`read_span`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_ckpt.data.index import DataError, DataIndex
from ray_ckpt.data.order import GlobalOrder, Span

POSITION, ROW, STREAM, TOKENS = "position", "row", "stream", "tokens"


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


def read_span(index: DataIndex, order: GlobalOrder, read: Read) -> pa.Table:
    """Reads one span in training order; every row group of it is read once.

    Returns:
        Table of ``read.stop - read.start`` rows: ``tokens`` (list of integers), ``row`` (int64, row id),
        ``position`` (int64, place in the global order), ``stream`` (int64).

    Raises:
        DataError: a row group that cannot be read, or whose row count is not the index's.
    """
    layout = order.layout(read.span.epoch)
    permuted, _ = order.span_rows(read.span)
    wanted = permuted[read.start : read.stop]
    places = np.unique(np.searchsorted(layout.starts, wanted, side="right") - 1)
    tables, row_ids, origins = [], [], []
    for place in places.tolist():
        group = int(layout.groups[place])
        table = _read_row_group(index, group)
        first = int(order.group_starts[group])
        tables.append(table)
        # Row ids are counted here, beside the bytes, and travel with them through every shuffle.
        row_ids.append(np.arange(first, first + table.num_rows, dtype=np.int64))
        origins.append(np.arange(layout.starts[place], layout.starts[place + 1], dtype=np.int64))
    origin = np.concatenate(origins)
    taken = pa.concat_tables(tables).take(np.searchsorted(origin, wanted))
    rows = np.concatenate(row_ids)[np.searchsorted(origin, wanted)]
    positions = order.positions(read.span)[read.start : read.stop]
    return pa.table(
        {
            TOKENS: taken.column(0),
            ROW: rows,
            POSITION: positions,
            STREAM: np.full(len(rows), read.span.stream, dtype=np.int64),
        }
    )


def _read_row_group(index: DataIndex, group: int) -> pa.Table:
    path, local = index.locate(group)
    try:
        with pq.ParquetFile(path) as file:
            table = file.read_row_group(local, columns=[index.column])
    except (OSError, pa.ArrowException, IndexError) as error:
        raise DataError(
            f"{path}: row group {local} cannot be read ({error}). Every row group is needed for the "
            "global order: restore the file, or prepare the data again."
        ) from error
    expected = index.rows_in(group)
    if table.num_rows != expected:
        raise DataError(
            f"{path}: row group {local} has {table.num_rows} rows, the index says {expected}. The file "
            "changed after it was indexed: restore it, or prepare the data again."
        )
    return table


def tokens_to_numpy(column: pa.ChunkedArray, seq_len: int) -> np.ndarray:
    """A column of token lists as int64 [rows, seq_len].

    Raises:
        DataError: a row of another length, or a null.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    # Row by row: a long row would lend its tokens to the short one behind it, and the total be right.
    lengths = pc.list_value_length(array)
    if lengths.null_count or np.any(lengths.to_numpy(zero_copy_only=False) != seq_len):
        raise DataError(
            f"a row does not have {seq_len} tokens: every row must have the same length. Prepare the "
            "data again with the sequence length of the run."
        )
    tokens = array.flatten()
    if tokens.null_count:
        raise DataError(
            f"a row has null in place of a token ({tokens.null_count} in {len(array)} rows): prepare the "
            "data again."
        )
    flat = tokens.to_numpy(zero_copy_only=False)
    return flat.reshape(len(array), seq_len).astype(np.int64)
