"""What the benches that train share: processes that are a world, and targets that are held."""

from __future__ import annotations

import json
import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.facts import versions
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


def target_of(name: str, value: float, limit: float) -> dict[str, Any]:
    """A figure that may not be more than its limit."""
    return {"name": name, "value": value, "limit": limit, "ok": value <= limit}


def conclude(
    targets: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], path: str = ""
) -> int:
    """Prints the targets, writes them with the rows as JSON if a file is named; exit code 0 only if all hold."""
    for target in targets:
        word = "ok" if target["ok"] else "MISSED"
        print(f"{target['name']:<36}{target['value']:>9.3f}  limit {target['limit']:<6}{word}")
    if path:
        document = {"targets": list(targets), "rows": list(rows), "versions": versions()}
        Path(path).write_text(json.dumps(document, indent=1))
    return 0 if all(target["ok"] for target in targets) else 1
