"""Worlds that are struck by a fault at a named point, and what must hold after every kill."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worlds import PRELOAD, _main, events, train

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.verify import verify_files

LIMIT_S = 40.0  # an attempt takes one or two seconds here; what takes this long does not end


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the processes of a world ended.

    Attributes:
        exits: exit code of each, -9 for a kill; None for one that was still there when the first had died.
        results: what each returned, None for nothing.
        errors: traceback of each that raised.
        seconds: from the start until the first death, or until all had come to their end.
    """

    exits: list[int | None]
    results: list[Any]
    errors: list[str]
    seconds: float

    @property
    def struck(self) -> bool:
        """Whether one was killed."""
        return -9 in self.exits


class World:
    """Processes that each call ``target(rank, world_size, *args)``; to be closed."""

    def __init__(self, target: Callable[..., Any], world_size: int, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        self._started = time.monotonic()
        self.processes = [
            context.Process(target=_main, args=(self._folder.name, target, rank, world_size, args))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def is_frozen(self, rank: int) -> bool:
        """Whether a process sleeps by a SIGSTOP."""
        stat = Path(f"/proc/{self.processes[rank].pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def end(self, grace_s: float = 0.0) -> Ending:
        """Waits until all have come to their end, or one has died; then ends the others after ``grace_s``."""
        while self._alive() and time.monotonic() - self._started < LIMIT_S:
            if self._died():
                break
            time.sleep(0.005)
        seconds = time.monotonic() - self._started
        deadline = time.monotonic() + grace_s
        while self._died() and self._alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        exits = [process.exitcode for process in self.processes]
        self.close()
        found = [Path(self._folder.name) / f"result-{r}" for r in range(len(self.processes))]
        told = [pickle.loads(p.read_bytes()) if p.exists() else ("gone", None) for p in found]
        self._folder.cleanup()
        return Ending(
            exits=exits,
            results=[value if kind == "ok" else None for kind, value in told],
            errors=[value for kind, value in told if kind == "error"],
            seconds=seconds,
        )

    def close(self) -> None:
        """Ends what is left of the processes without a word."""
        for process in self.processes:
            process.kill()
            process.join()

    def _alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def _died(self) -> bool:
        return any(process.exitcode not in (None, 0) for process in self.processes)


def run_struck(
    target: Callable[..., Any], world_size: int, *args: Any, grace_s: float = 0.0
) -> Ending:
    """Calls ``target(rank, world_size, *args)`` in every process, and ends them all when one has died.

    Args:
        target: what each does.
        world_size: processes.
        args: for the target.
        grace_s: for how long the others go on.
    """
    return World(target, world_size, *args).end(grace_s)


def train_struck(
    rank: int, world: int, config: Any, faults: dict[int, str], *more: Any
) -> dict[str, Any]:
    """:func:`worlds.train` with faults, by rank."""
    from ray_ckpt.fault_points import arm

    arm(faults.get(rank, ""))
    return train(rank, world, config, *more)


def newest_good(run_dir: Path) -> int:
    """Step of the newest committed checkpoint, 0 for none; nothing that is committed may be bad."""
    entries = list_checkpoints(run_dir)
    for entry in entries:
        if entry.committed and entry.quarantined is None:
            assert entry.manifest is not None, f"{entry.folder.name}: {entry.fault}"
            faults = verify_files(entry.folder, entry.manifest)
            assert faults == [], f"{entry.folder.name} is committed, and {faults[0]}"
    return max((entry.step for entry in usable(entries)), default=0)


def check_restores(config: Any, newest: int, attempts_before: int) -> None:
    """Attempts that began since then restored the newest checkpoint that there was, and nothing else."""
    for event in events(config, "restored"):
        if event["generation"] > attempts_before:
            assert event["step"] == newest, f"{event} although step {newest} was committed"
