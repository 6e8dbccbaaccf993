"""Checkpoints alone: saves, verifies and restores a training state in a folder; no run, no tracker, no Ray.

For a program that has called ``torch.distributed.init_process_group()`` and decides itself when to save::

    checkpoints = Checkpoints("/shared/mine")
    state = TrainState(model=model, optimizer=optimizer)
    first = checkpoints.restore(state)          # step of the newest checkpoint that is whole, 0 for none
    for step in range(first + 1, steps + 1):
        ...
        if step % 100 == 0:
            checkpoints.save(step, state)       # stands still for one copy; the rest goes on in the background
    checkpoints.close()

The files are those of a run: written with checksums, committed by a manifest that comes last, verified before use,
read by any number of workers, and by ``ray-ckpt ls``, ``verify``, ``show`` and ``export`` with the folder as the run.
Nothing is deleted here, and no state is refused for what is in it. All ranks call the same methods in the same order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.checkpoint.restore import load, verify_together, with_rng
from ray_ckpt.checkpoint.saver import Saver, SaveResult
from ray_ckpt.checkpoint.staging import Stager
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.config import StagingMode, absolute_folder
from ray_ckpt.errors import RayCkptError, RestoreError, StorageError
from ray_ckpt.facts import versions
from ray_ckpt.rollcall import RollCall
from ray_ckpt.state.train_state import Progress, TrainState
from ray_ckpt.tiers.housekeeping import read_back
from ray_ckpt.tracker.house import FolderHouse
from ray_ckpt.tracker.lock import RunLock
from ray_ckpt.tracker.shelf import newest_usable
from ray_ckpt.tracker.talk import Talk

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder; every rank makes one of it.

    Args:
        folder: that every rank sees; one program at a time uses it.
        allow_missing: items, or tensors by the first parts of their names, that only the state or only a checkpoint
            has (see ``TrainState.targets``).
        staging: training stands still for the copy, or only the optimizer's next step waits for it ("overlapped").
        timeout_s: longest wait for another rank, seconds; at least as long as writing a checkpoint takes.
        device: of this rank; None for the GPU of ``LOCAL_RANK``, or the CPU.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ConfigError: another program uses the folder, or it is none.
        StorageError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        allow_missing: tuple[str, ...] = (),
        staging: StagingMode = "blocking",
        timeout_s: float = 600.0,
        device: torch.device | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "Checkpoints() works in a program that has called torch.distributed.init_process_group(): call it "
                "first, with a world size of 1 in a program of one process."
            )
        self.folder = Path(absolute_folder(str(folder), "folder"))
        self._allow_missing, self._staging, self._timeout_s = allow_missing, staging, timeout_s
        self._device = device or own_device()
        limit = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=limit)
        words = dist.new_group(backend="gloo", timeout=limit)
        self._roll = RollCall(words)
        self._rank = dist.get_rank()
        self._clerk = _Clerk(self.folder) if self._rank == 0 else None
        self._talk = Talk(self._clerk, words)
        with self._roll.during("Checkpoints()"):
            self._generation: int = self._talk.ask("begin")
        self._saver: Saver | None = None

    def restore(self, state: TrainState) -> int:
        """Loads the newest checkpoint that is whole into ``state``; one that is not is set aside.

        ``state.progress`` is that of the save, and the random generators are too if the number of workers is.

        Returns:
            Its step; 0 when there is none yet.

        Raises:
            RestoreError: there are checkpoints and none can be used, or they do not fit the state.
        """
        with self._roll.during("restore()"):
            while (manifest := self._talk.ask("newest")) is not None:
                folder = self.folder / CHECKPOINTS_DIR / manifest.name
                if faults := verify_together(folder, manifest, self._group):
                    self._talk.ask("reject", name=manifest.name, faults=faults)
                    continue
                load(state, folder, manifest, self._group, self._device, self._allow_missing)
                return int(manifest.step)
        return 0

    def verify(self, step: int) -> list[Fault]:
        """Reads every byte of a checkpoint and compares it with its manifest; the ranks share the work.

        Returns:
            What is wrong, of all ranks; empty when all is as it was written.

        Raises:
            RestoreError: no checkpoint of this step was committed.
        """
        with self._roll.during("verify()"):
            manifest = self._talk.ask("committed", step=step)
            return verify_together(
                self.folder / CHECKPOINTS_DIR / manifest.name, manifest, self._group
            )

    def save(
        self, step: int, state: TrainState, metrics: Mapping[str, float] | None = None
    ) -> float:
        """Begins a save; returns when training may go on. A save that is in flight is waited for first.

        A save that fails stops nothing: the next one is tried, and :meth:`wait` tells.

        Args:
            step: optimizer steps finished in the state; kept as ``state.progress.step``.
            state: to save.
            metrics: for the record, such as ``{"loss": 2.5}``.

        Returns:
            How long training stood still, seconds.
        """
        began = time.monotonic()
        if self._saver is None:
            self._saver = Saver(
                run_dir=self.folder,
                generation=self._generation,
                group=self._group,
                stager=Stager(self._staging, state.optimizers),
                on_result=self._clerk.commit if self._clerk else _nothing,
                signed=signature.active() is not None,
            )
        if not self._saver.wait(self._timeout_s):
            raise StorageError(
                f"save({step}): the save before is not done after {self._timeout_s:g} s. Mend the storage of "
                f"{self.folder}, or give Checkpoints(timeout_s=...) more time."
            )
        state.progress = replace(state.progress, step=step)
        if self._clerk is not None:
            self._clerk.saving(state.progress, dict(metrics or {}), dist.get_world_size())
        self._saver.save(step, lambda: with_rng(state.state_dict(), self._rank, self._device))
        return time.monotonic() - began

    def wait(self) -> int:
        """Waits for the save in flight.

        Returns:
            Step of the newest checkpoint that this program committed; 0 for none.

        Raises:
            StorageError: the last save failed; on every rank.
        """
        done = self._saver is None or self._saver.wait(self._timeout_s)
        with self._roll.during("wait()"):
            return int(self._talk.ask("outcome", done=done))

    def close(self) -> None:
        """Waits for the save in flight, and lets the folder go.

        Raises:
            StorageError: the last save failed.
        """
        try:
            self.wait()
        finally:
            if self._saver is not None:
                self._saver.close(self._timeout_s)
            if self._clerk is not None:
                self._clerk.close()


def own_device() -> torch.device:
    """The device of a worker that ``torchrun`` started: the GPU of its local rank, or the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")


