"""From blocks of rows to micro-batches, and the proof that they are the right ones.

Blocks arrive as Arrow tables, in the order of need. Each is turned into numpy arrays once and held
against the global order once, whole; a micro-batch is then a slice of it. Doing both per micro-batch
cost more than reading the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_ckpt.data.merge import Arrays, Merge, Rows
from ray_ckpt.data.mixture import MixedOrder, Order, split_ids
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.reader import POSITION, ROW, STREAM, TOKENS, list_matrix, token_matrix


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one forward and backward pass.

    Attributes:
        index: which micro-batch of the global batch, 0 to V-1.
        tokens: int64 [micro_batch, seq_len].
        rows: int64 [micro_batch], row ids.
        positions: int64 [micro_batch], places in the global order.
        columns: what a transform added, by name: [micro_batch], or [micro_batch, n] for lists.
        data: of a dataset of the training function's own, what its loader gave; then there are no tokens.
    """

    index: int
    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}))
    data: Any = None


class _Stream:
    """Rows of one stream that have come and are not yet trained on.

    Args:
        plan: of the rank.
        number: of the stream, which is that of its micro-batch.
        row: the first row to come, counted in the stream since the run began.
    """

    def __init__(self, plan: BatchPlan, number: int, row: int) -> None:
        self._plan, self._number, self._row = plan, number, row
        self._rows = Rows()

    @property
    def held(self) -> int:
        """Rows that are there and next."""
        return self._rows.held

    def push(self, arrays: Arrays) -> None:
        """Takes the next rows, if they are the next."""
        positions = arrays[POSITION]
        rows = self._row + np.arange(len(positions), dtype=np.int64)
        step, rest = np.divmod(rows, self._plan.micro_batch)
        expected = step * self._plan.global_batch + self._number * self._plan.micro_batch + rest
        wrong = positions != expected
        if wrong.any():
            at = int(np.argmax(wrong))
            raise RuntimeError(
                f"the feed is out of order: step {step[at]}, micro-batch {self._number} should go on at "
                f"position {expected[at]}, got positions {positions[at : at + 4].tolist()}... Data "
                "transforms must keep rows, their order and the position column."
            )
        self._row += len(positions)
        self._rows.push(arrays, len(positions))

    def take(self, count: int) -> Arrays:
        """Takes ``count`` rows, which must be there, from the front."""
        return self._rows.take(count)


class _MixedStream(_Stream):
    """A stream whose rows come from several sources, each in its own order."""

    def __init__(self, plan: BatchPlan, number: int, row: int, order: MixedOrder) -> None:
        super().__init__(plan, number, row)
        self._merge, self._sources = Merge(order, number, row), len(order.parts)

    def push(self, arrays: Arrays) -> None:
        """Takes rows; those whose turn has come are checked as in any stream."""
        for source, part in _cut(split_ids(arrays[ROW])[0], arrays):
            if not 0 <= source < self._sources:
                raise RuntimeError(
                    f"the feed has a row of source {source}, the mixture has {self._sources}. Data transforms "
                    "must keep the row column."
                )
            self._merge.push(source, part, len(part[ROW]))
        for merged in self._merge.pull():
            super().push(merged)


def assemble(
    tables: Iterable[pa.Table],
    plan: BatchPlan,
    seq_len: int,
    start_step: int,
    stop_step: int,
    *,
    order: Order | None = None,
) -> Iterator[list[MicroBatch]]:
    """Cuts a rank's stream of tables into micro-batches.

    With the ``order`` of a mixture the rows of a stream are merged from its sources first.

    Every row is checked to be the one that the order puts at this place: a block that came late, early
    or twice stops the run instead of being trained on.

    Raises:
        RuntimeError: rows that are missing, surplus, or not in the global order.
        DataError: rows without the right number of tokens.
    """
    source = iter(tables)
    first = start_step * plan.micro_batch
    streams = {
        j: _MixedStream(plan, j, first, order)
        if isinstance(order, MixedOrder)
        else _Stream(plan, j, first)
        for j in plan.micro_batches
    }
    for step in range(start_step, stop_step):
        batch = []
        for j, stream in streams.items():
            while stream.held < plan.micro_batch:
                block = next(source, None)
                if block is None:
                    raise RuntimeError(
                        f"the feed ended before its last step {stop_step - 1}: step {step} lacks rows for "
                        f"micro-batch {j}. Data transforms must keep every row."
                    )
                for number, arrays in _by_stream(_arrays(block, seq_len)):
                    if number not in streams:
                        raise RuntimeError(
                            f"the feed is out of order: at step {step} came rows of stream {number}, this "
                            f"rank reads the streams {list(streams)}. Data transforms must keep rows, their "
                            "order and the stream column."
                        )
                    streams[number].push(arrays)
            batch.append(_micro_batch(j, stream.take(plan.micro_batch)))
        yield batch


def _micro_batch(index: int, arrays: Arrays) -> MicroBatch:
    return MicroBatch(
        index=index,
        tokens=arrays.pop(TOKENS).astype(np.int64),
        rows=arrays.pop(ROW),
        positions=arrays.pop(POSITION),
        columns=arrays,
    )


def _arrays(table: pa.Table, seq_len: int) -> Arrays:
    """The columns of a block as arrays of one entry (or line) a row; no copy where Arrow allows."""
    names = table.column_names
    lacking = [name for name in (TOKENS, ROW, POSITION, STREAM) if name not in names]
    if lacking:
        raise RuntimeError(
            f"the feed got a block with the columns {names}: {lacking} are missing. Data transforms must "
            "keep them."
        )
    arrays: Arrays = {}
    for name in names:
        column = table.column(name).combine_chunks()
        if name == TOKENS:
            arrays[name] = token_matrix(column, seq_len)
        elif isinstance(column, pa.FixedSizeListArray | pa.ListArray | pa.LargeListArray):
            arrays[name] = list_matrix(column, f"value of {name!r}")
        else:
            arrays[name] = column.to_numpy(zero_copy_only=False)
    return arrays


def _by_stream(arrays: Arrays) -> Iterator[tuple[int, Arrays]]:
    """Cuts a block where the stream changes: blocks may have been joined on the way."""
    return _cut(arrays.pop(STREAM), arrays)


def _cut(keys: npt.NDArray[np.int64], arrays: Arrays) -> Iterator[tuple[int, Arrays]]:
    """Cuts a block where the key of its rows changes."""
    cuts = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    for low, high in itertools.pairwise(cuts):
        if high > low:
            yield int(keys[low]), {name: values[low:high] for name, values in arrays.items()}
