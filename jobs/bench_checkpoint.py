"""What a save and a restore cost, against one memory copy and against other ways to do it, in one run.

    python jobs/bench_checkpoint.py [--quick] [--json FILE] [--folder DIR]

1 GiB of sharded state on each rank (128 MiB with ``--quick``), at 1 and 2 ranks. The ways take turns, round after
round, so that whatever else the machine does meets all of them; figures are medians. The *stall* of a save is what the
call takes, and what the optimizer's step waits for the copy; between the two a step computes for longer than a copy
takes. The state and the files are warm: of a restore the processor's part is measured, not the disk's. ``--folder`` is
where the files go, which decides what a write costs.

Time to commit is measured twice, and each compared with a raw write under the same conditions: with nothing beside it,
and beside a computing main thread, as in training. The second is held against its limit only where a rank has a core
beside the one that it computes on. Where all cores compute, whatever takes processor time waits for it, and a commit
takes more of that than a raw write does: for each byte also the copy and the checksum. Then the ratio is told. The
memory tier is the same saver with its files in ``/dev/shm``; its restore is what a
holder does on one node: every byte compared, then loaded from there. A replica is a copy to another process over TCP,
compared on the way.

``torch_checkpointing`` is compared when it is installed (``pip install torch-checkpointing``). Its restore does not
verify, and it was asked for each rank's own tensors.

Exit code 0 only when all targets hold.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from bench_report import conclude, target_of
from bench_savers import (
    RawCopy,
    SaverUnderTest,
    copies_over_tcp,
    local_parts,
    make_state,
    makers,
    remove,
    restore_committed,
    shared_memory,
)

from ray_ckpt.options import parse, run_main
from ray_ckpt.prove.processes import free_port

BLOCKING, OVERLAPPED = "ray_ckpt blocking", "ray_ckpt overlapped"
COLUMNS = ("first", "stall", "commit", "beside commit", "restore", "memory", "beside")
LIMITS = {
    "stall_blocking_over_copy": 1.3,
    "first_stall_over_steady": 1.5,
    "stall_overlapped_over_copy": 0.3,
    "commit_over_raw_write": 1.25,
    "commit_beside_over_raw_write_beside": 1.25,
    "restore_over_copy": 3.0,
    "restore_over_best_peer": 1.0,
}
BESIDE = "commit_beside_over_raw_write_beside"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What a save and a restore cost."""

    quick: bool = False
    """128 MiB for each rank and three rounds."""
    json: str = ""
    """File for the figures as JSON."""
    folder: str = ""
    """Folder for the files; the system's temporary one if empty."""
    mib: int = 1024
    """State of each rank, MiB."""
    rounds: int = 5
    """Rounds, after a first save of each way that is told apart."""