class _Clerk:
    """Rank 0's part: names, commits and sets aside. Its methods are called by name, for all ranks (``Talk``)."""

    def __init__(self, folder: Path) -> None:
        self._dir = folder
        self._house = FolderHouse(folder, read_back)
        self._lock: RunLock | None = None
        self._unreadable: dict[str, str] = {}
        self._generation = self._committed = 0
        self._facts: tuple[Progress, dict[str, float], int] = Progress(), {}, 1
        self._problem = ""

    def call(self, method: str, **kwargs: Any) -> Any:
        return getattr(self, method)(**kwargs)

    def post(self, method: str, **kwargs: Any) -> Any:
        return self.call(method, **kwargs)

    def poll(self, ticket: Any) -> tuple[bool, Any]:
        return True, ticket

    def begin(self) -> int:
        """Takes the folder; the number of this program among those that saved there."""
        self._lock = RunLock(self._dir)
        self._generation = 1 + max((e.generation for e in list_checkpoints(self._dir)), default=0)
        return self._generation

    def newest(self) -> Manifest | None:
        """Of the checkpoint to restore."""
        entries = list_checkpoints(self._dir)
        found = newest_usable(
            self._dir.name, self._dir, entries, commits=self._committed, passed=self._unreadable
        )
        return found.manifest if found else None

    def reject(self, name: str, faults: list[Fault]) -> None:
        """Sets a checkpoint aside; one that storage does not give just now is passed over."""
        reason = f"{faults[0].path}: {faults[0].fault}"
        if all(fault.unreadable for fault in faults):
            self._unreadable[name] = reason
        else:
            findings = [{"path": fault.path, "fault": fault.fault} for fault in faults]
            self._house.quarantine(name, reason, time_s=time.time(), findings=findings)
        logger.warning("%s is not used: %s", name, reason)

    def committed(self, step: int) -> Manifest:
        """Of the newest checkpoint of a step."""
        for entry in list_checkpoints(self._dir):
            if entry.step == step and entry.manifest is not None:
                return entry.manifest
        raise RestoreError(
            f"{self._dir} has no committed checkpoint of step {step}: see ray-ckpt ls."
        )

    def saving(self, progress: Progress, metrics: dict[str, float], world_size: int) -> None:
        """Notes what the save that begins now is of."""
        self._facts = progress, metrics, world_size
        self._problem = f"step {progress.step} is not written yet"

    def commit(self, result: SaveResult) -> None:
        """Commits what was written; called in the background thread of a save."""
        progress, metrics, world_size = self._facts
        problem = result.error
        if problem is None:
            try:
                problem = self._house.seal(
                    Manifest(
                        run=self._dir.name,
                        step=result.step,
                        sample_offset=progress.samples,
                        tokens=progress.tokens,
                        world_size=world_size,
                        generation=self._generation,
                        committed_at=time.time(),
                        files=result.files,
                        parallel="",
                        guard={},
                        metrics={**metrics, "stall_s": result.stall_s, "upload_s": result.write_s},
                        config_fingerprint="",
                        data_fingerprint="",
                        versions=versions(),
                        bitwise_comparable=False,
                    )
                )
            except (RayCkptError, ValueError) as error:
                problem = str(error)
        if problem is None:
            self._committed = result.step
        else:
            logger.warning("the save of step %d failed: %s", result.step, problem)
        self._problem = problem or ""

    def outcome(self, done: bool) -> int:
        """Step of the newest commit."""
        if not done or self._problem:
            raise StorageError(
                f"{self._dir}: the last save was not committed ({self._problem}). The checkpoints before it are as "
                "they were; save again when the storage is mended."
            )
        return self._committed

    def close(self) -> None:
        """Gives the folder back."""
        if self._lock is not None:
            self._lock.close()


def _nothing(result: SaveResult) -> None:
    """Only rank 0 is told of results."""
