"""A drill's hold on the checkpoint that it restores: a pin that ends with the process that set it.

A drill may be killed, and its pin would stay for ever. So whoever drills a run holds ``flock`` on
``<run>/.drill.lock``, which goes with the process, however that ends: whoever gets the lock knows that no drill
lives, and that every pin of a drill is a dead one's. The next drill looks, and so does each round of housekeeping.
No clock is asked, so none can be wrong.

It holds between machines where the file system passes locks on, as the run's own lock does. Elsewhere a drill's pin
may be taken away while it runs; the drill then finds files missing, and the run loses nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, PINS_NAME, parse_checkpoint_name
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tiers.pins import pin, read_pins, unpin

logger = logging.getLogger(__name__)

AUTHOR = "ray_ckpt drill"
LOCK_NAME = ".drill.lock"

_WAIT_S = 5.0  # a round of housekeeping holds the lock for a moment
_POLL_S = 0.05


@contextlib.contextmanager
def drilling(run_dir: Path, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Holds a run's drills; takes away what dead ones left.

    Raises:
        ConfigError: another drill of the run is under way.
        StorageError: the lock cannot be made, or a dead drill's pin not be taken away.
    """
    path = run_dir / LOCK_NAME
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be opened ({error.strerror}): a drill writes its pin and its result into the run's folder."
        ) from error
    with os.fdopen(handle, "r+") as file:
        deadline = time.monotonic() + wait_s
        while not _lock(handle):
            if time.monotonic() >= deadline:
                holder = file.read().strip() or "unknown"
                raise ConfigError(
                    f"run {run_dir.name!r} is being drilled by another process ({holder}). Wait for it, or stop it."
                )
            time.sleep(_POLL_S)
        file.truncate(0)
        file.write(json.dumps({"host": platform.node(), "pid": os.getpid()}) + "\n")
        file.flush()
        _release(run_dir)
        yield


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Pins a checkpoint while the block runs; within :func:`drilling`.

    Raises:
        ConfigError: the checkpoint is gone, or about to go.
        StorageError: the disk refused.
    """
    now = time.time()
    reason = f"a drill restores it on {platform.node()}, pid {os.getpid()}, since {now:.3f}"
    pin(folder, reason, author=AUTHOR, time_s=now)
    try:
        yield
    finally:
        try:
            unpin(folder, reason)
        except (ConfigError, StorageError):
            logger.exception("the pin of a drill stays at %s until the next look", folder.name)


def release_dead(run_dir: Path) -> None:
    """Takes away the pins of drills that were killed; nothing while a drill lives.

    Raises:
        StorageError: storage failed.
    """
    try:
        handle = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # nobody ever drilled it
    except OSError as error:
        raise StorageError(
            f"{run_dir / LOCK_NAME} cannot be looked at ({error.strerror})"
        ) from error
    try:
        if _lock(handle):
            _release(run_dir)
    finally:
        os.close(handle)


def _release(run_dir: Path) -> None:
    try:
        folders = [path.parent for path in (run_dir / CHECKPOINTS_DIR).glob(f"*/{PINS_NAME}")]
    except OSError as error:
        raise StorageError(f"pins in {run_dir} cannot be looked at: {error}") from error
    for folder in folders:
        if parse_checkpoint_name(folder.name) is None or folder.is_symlink():
            continue  # not the run's
        for each in read_pins(folder):
            if each.author == AUTHOR:
                logger.warning("%s: %s ended without a word; its pin goes", folder.name, each.words)
                with contextlib.suppress(ConfigError):  # somebody else was faster
                    unpin(folder, each.reason)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StorageError(f"the lock on drills cannot be taken ({error.strerror})") from error
    return True
