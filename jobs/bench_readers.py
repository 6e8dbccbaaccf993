"""The readers that `bench_data.py` holds against each other.

A reader is a generator: it gives what one of several consumers gets at each step, as a list of int64
arrays. Consumers are processes of their own that start together: actors of the cluster for what reads
through Ray, spawned processes for the rest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import ray
from ray import cloudpickle

from ray_ckpt.data import GlobalOrderSampler
from ray_ckpt.data.feed import RayFeed
from ray_ckpt.data.index import DataIndex, load_index
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan

GLOBAL_BATCH, MICRO_BATCH = 96, 8

Step = list[npt.NDArray[np.int64]]
Reader = Callable[[Path, int, int, Any], Iterator[Step]]

# The cluster's workers need not find this folder.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class NotInstalled(Exception):
    """A reader whose library is missing; says how to get it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Of one pass through a set by some consumers.

    Attributes:
        rows_per_s: of all together, from the first request to the last row.
        steady_rows_per_s: from the first batch of the first one on.
        first_batch_s: until every consumer had its first batch.
    """

    rows_per_s: float
    steady_rows_per_s: float
    first_batch_s: float


def _quiet() -> None:
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False


def order_of(index: DataIndex) -> GlobalOrder:
    """The order that is measured."""
    return GlobalOrder(
        row_group_sizes=index.row_group_sizes, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
    )


def _plan(consumers: int, rank: int) -> BatchPlan:
    return BatchPlan(
        global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, world_size=consumers, rank=rank
    )


def ours(folder: Path, consumers: int, rank: int, shared: Any, start: int = 0) -> Iterator[Step]:
    """This project's feed, as the main job uses it."""
    index = load_index(folder)
    order = order_of(index)
    feed = RayFeed(index=index, order=order, plan=_plan(consumers, rank))
    # Always as much ahead as an epoch has: a run goes on in the next one.
    for step in feed.steps(start, start + order.steps_per_epoch):
        yield [micro.tokens for micro in step]


def plain(folder: Path, consumers: int, rank: int, shared: Any) -> Iterator[Step]:
    """Ray Data without order; several consumers share it by ``streaming_split``."""
    import ray.data

    _quiet()
    size = GLOBAL_BATCH // consumers
    source = ray.data.read_parquet(str(folder)) if shared is None else shared[rank]
    for batch in source.iter_batches(batch_size=size, batch_format="numpy"):
        yield [np.stack(batch["tokens"]).astype(np.int64)]


class TokenRows:
    """A map-style dataset of all rows, in memory."""

    def __init__(self, folder: Path) -> None:
        column = pq.read_table(folder).column("tokens").combine_chunks()
        self._tokens = column.flatten().to_numpy().reshape(len(column), -1)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[npt.NDArray[Any]]:
        """A batch at once, which the loader asks for where it can."""
        return list(self._tokens[rows].astype(np.int64))


def stateful(folder: Path, consumers: int, rank: int, shared: Any) -> Iterator[Step]:
    """torchdata's loader with the global order's sampler and one worker process."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    order = order_of(load_index(folder))
    plan = _plan(consumers, rank)
    sampler = GlobalOrderSampler(order, plan, stop_step=order.steps_per_epoch)
    loader = StatefulDataLoader(TokenRows(folder), batch_sampler=sampler, num_workers=1)
    batches = iter(loader)
    for _ in range(order.steps_per_epoch):
        yield [next(batches).numpy() for _ in plan.micro_batches]


def lit(folder: Path, consumers: int, rank: int, shared: Any) -> Iterator[Step]:
    """litdata's stream of token blocks, shuffled, with one worker process."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    os.environ |= {"WORLD_SIZE": str(consumers), "RANK": str(rank), "GLOBAL_RANK": str(rank)}
    loader = TokensLoader(block_size=load_index(folder).seq_len)
    dataset = StreamingDataset(
        str(_lit_folder(folder)), item_loader=loader, shuffle=True, drop_last=True
    )
    size = GLOBAL_BATCH // consumers
    for batch in StreamingDataLoader(dataset, batch_size=size, num_workers=1):
        yield [batch.numpy().astype(np.int64)]


def _lit_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-litdata")


def _lit_rows(path: str) -> Iterator[Any]:
    import torch

    tokens = pq.read_table(path).column("tokens").combine_chunks().flatten().to_numpy()
    yield torch.from_numpy(tokens.astype(np.int32))


def _make_lit(folder: Path) -> None:
    if importlib.util.find_spec("litdata") is None:
        raise NotInstalled("litdata is not installed: pip install litdata")
    if _lit_folder(folder).is_dir():
        return
    from litdata import TokensLoader, optimize

    index = load_index(folder)
    optimize(
        _lit_rows,
        [index.locate(group)[0] for group in range(0, len(index.row_group_sizes))][
            :: _per_file(index)
        ],
        output_dir=str(_lit_folder(folder)),
        chunk_size=index.seq_len * 8192,
        item_loader=TokensLoader(block_size=index.seq_len),
        num_workers=1,
        verbose=False,
    )


def _per_file(index: DataIndex) -> int:
    return len(index.files[0].row_groups)


def _need_torchdata(folder: Path) -> None:
    if importlib.util.find_spec("torchdata") is None:
        raise NotInstalled("torchdata is not installed: pip install torchdata")


