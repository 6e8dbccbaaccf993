"""Runs a training function in plain processes on this machine, and kills them: a proof without a cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ray_ckpt.config import Config
from ray_ckpt.errors import RayCkptError
from ray_ckpt.prove.plant import gate_path, plant_fault, plant_gates, reached_path
from ray_ckpt.prove.script import Script

C = TypeVar("C", bound=Config)

PHASE_TIMEOUT_S = 300.0


def run_phases(config: C, train: Callable[[C], None], script: Script, fault: str = "") -> None:
    """Runs a script: each phase in new processes, which are killed (-9) at its last step.

    Args:
        config: of the run; its number of steps is the script's.
        train: the training function, importable in a new process.
        script: what happens.
        fault: planted in every attempt that resumes; empty for none.

    Raises:
        RayCkptError: a worker failed.
    """
    gates = config.run_dir / "gates"
    gates.mkdir(parents=True, exist_ok=True)
    for phase, end in zip(script.phases, script.ends, strict=True):
        path = gate_path(gates, end)
        if phase.event:
            path.touch()
        world = _World(config, train, phase.world, gates, fault)
        try:
            world.wait(reached_path(gates, end) if phase.event else None)
        finally:
            world.kill()
        path.unlink(missing_ok=True)


class _World:
    """The processes of one phase."""

    def __init__(
        self, config: C, train: Callable[[C], None], size: int, gates: Path, fault: str
    ) -> None:
        # A server that has imported torch once forks the workers: seconds for each of them are saved.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed.checkpoint", "ray_ckpt.session"]
        )
        port, self._log = free_port(), config.run_dir / "worker-error.txt"
        self._log.unlink(missing_ok=True)
        self._processes = [
            context.Process(
                target=_worker,
                args=(rank, size, port, config, train, gates, fault, self._log),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def wait(self, reached: Path | None) -> None:
        """Waits until a file is there, or, without one, until all processes ended well."""
        deadline = time.monotonic() + PHASE_TIMEOUT_S
        while any(process.is_alive() for process in self._processes):
            bad = [p.exitcode for p in self._processes if p.exitcode not in (None, 0)]
            if bad:
                time.sleep(0.5)
                text = self._log.read_text() if self._log.exists() else f"exit code {bad[0]}"
                raise RayCkptError(f"a worker of the proof failed:\n{text}")
            if reached is not None and reached.exists():
                return
            if time.monotonic() > deadline:
                raise RayCkptError(f"a phase of the proof took more than {PHASE_TIMEOUT_S:g} s")
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends what is left of the processes without a word."""
        for process in self._processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join()


def _worker(
    rank: int,
    size: int,
    port: int,
    config: C,
    train: Callable[[C], None],
    gates: Path,
    fault: str,
    log: Path,
) -> None:
    import torch
    import torch.distributed as dist

    # Two thread counts may give two sums inside a kernel; a proof compares like with like.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    try:
        plant_gates(gates)
        if fault:
            plant_fault(fault)
        train(config)
    except BaseException:  # noqa: BLE001 - told to the parent
        log.write_text(f"rank {rank}: {traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # peers may still hold connections: nothing to clean up in order


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
