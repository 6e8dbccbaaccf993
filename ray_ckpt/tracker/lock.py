"""One driver for a run: a lock on its folder, held for as long as its tracker lives.

A named actor is unique in one Ray cluster only; two private Rays on the same folder would each have a tracker, and
both would commit. The lock is ``flock`` on ``<run>/.lock``: it goes with the process that holds it, however that
ends. It holds between machines where the file system passes locks on (NFS version 4, Lustre and most others do).
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from pathlib import Path
from typing import IO

from ray_ckpt.errors import ConfigError, StorageError

LOCK_NAME = ".lock"
# The tracker of a driver that was just killed ends some seconds after it.
WAIT_S = 30.0
_POLL_S = 0.25


class RunLock:
    """Holds a run's folder until it is closed, or the process ends.

    Args:
        run_dir: the run's folder.
        wait_s: how long to wait for another holder, seconds.

    Raises:
        ConfigError: another process holds it still.
        StorageError: the lock cannot be made.
    """

    def __init__(self, run_dir: Path, wait_s: float = WAIT_S) -> None:
        path = run_dir / LOCK_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a+")
        except OSError as error:
            raise StorageError(f"{path} cannot be opened ({error.strerror})") from error
        deadline = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= deadline:
                self._file.seek(0)
                holder = self._file.read().strip() or "unknown"
                self._file.close()
                raise ConfigError(
                    f"run {run_dir.name!r} in {run_dir.parent} is being driven by another process ({holder}): a run "
                    "has one driver. Wait for it, stop it, or choose another --run name."
                )
            time.sleep(_POLL_S)
        self._file.truncate(0)
        self._file.write(json.dumps({"host": platform.node(), "pid": os.getpid()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Gives the folder back."""
        self._file.close()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def is_held(run_dir: Path) -> bool:
    """Whether a process drives the run just now; changes nothing.

    Raises:
        StorageError: the lock cannot be looked at.
    """
    path = run_dir / LOCK_NAME
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # nobody ever drove it
    except BlockingIOError:
        return True
    except OSError as error:
        raise StorageError(f"{path} cannot be looked at ({error.strerror})") from error
    return False


def holder_host(run_dir: Path) -> str:
    """The machine of the process that holds, or last held, a run's lock; empty when that is not on record."""
    try:
        found = json.loads((run_dir / LOCK_NAME).read_text())
        return str(found["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