READERS: dict[str, tuple[Reader, bool, Callable[[Path], None] | None]] = {
    "ray_ckpt": (ours, True, None),
    "plain ray data": (plain, True, None),
    "litdata": (lit, False, _make_lit),
    "StatefulDataLoader": (stateful, False, _need_torchdata),
}
"""By name: the reader, whether it reads through Ray, and what it needs before."""


def consume(
    reader: Reader, folder: Path, consumers: int, rank: int, limit_s: float, shared: Any = None
) -> tuple[float, float, float, int]:
    """Takes one consumer's steps: (start, first batch, end, rows), times of the wall clock.

    ``limit_s`` after its first batch it stops: of a reader that would take minutes the first seconds say enough.
    """
    start = time.time()
    first, rows = 0.0, 0
    for step in reader(folder, consumers, rank, shared):
        now = time.time()
        first = first or now
        rows += sum(len(tokens) for tokens in step)
        if now - first > limit_s:
            break
    end = time.time()
    return start, first or end, end, rows


def _warm(number: int) -> None:
    """Imports what a consumer needs before its clock starts."""
    import torch  # noqa: F401

    if importlib.util.find_spec("litdata") is not None:
        import litdata  # noqa: F401
    time.sleep(0.2)  # so that every process takes one of the calls


class _Consumer:
    def ready(self) -> None:
        import ray_ckpt.data.source  # noqa: F401

    def run(self, *args: Any) -> tuple[float, float, float, int]:
        return consume(*args)

    def first(self, folder: Path, step: int) -> float:
        start = time.perf_counter()
        steps = ours(folder, 1, 0, None, step)
        next(steps)
        return time.perf_counter() - start

    def skip(self, folder: Path, rows: int) -> float:
        start = time.perf_counter()
        seen = 0
        for step in plain(folder, 1, 0, None):
            seen += sum(len(tokens) for tokens in step)
            if seen >= rows:
                break
        return time.perf_counter() - start


def _actors(count: int) -> list[Any]:
    actors = [ray.remote(num_cpus=0)(_Consumer).remote() for _ in range(count)]
    ray.get([actor.ready.remote() for actor in actors])
    return actors


class Crew:
    """The consumers, and the Ray that they read through: processes that start once and serve the rates."""

    def __init__(self, consumers: int) -> None:
        self._actors = _actors(consumers)
        self._pools: dict[int, ProcessPoolExecutor] = {}

    def rate(self, name: str, folder: Path, consumers: int, limit_s: float) -> Rate:
        """Measures one pass of one reader, or ``limit_s`` seconds of it after the first batch.

        Raises:
            NotInstalled: its library is missing.
        """
        import ray.data

        reader, through_ray, prepare = READERS[name]
        if prepare is not None:
            prepare(folder)
        if through_ray:
            shared = None
            if name == "plain ray data" and consumers > 1:
                shared = ray.data.read_parquet(str(folder)).streaming_split(consumers, equal=True)
            times = ray.get(
                [
                    actor.run.remote(reader, folder, consumers, i, limit_s, shared)
                    for i, actor in enumerate(self._actors[:consumers])
                ]
            )
        else:
            pool = self._pool(consumers)
            parts = [
                pool.submit(consume, reader, folder, consumers, i, limit_s)
                for i in range(consumers)
            ]
            times = [part.result() for part in parts]
        start, first = min(t[0] for t in times), min(t[1] for t in times)
        end, rows = max(t[2] for t in times), sum(t[3] for t in times)
        return Rate(
            rows_per_s=rows / (end - start),
            steady_rows_per_s=(rows - GLOBAL_BATCH) / (end - first),
            first_batch_s=max(t[1] for t in times) - start,
        )

    def first_batches(self, folder: Path, offsets: Sequence[int]) -> list[float]:
        """Seconds to the first batch of our feed at sample offsets, one after the other.

        Each in a process of its own, as after a restart; the processes are started together.
        """
        actors = _actors(len(offsets))
        found = []
        for actor, offset in zip(actors, offsets, strict=True):
            found.append(float(ray.get(actor.first.remote(folder, offset // GLOBAL_BATCH))))
            ray.kill(actor)
        return found

    def skip_to(self, folder: Path, offset: int) -> float:
        """Seconds until plain Ray Data has given as many rows as there are before an offset."""
        return float(ray.get(self._actors[0].skip.remote(folder, offset)))

    def close(self) -> None:
        """Ends the processes."""
        for pool in self._pools.values():
            pool.shutdown()
        for actor in self._actors:
            ray.kill(actor)
        self._pools, self._actors = {}, []

    def _pool(self, consumers: int) -> ProcessPoolExecutor:
        if consumers not in self._pools:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(consumers, mp_context=context)
            list(pool.map(_warm, range(consumers)))
            self._pools[consumers] = pool
        return self._pools[consumers]


@contextlib.contextmanager
def crew(consumers: int) -> Iterator[Crew]:
    """Consumers, and a Ray of our own, of two CPUs; never one that is there."""
    # Niced readers would lose their time to whatever else this machine does.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as Ray spells it
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    _quiet()
    try:
        yield Crew(consumers)
    finally:
        ray.shutdown()
