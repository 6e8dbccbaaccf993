"""Each commit as a named task of the dashboard: a second look from another process.

The task ``commit step-00001200`` reads the manifest that was just written and compares the sizes of the
files it names. It runs wherever Ray has room, so it also tells whether the storage is really shared. A task
``verify step-00001200-g3`` reads every byte of the newest checkpoint, before older ones are deleted.

They are tasks of one small actor, which begins with the first commit: a process for each of them would take two seconds
of a processor beside the training, at every commit. Where its node is lost, Ray starts it on another one.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ray

from ray_ckpt.checkpoint.manifest import Manifest, read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import ManifestError, StorageError
from ray_ckpt.tiers.housekeeping import read_back


class SecondReader:
    """What the actor does."""

    def look(self, folder: str) -> str | None:
        """What is wrong with a checkpoint by its manifest and the sizes of its files; None for nothing."""
        path = Path(folder)
        try:
            for entry in read_manifest(path, check_signature=False).files:
                size = (path / entry.path).stat().st_size
                if size != entry.bytes:
                    return f"{entry.path} has {size} of {entry.bytes} bytes"
        except (ManifestError, StorageError, OSError) as error:
            return str(error)
        return None

    def verify(self, folder: Path, manifest: Manifest) -> list[Fault]:
        """What is wrong with the bytes of a checkpoint."""
        return verify_files(folder, manifest)


class SecondLook:
    """Has checkpoints looked at by another process; it ends with the process that asks.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._lock, self._reader = run_dir, threading.Lock(), None

    def at(self, name: str, step: int) -> Any:
        """Starts the task; its result is what is wrong, or None."""
        task = self._actor().look.options(name=f"commit step-{step:08d}")
        return task.remote(str(self._run_dir / CHECKPOINTS_DIR / name))

    def read_back(self, folder: Path) -> list[Fault]:
        """Reads all of a checkpoint in a task, ``verify step-00001200-g3``, and waits for it.

        Where the task cannot run, nothing is known of the bytes.
        """
        task = self._actor().verify.options(name=f"verify {folder.name}")
        try:
            # The tracker has the key, and the task has not: it gets the manifest, not a place where to read one.
            return read_back(folder, lambda place, manifest: ray.get(task.remote(place, manifest)))
        except ray.exceptions.RayError as error:
            return [Fault(MANIFEST_NAME, f"unreadable: {type(error).__name__} in the task")]

    def _actor(self) -> Any:
        with self._lock:
            if self._reader is None:
                self._reader = (
                    ray.remote(SecondReader)
                    .options(
                        num_cpus=0,
                        max_restarts=-1,
                        max_task_retries=1,
                        max_concurrency=2,  # a look does not wait for a checkpoint that is read back
                        scheduling_strategy="SPREAD",
                    )
                    .remote()
                )
            return self._reader