class _Bench:
    """The measurements on one rank; every time is that of the slowest rank."""

    def __init__(self, mib: int, folder: Path) -> None:
        self.state = make_state(mib * dist.get_world_size() << 20)
        self.group = dist.new_group(backend="gloo")
        self.raw = RawCopy(self.state)
        self.folder = folder
        self.times: dict[str, list[float]] = defaultdict(list)
        self.matrix = torch.randn(256, 256)
        self.copy_s = min(self.timed("copy", self.raw) for _ in range(3))
        self.times.clear()

    def timed(self, name: str, call: Callable[[], None]) -> float:
        """Time of a call, from when all ranks are there; kept under a name."""
        dist.barrier()
        started = time.perf_counter()
        call()
        return self.keep(name, time.perf_counter() - started)

    def keep(self, name: str, seconds: float) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.times[name].append(float(slowest))
        return float(slowest)

    def compute(self, units: int) -> None:
        for _ in range(units):
            torch.mm(self.matrix, self.matrix)

    def calibrate(self) -> None:
        """How many units of computing last three copies."""
        started = time.perf_counter()
        self.compute(50)
        unit = (time.perf_counter() - started) / 50
        self.units = max(1, int(3 * self.copy_s / unit))
        self.small = max(1, int(0.02 / unit))

    def save(self, name: str, saver: SaverUnderTest, folder: Path, first: bool) -> None:
        """One save with a step beside it, and computing until it is done."""
        dist.barrier()
        peak = _Peak()
        started = time.perf_counter()
        saver.begin(folder)
        stall = time.perf_counter() - started
        self.compute(self.units)
        waiting = time.perf_counter()
        saver.step()
        stall += time.perf_counter() - waiting
        while saver.busy():
            began = time.perf_counter()
            self.compute(self.small)
            self.times[f"{name}/beside"].append(time.perf_counter() - began)
        saver.wait()
        commit = time.perf_counter() - started
        self.keep(f"{name}/{'first' if first else 'stall'}", stall)
        if not first:
            self.keep(f"{name}/beside commit", commit)
            self.times[f"{name}/memory"].append(peak.stop())

    def save_alone(self, name: str, saver: SaverUnderTest, folder: Path) -> None:
        """One save with nothing beside it."""
        dist.barrier()
        started = time.perf_counter()
        saver.begin(folder)
        saver.step()
        saver.wait()
        self.keep(f"{name}/commit", time.perf_counter() - started)

    def write_beside(self, path: Path) -> None:
        """A raw write with the main thread computing, as it does beside a save."""
        dist.barrier()
        started = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(self.raw.write, path)
            while not writing.done():
                self.compute(self.small)
            writing.result()
        self.keep("raw write beside", time.perf_counter() - started)

    def round(self, savers: dict[str, SaverUnderTest], number: int) -> None:
        self.timed("copy", self.raw)
        rank = dist.get_rank()
        path = self.folder / f"raw-{rank}"
        self.timed("raw write", lambda: self.raw.write(path))
        self.timed("raw read", lambda: self.raw.read(path))
        path.unlink()
        self.write_beside(path)
        path.unlink()
        began = time.perf_counter()
        self.compute(self.small)
        self.times["alone"].append(time.perf_counter() - began)
        names = list(savers)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            folder = savers[name].place(self.folder, f"{name.replace(' ', '-')}-{number}")
            self.save(name, savers[name], folder, number == 0)
            if number:
                self.restore(name, savers[name], folder)
                remove(folder)
                self.save_alone(name, savers[name], folder)
            remove(folder)

    def restore(self, name: str, saver: SaverUnderTest, folder: Path) -> None:
        """One restore, and whether it is one."""
        before = local_parts(self.state)[0].clone()
        local_parts(self.state)[0].zero_()
        self.timed(f"{name}/restore", lambda: saver.restore(folder))
        assert torch.equal(local_parts(self.state)[0], before), f"{name} did not restore"


class _Peak:
    """Highest resident memory of this process over where it began, bytes."""

    def __init__(self) -> None:
        self._process, self._done = psutil.Process(), threading.Event()
        self._base = self._high = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self._high = max(self._high, self._process.memory_info().rss)

    def stop(self) -> float:
        self._done.set()
        self._thread.join()
        return float(self._high - self._base)


def measure(rank: int, world: int, port: int, config: BenchConfig, folder: str, out: Any) -> None:
    """One rank of one world; rank 0 tells."""
    try:
        _join(rank, world, port)
        bench = _Bench(config.mib, Path(folder))
        bench.calibrate()
        savers = {name: make() for name, make in makers(bench.state, bench.group).items()}
        for number in range(config.rounds + 1):
            bench.round(savers, number)
        # One is left for a world of another size.
        savers[BLOCKING].begin(Path(folder) / "kept")
        savers[BLOCKING].wait()
        dist.barrier()
        if rank == 0:
            out.put(dict(bench.times))
    except BaseException:
        out.put(traceback.format_exc())
        raise


def reshard(rank: int, world: int, port: int, config: BenchConfig, folder: str, out: Any) -> None:
    """Restores what a world of another size saved."""
    try:
        _join(rank, world, port)
        state = make_state(config.mib * (3 - world) << 20)
        group, raw, times = dist.new_group(backend="gloo"), RawCopy(state), defaultdict(list)
        calls: dict[str, Callable[[], None]] = {
            "copy": raw,
            "restore": lambda: restore_committed(state, Path(folder) / "kept", group),
        }
        for _ in range(config.rounds):
            for name, call in calls.items():
                dist.barrier()
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
        if rank == 0:
            out.put(dict(times))
    except BaseException:
        out.put(traceback.format_exc())
        raise


def _join(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # DCP's process tells of each step
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)


def run(target: Any, world: int, config: BenchConfig, folder: str) -> dict[str, list[float]]:
    """Runs a measurement in processes of its own."""
    context = multiprocessing.get_context("spawn")
    out: Queue[Any] = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=target, args=(rank, world, port, config, folder, out))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = out.get(timeout=1800)
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
    if isinstance(found, str):
        raise RuntimeError(found)
    return dict(found)


