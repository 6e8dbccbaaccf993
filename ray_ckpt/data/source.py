"""The Ray Data edge of the feed: a datasource whose read tasks are runs of spans, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from ray.data import Datasource, ExecutionResources, ReadTask, TaskPoolStrategy
from ray.data.block import BlockMetadata

from ray_ckpt.data.catalog import Index
from ray_ckpt.data.mixture import Order
from ray_ckpt.data.reader import OnCorrupt, Read, read_span
from ray_ckpt.data.unhurried import Unhurried
from ray_ckpt.warm import task_options

SPARE_BLOCKS = 2
MIN_BUFFER_BYTES = 8 << 20


class GlobalOrderSource(Datasource):
    """Reads given spans; one read task per list of reads, one block per read."""

    def __init__(
        self,
        index: Index,
        order: Order,
        tasks: Sequence[Sequence[Read]],
        on_corrupt: OnCorrupt = "fatal",
    ) -> None:
        super().__init__()
        self._index, self._tasks, self._on_corrupt = index, tasks, on_corrupt
        # Without the cached layouts: every task would carry them.
        self._order = order.without_caches()

    def get_name(self) -> str:
        return "GlobalOrder"

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(map(_rows, self._tasks)) * self._row_bytes

    @property
    def largest_task_bytes(self) -> int:
        """Bytes of the blocks of the largest read task."""
        return max(map(_rows, self._tasks)) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        item = np.dtype(self._index.dtype or np.int64).itemsize
        return self._index.seq_len * item + 4 * 8  # and the row's numbers

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        shared = ray.put((self._index, self._order))
        return [self._task(task, shared) for task in self._tasks]

    def _task(self, reads: Sequence[Read], shared: Any) -> ReadTask:
        rows = _rows(reads)
        metadata = BlockMetadata(
            num_rows=rows, size_bytes=rows * self._row_bytes, input_files=None, exec_stats=None
        )
        return ReadTask(_reader(reads, shared, self._on_corrupt), metadata)


def _rows(reads: Sequence[Read]) -> int:
    return sum(read.stop - read.start for read in reads)


def _reader(
    reads: Sequence[Read], shared: Any, on_corrupt: OnCorrupt
) -> Callable[[], Iterator[pa.Table]]:
    def read() -> Iterator[pa.Table]:
        index, order = ray.get(shared)
        for item in reads:
            yield read_span(index, order, item, on_corrupt)

    return read


def ordered_dataset(
    index: Index,
    order: Order,
    tasks: Sequence[Sequence[Read]],
    *,
    read_tasks: int,
    prefetch_batches: int,
    transform: Callable[[pa.Table], pa.Table] | None = None,
    on_corrupt: OnCorrupt = "fatal",
) -> ray.data.Dataset:
    """A dataset that yields the given reads in order, and reads no further ahead than its buffers.

    Args:
        index: the data.
        order: its global order.
        tasks: the reads of each read task.
        read_tasks: tasks that run at a time.
        prefetch_batches: blocks that the consumer keeps ready.
        transform: applied to the blocks.
        on_corrupt: what to do about a damaged row group.
    """
    # Every dataset would announce its start and end in the job's log.
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    source = GlobalOrderSource(index, order, tasks, on_corrupt)
    # More than there are tasks would be a warning in the job's log, at the end of every run.
    at_a_time = min(read_tasks, len(tasks))
    options = task_options()
    dataset = ray.data.read_datasource(
        source,
        override_num_blocks=len(tasks),
        concurrency=at_a_time,
        num_cpus=0,
        **options,
    )
    if transform is not None:
        # The same resources and concurrency as the read: Ray Data makes one task of both.
        dataset = dataset.map_batches(
            transform,
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=0,
            compute=TaskPoolStrategy(size=at_a_time),
            **options,
        )
    dataset.context.custom_execution_callback_classes.append(Unhurried)  # of this dataset alone
    execution = dataset.context.execution_options
    execution.preserve_order = True
    # Without a limit of its own each rank's dataset takes half of the cluster's object store, and
    # reads a whole epoch ahead of a slow consumer.
    blocks = read_tasks + prefetch_batches + SPARE_BLOCKS
    limit = max(MIN_BUFFER_BYTES, blocks * source.largest_task_bytes)
    execution.resource_limits = ExecutionResources(object_store_memory=limit)
    return dataset
