"""From blocks of rows to micro-batches, and the proof that they are the right ones.

Blocks arrive as Arrow tables, in the order of need. Each is turned into numpy arrays once and held
against the global order once, whole; a micro-batch is then a slice of it. Doing both per micro-batch
cost more than reading the rows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.reader import POSITION, ROW, STREAM, TOKENS, list_matrix, token_matrix

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one forward and backward pass.

    Attributes:
        index: which micro-batch of the global batch, 0 to V-1.
        tokens: int64 [micro_batch, seq_len].
        rows: int64 [micro_batch], row ids.
        positions: int64 [micro_batch], places in the global order.
        columns: what a transform added, by name: [micro_batch], or [micro_batch, n] for lists.
    """

    index: int
    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}))


class _Stream:
    """Rows of one stream that have come and are not yet trained on.

    Args:
        plan: of the rank.
        number: of the stream, which is that of its micro-batch.
        row: the first row to come, counted in the stream since the run began.
    """

    def __init__(self, plan: BatchPlan, number: int, row: int) -> None:
        self._plan, self._number, self._row = plan, number, row
        self._blocks: deque[Arrays] = deque()
        self.held = 0

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
        self.held += len(positions)
        self._blocks.append(arrays)

    def take(self, count: int) -> Arrays:
        """Takes ``count`` rows, which must be there, from the front."""
        self.held -= count
        parts: list[Arrays] = []
        while count:
            block = self._blocks[0]
            length = len(block[POSITION])
            if length > count:
                parts.append({name: values[:count] for name, values in block.items()})
                self._blocks[0] = {name: values[count:] for name, values in block.items()}
                break
            parts.append(self._blocks.popleft())
            count -= length
        if len(parts) == 1:
            return parts[0]
        names = set(parts[0]).intersection(*parts[1:])
        return {name: np.concatenate([part[name] for part in parts]) for name in names}


def assemble(
    tables: Iterable[pa.Table], plan: BatchPlan, seq_len: int, start_step: int, stop_step: int
) -> Iterator[list[MicroBatch]]:
    """Cuts a rank's stream of tables into micro-batches.

    Every row is checked to be the one that the order puts at this place: a block that came late, early
    or twice stops the run instead of being trained on.

    Raises:
        RuntimeError: rows that are missing, surplus, or not in the global order.
        DataError: rows without the right number of tokens.
    """
    source = iter(tables)
    streams = {j: _Stream(plan, j, start_step * plan.micro_batch) for j in plan.micro_batches}
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
    streams = arrays.pop(STREAM)
    cuts = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), len(streams)]
    for low, high in itertools.pairwise(cuts):
        if high > low:
            yield int(streams[low]), {name: values[low:high] for name, values in arrays.items()}
