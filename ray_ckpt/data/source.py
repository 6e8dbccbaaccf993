"""The Ray Data edge of the feed: a datasource whose read tasks are runs of spans, in order."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from ray_ckpt.data.index import DataIndex
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.reader import Read, read_span


class GlobalOrderSource(Datasource):
    """Reads given spans; one read task per list of reads, one block per read."""

    def __init__(
        self, index: DataIndex, order: GlobalOrder, tasks: Sequence[Sequence[Read]]
    ) -> None:
        super().__init__()
        self._index, self._tasks = index, tasks
        # Without the cached layouts: every task would carry them.
        self._order = replace(order, _layouts={})

    def get_name(self) -> str:
        return "GlobalOrder"

    def estimate_inmemory_data_size(self) -> int | None:
        rows = sum(read.stop - read.start for task in self._tasks for read in task)
        return rows * self._row_bytes()

    def _row_bytes(self) -> int:
        return self._index.seq_len * 8 + 24

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        shared = ray.put((self._index, self._order))
        return [self._task(task, shared) for task in self._tasks]

    def _task(self, reads: Sequence[Read], shared: Any) -> ReadTask:
        rows = sum(read.stop - read.start for read in reads)
        metadata = BlockMetadata(
            num_rows=rows, size_bytes=rows * self._row_bytes(), input_files=None, exec_stats=None
        )
        return ReadTask(_reader(reads, shared), metadata)


def _reader(reads: Sequence[Read], shared: Any) -> Callable[[], Iterator[pa.Table]]:
    def read() -> Iterator[pa.Table]:
        index, order = ray.get(shared)
        for item in reads:
            yield read_span(index, order, item)

    return read


def ordered_dataset(
    index: DataIndex, order: GlobalOrder, tasks: Sequence[Sequence[Read]], read_tasks: int
) -> ray.data.Dataset:
    """A dataset that yields the given reads in order."""
    # Every dataset would announce its start and end in the job's log.
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = ray.data.read_datasource(
            GlobalOrderSource(index, order, tasks),
            override_num_blocks=len(tasks),
            concurrency=read_tasks,
            num_cpus=0,
        )
    dataset.context.execution_options.preserve_order = True
    return dataset
