"""A world of processes, for the benches that train without Ray."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.prove.processes import free_port


def run_world(
    target: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0
) -> Any:
    """Calls ``target(rank, *args)`` in every process of a gloo world; returns what rank 0 returned.

    Raises:
        RuntimeError: a process failed, or none was done in time.
    """
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    port = free_port()
    workers = [
        context.Process(target=_worker, args=(target, rank, world_size, port, results, args))
        for rank in range(world_size)
    ]
    for process in workers:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                found = results.get(timeout=0.5)
                break
            except queue.Empty as error:
                failed = any(process.exitcode for process in workers)  # its peers wait for it
                if failed or time.monotonic() > deadline:
                    what = "a worker failed, see above" if failed else f"not done in {timeout_s} s"
                    raise RuntimeError(f"the world of {world_size} workers: {what}") from error
        for process in workers:
            process.join()
    finally:
        for process in workers:
            process.kill()
    return found


def _worker(
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    results: Queue[Any],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    found = target(rank, *args)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()
