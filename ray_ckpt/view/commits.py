"""Each commit as a named task of the dashboard: a second look from another process.

The task ``commit step-00001200`` reads the manifest that was just written and compares the sizes of the
files it names. It runs wherever Ray has room, so it also tells whether the storage is really shared. A task
``verify step-00001200-g3`` reads every byte of the newest checkpoint, before older ones are deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import ManifestError, StorageError
from ray_ckpt.tiers.housekeeping import read_back


def second_look(run_dir: Path, name: str, step: int) -> Any:
    """Starts the task; its result is what is wrong, or None."""
    task = ray.remote(_look).options(name=f"commit step-{step:08d}", num_cpus=0, max_retries=1)
    return task.remote(str(run_dir / CHECKPOINTS_DIR / name))


def read_elsewhere(folder: Path) -> list[Fault]:
    """Reads a checkpoint back in a task of its own, ``verify step-00001200-g3``, and waits for it.

    Where the task cannot run, nothing is known of the bytes.
    """
    task = ray.remote(verify_files).options(name=f"verify {folder.name}", num_cpus=0, max_retries=1)
    try:
        # The tracker has the key, and the task has not: it gets the manifest, not a place where to read one.
        return read_back(folder, lambda place, manifest: ray.get(task.remote(place, manifest)))
    except ray.exceptions.RayError as error:
        return [Fault(MANIFEST_NAME, f"unreadable: {type(error).__name__} in the task")]


def _look(folder: str) -> str | None:
    path = Path(folder)
    try:
        for entry in read_manifest(path, check_signature=False).files:
            size = (path / entry.path).stat().st_size
            if size != entry.bytes:
                return f"{entry.path} has {size} of {entry.bytes} bytes"
    except (ManifestError, StorageError, OSError) as error:
        return str(error)
    return None