def replica_s(size: int) -> float:
    """Median time of a copy of so many bytes of shared memory to another process, over TCP, compared; seconds."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as place:
        return statistics.median(copies_over_tcp(Path(place), size, 3))


def rows_of(world: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The table of one world: medians, seconds, and each as a multiple of one memory copy."""
    copy = statistics.median(times["copy"])
    alone = statistics.median(times["alone"])
    rows: list[dict[str, Any]] = [
        {"ranks": world, "what": name, "seconds": statistics.median(times[name])}
        for name in ("copy", "raw write", "raw write beside", "raw read")
    ]
    for name in sorted({key.partition("/")[0] for key in times if "/" in key}):
        row: dict[str, Any] = {"ranks": world, "what": name}
        for column in COLUMNS:
            values = times.get(f"{name}/{column}")
            row[column] = statistics.median(values) if values else None
        if row["beside"] is not None:
            row["beside"] = row["beside"] / alone
        for column in ("first", "stall", "restore"):
            row[f"{column}_copies"] = None if row[column] is None else row[column] / copy
        rows.append(row)
    return rows


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """What the targets are about, for one world; pairs of one round where there are pairs."""

    def over(a: list[float], b: list[float]) -> float:
        return statistics.median(x / y for x, y in zip(a, b, strict=True))

    copies, writes = times["copy"][1:], times["raw write"][1:]
    best = min(
        statistics.median(values)
        for key, values in times.items()
        if key.endswith("/restore") and not key.startswith("ray_ckpt")
    )
    ours = times[f"{BLOCKING}/restore"]
    steady = statistics.median(times[f"{BLOCKING}/stall"])
    return {
        "stall_blocking_over_copy": over(times[f"{BLOCKING}/stall"], copies),
        "first_stall_over_steady": times[f"{BLOCKING}/first"][0] / steady,
        "stall_overlapped_over_copy": over(times[f"{OVERLAPPED}/stall"], copies),
        "commit_over_raw_write": over(times[f"{BLOCKING}/commit"], writes),
        "commit_beside_over_raw_write_beside": over(
            times[f"{BLOCKING}/beside commit"], times["raw write beside"][1:]
        ),
        "restore_over_copy": over(ours, copies),
        "restore_over_best_peer": statistics.median(ours) / best,
    }


def show(rows: list[dict[str, Any]], mib: int) -> None:
    """Prints the table."""
    heads = (
        "ranks",
        "what",
        "first",
        "stall",
        "commit",
        "beside",
        "restore",
        "copies",
        "memory",
        "steps",
    )
    print(("{:>5} {:<24}" + "{:>10}" * 8).format(*heads))
    for row in rows:
        if "seconds" in row:
            print(f"{row['ranks']:>5} {row['what']:<24}{row['seconds']:>10.3f} s for {mib} MiB")
            continue
        cells = [
            "" if row[c] is None else f"{row[c]:.3f} s"
            for c in ("first", "stall", "commit", "beside commit", "restore")
        ]
        copies = f"{row['stall_copies']:.2f}/{row['restore_copies']:.2f}"
        beside = "" if row["beside"] is None else f"{row['beside']:.2f}x"
        cells += [copies, f"{row['memory'] / 2**20:.0f} MiB", beside]
        print(f"{row['ranks']:>5} {row['what']:<24}" + "".join(f"{cell:>10}" for cell in cells))


def main() -> int:
    """Measures, prints a table, and holds the ratios against their limits."""
    config = parse(BenchConfig)
    if config.quick:
        config = BenchConfig(quick=True, json=config.json, folder=config.folder, mib=128, rounds=3)
    targets: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for world in (1, 2):
        with tempfile.TemporaryDirectory(dir=config.folder or None) as folder:
            times = run(measure, world, config, folder)
            other = run(reshard, 3 - world, config, folder)
        table = rows_of(world, times)
        rows += table
        show(table, config.mib)
        resharded = statistics.median(other["restore"]) / statistics.median(other["copy"])
        rows.append({"ranks": world, "what": f"restored at {3 - world} ranks", **other})
        if world == 1:
            seconds = replica_s(config.mib << 20)
            rows.append({"ranks": 1, "what": "replica to another process", "seconds": seconds})
            print(f"replica of {config.mib} MiB over TCP, compared on the way: {seconds:.3f} s")
        print(f"saved by {world}, restored by {3 - world}: {resharded:.2f} copies of that world")
        cores = os.cpu_count() or 1
        for name, value in ratios(times).items():
            if name == BESIDE and cores < 2 * world:
                print(
                    f"{name}_{world}: {value:.3f}, not held: {world} ranks compute on {cores} cores"
                )
                rows.append({"ranks": world, "what": name, "not held": value})
                continue
            targets.append(target_of(f"{name}_{world}", value, LIMITS[name]))
    return conclude(targets, rows, config.json, also=["torch_checkpointing"])


if __name__ == "__main__":
    run_main(main)
