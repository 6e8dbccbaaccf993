"""What a rank trains on: its micro-batches, step after step, in the global order.

Two feeds give the same micro-batches. :class:`LocalFeed` reads when it is asked, in this process.
:class:`RayFeed` lets Ray Data read ahead: one dataset per rank, whose read tasks are runs of spans and
whose blocks come in order (``preserve_order``). ``streaming_split`` is not used: it does not promise an
order. Read tasks reserve no CPU, because a cluster whose CPUs are all taken by training workers would
never run them; ``read_tasks`` bounds how many run at a time for each rank.

A feed only ever counts from the step it is told to start at. What it has read ahead is nobody's
position: the position is what was trained, and the session keeps it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_ckpt.data.index import DataIndex
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.reader import POSITION, ROW, STREAM, TOKENS, Read, plan_reads, read_span
from ray_ckpt.data.reader import tokens_to_numpy as _tokens

# A dataset of Ray Data lists all its read tasks when it starts, at about 1 ms each: a month of reads is
# cut into datasets of this many tasks.
TASKS_PER_DATASET = 64


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one forward and backward pass.

    Attributes:
        index: which micro-batch of the global batch, 0 to V-1.
        tokens: int64 [micro_batch, seq_len].
        rows: int64 [micro_batch], row ids.
        positions: int64 [micro_batch], places in the global order.
    """

    index: int
    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


class Feed(Protocol):
    """Gives the micro-batches of one rank, one list per global step."""

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MicroBatch]]:
        """Yields the rank's micro-batches of each global step in ``[start_step, stop_step)``."""
        ...


def assemble(
    tables: Iterable[pa.Table], plan: BatchPlan, seq_len: int, start_step: int, stop_step: int
) -> Iterator[list[MicroBatch]]:
    """Cuts a rank's stream of tables into micro-batches.

    Each micro-batch is checked to be the one that the order puts at this place: a block that came late,
    early or twice stops the run instead of being trained on.
    """
    source = iter(tables)
    queues: dict[int, deque[pa.Table]] = {j: deque() for j in plan.micro_batches}
    rows: dict[int, int] = dict.fromkeys(plan.micro_batches, 0)
    for step in range(start_step, stop_step):
        batch = []
        for j in plan.micro_batches:
            while rows[j] < plan.micro_batch:
                block = next(source, None)
                if block is None:
                    raise RuntimeError(
                        f"the feed ended before its last step {stop_step - 1}: step {step} lacks rows for "
                        f"micro-batch {j}. Data transforms must keep every row."
                    )
                for stream, table in _by_stream(block):
                    if stream not in queues:
                        raise RuntimeError(
                            f"the feed is out of order: at step {step} came rows of stream {stream}, this "
                            f"rank reads the streams {list(queues)}. Data transforms must keep rows, their "
                            "order and the stream column."
                        )
                    queues[stream].append(table)
                    rows[stream] += table.num_rows
            piece = _take(queues[j], plan.micro_batch)
            rows[j] -= plan.micro_batch
            positions = piece.column(POSITION).to_numpy()
            first = step * plan.global_batch + j * plan.micro_batch
            if not np.array_equal(positions, np.arange(first, first + plan.micro_batch)):
                raise RuntimeError(
                    f"the feed is out of order: step {step}, micro-batch {j} should start at position "
                    f"{first}, got positions {positions[:4].tolist()}... Data transforms must keep "
                    "rows, their order and the position column."
                )
            batch.append(
                MicroBatch(
                    index=j,
                    tokens=_tokens(piece.column(TOKENS), seq_len),
                    rows=piece.column(ROW).to_numpy(),
                    positions=positions,
                )
            )
        yield batch


def _by_stream(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Cuts a table where the stream changes: a transform may have joined blocks."""
    streams = table.column(STREAM).to_numpy()
    cuts = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), len(streams)]
    for low, high in itertools.pairwise(cuts):
        if high > low:
            yield int(streams[low]), table.slice(low, high - low)


def _take(queue: deque[pa.Table], count: int) -> pa.Table:
    """Takes ``count`` rows from the front of a queue of tables."""
    parts = []
    while count:
        table = queue.popleft()
        if table.num_rows > count:
            queue.appendleft(table.slice(count))
            table = table.slice(0, count)
        parts.append(table)
        count -= table.num_rows
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts)


@dataclass(frozen=True, kw_only=True)
class LocalFeed:
    """Reads in this process, when asked: tests, small data, programs without Ray."""

    index: DataIndex
    order: GlobalOrder
    plan: BatchPlan

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MicroBatch]]:
        reads = plan_reads(self.order, self.plan.micro_batches, start_step, stop_step)
        tables = (read_span(self.index, self.order, read) for read in reads)
        return assemble(tables, self.plan, self.index.seq_len, start_step, stop_step)


@dataclass(frozen=True, kw_only=True)
class RayFeed:
    """Lets Ray Data read ahead of training.

    Attributes:
        index: the data.
        order: its global order.
        plan: this rank's share.
        rows_per_task: rows that one read task reads, about; a task is some milliseconds of overhead.
        read_tasks: read tasks that run at a time for this rank.
        prefetch_batches: blocks kept ready in this process.
    """

    index: DataIndex
    order: GlobalOrder
    plan: BatchPlan
    rows_per_task: int = 4096
    read_tasks: int = 1
    prefetch_batches: int = 2

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MicroBatch]]:
        reads = plan_reads(self.order, self.plan.micro_batches, start_step, stop_step)
        return assemble(self._tables(reads), self.plan, self.index.seq_len, start_step, stop_step)

    def _tables(self, reads: Iterator[Read]) -> Iterator[pa.Table]:
        tasks = group_reads(reads, self.rows_per_task)
        while chunk := list(itertools.islice(tasks, TASKS_PER_DATASET)):
            yield from self._dataset(chunk).iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=self.prefetch_batches
            )

    def _dataset(self, tasks: Sequence[Sequence[Read]]) -> Any:
        from ray_ckpt.data.source import ordered_dataset

        return ordered_dataset(self.index, self.order, tasks, self.read_tasks)


def group_reads(reads: Iterator[Read], rows_per_task: int) -> Iterator[list[Read]]:
    """Joins successive reads into read tasks of about ``rows_per_task`` rows."""
    task: list[Read] = []
    rows = 0
    for read in reads:
        task.append(read)
        rows += read.stop - read.start
        if rows >= rows_per_task:
            yield task
            task, rows = [], 0
    if task:
        yield task
