"""Each commit as a named task of the dashboard: a second look from another process.

The task ``commit step-00001200`` reads the manifest that was just written and compares the sizes of the
files it names. It runs wherever Ray has room, so it also tells whether the storage is really shared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from ray_ckpt.checkpoint.manifest import CHECKPOINTS_DIR, read_manifest
from ray_ckpt.errors import ManifestError, StorageError


def second_look(run_dir: Path, name: str, step: int) -> Any:
    """Starts the task; its result is what is wrong, or None."""
    task = ray.remote(_look).options(name=f"commit step-{step:08d}", num_cpus=0, max_retries=1)
    return task.remote(str(run_dir / CHECKPOINTS_DIR / name))


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
