"""Who clears a node's memory when a run was killed there and never came back.

Files in ``/dev/shm`` outlive every process, and would take memory until the node is booted. So whoever keeps a
root, a run's folder on a node, holds a shared lock on it (:class:`HoldersLock`); the lock goes with the process,
however that ends. A process of its own, which Ray does not know, watches: ``python -m ray_ckpt.tiers.janitor ROOT
--linger-s S`` takes the root away once nobody has held it for so long. A holder that comes back in time finds all
of it; later, an empty root.

A root goes as a whole: under an exclusive lock it is renamed, then deleted. A holder that got its lock meanwhile
sees that its file is not in the place any more, and begins again. This module is imported by that process and
therefore needs neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

from ray_ckpt.errors import StorageError

HOLDERS_NAME = ".holders"
JANITOR_NAME = ".janitor"

_LEAVING = re.compile(r"\..+\.[0-9a-f]{16}\.leaving")
_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL_S = 0.02
_START_S = 60.0  # for a Python to start on a busy node


class HoldersLock:
    """Keeps a root from being taken away until it is closed, or the process ends; several may hold it.

    Args:
        root: the run's folder on this node; made, for its user alone, if it is not there.
        wait_s: how long to wait while it is being taken away, seconds.

    Raises:
        StorageError: the lock cannot be had.
    """

    def __init__(self, root: Path, wait_s: float = 10.0) -> None:
        path = root / HOLDERS_NAME
        deadline = time.monotonic() + wait_s
        try:
            while (handle := _hold(root, path)) is None:
                if time.monotonic() >= deadline:
                    raise StorageError(
                        f"{path} is locked by another process for more than {wait_s:g} s. Look for one that clears "
                        f"{root} and hangs, and end it."
                    )
                time.sleep(_POLL_S)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be locked ({error}). Mend access to it, or remove what is in its place."
            ) from error
        self._handle: int | None = handle

    def close(self) -> None:
        """Lets go of the root; again changes nothing."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.utime(self._handle)  # from now on it is unused
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> HoldersLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_janitor(root: Path, linger_s: float) -> None:
    """Starts the process that clears a root, unless there is one; call it while holding the root.

    Args:
        root: the run's folder on this node.
        linger_s: how long it stays when nobody holds it, seconds.

    Raises:
        StorageError: it cannot be started.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    call = [sys.executable, "-m", "ray_ckpt.tiers.janitor", str(root.absolute())]
    try:
        done = subprocess.run(
            [*call, "--linger-s", repr(float(linger_s)), "--detach"],
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"nobody will clear {root} when its run is gone: {error}") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StorageError(
            f"nobody will clear {root} when its run is gone: {why or done.returncode}"
        )


def watch(
    root: Path,
    linger_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until nobody has held a root for so long, and takes it away.

    Returns:
        Whether it did; False when somebody else did, or another root is in its place.

    Raises:
        OSError: it cannot be watched or deleted.
    """
    pause_s = min(1.0, max(linger_s / 10, _POLL_S))
    free_since: float | None = None
    stamp = 0
    path = root / HOLDERS_NAME
    with _opened(path) as handle:
        while handle is not None and _in_place(handle, path):
            used = os.fstat(handle).st_mtime_ns  # a holder that came and went is seen by it
            if not _try(handle, fcntl.LOCK_EX):
                free_since = None
            else:
                fcntl.flock(handle, fcntl.LOCK_UN)
                if free_since is None or used != stamp:
                    free_since, stamp = clock(), used
                elif clock() - free_since < linger_s:
                    pass
                elif _take_away(root, partial(_unused_since, stamp)):
                    return True
            sleep(pause_s)
    return False


def sweep_stale(base: Path, older_than_s: float, *, now_s: float | None = None) -> list[str]:
    """Takes away roots whose run and janitor are gone, such as on a disk after the node was booted.

    Args:
        base: the folder of the roots; those of other users, and folders that never were held, are left alone.
        older_than_s: a root goes only if nothing in it was written for so long, seconds.
        now_s: seconds since the epoch; None for now.

    Returns:
        Names of those that went.

    Raises:
        StorageError: the base cannot be listed, or something cannot be deleted.
    """
    newest_s = (time.time() if now_s is None else now_s) - older_than_s
    gone, problems = [], list[str]()
    try:
        places = sorted(base.iterdir()) if base.exists() else []
    except OSError as error:
        raise StorageError(f"cannot list {base}: {error}. Mend access to it.") from error
    for place in places:
        try:
            if place.is_symlink() or not place.is_dir() or place.stat().st_uid != os.geteuid():
                continue
            if _LEAVING.fullmatch(place.name):
                _delete(place)  # a janitor that was killed had begun it
            elif _take_away(place, partial(_older_than, newest_s, place)):
                gone.append(place.name)
        except FileNotFoundError:
            continue  # somebody else was faster
        except OSError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise StorageError(f"cannot clear {'; '.join(problems)}. Mend access to it.")
    return gone


def _hold(root: Path, path: Path) -> int | None:
    """A descriptor with the shared lock, None when there was somebody in the way."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink():
        raise OSError(f"{root} is a link")
    try:
        handle = os.open(path, _LOCK | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None  # the root went just now
    try:
        if _try(handle, fcntl.LOCK_SH) and _in_place(handle, path):
            os.utime(handle)
            return handle
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _take_away(root: Path, if_: Callable[[int], bool]) -> bool:
    """Removes a root that nobody holds; whether it did.

    Args:
        root: of the run.
        if_: asked last, under the exclusive lock, with a descriptor of its file.
    """
    path = root / HOLDERS_NAME
    leaving = root.with_name(f".{root.name}.{secrets.token_hex(8)}.leaving")
    with _opened(path) as handle:
        if handle is None or not _try(handle, fcntl.LOCK_EX):
            return False
        if not _in_place(handle, path) or not if_(handle):
            return False
        root.rename(leaving)  # at once: nobody ever finds a part of it
    _delete(leaving)
    return True


def _delete(place: Path) -> None:
    """Deletes a folder with all that is in it, through no link."""
    try:
        shutil.rmtree(place)
    except FileNotFoundError:
        # Somebody else deletes it too: what he has not reached yet is still to go.
        if place.exists():
            shutil.rmtree(place, ignore_errors=True)


def _unused_since(stamp: int, handle: int) -> bool:
    return os.fstat(handle).st_mtime_ns == stamp


def _older_than(newest_s: float, place: Path, _: int) -> bool:
    return _newest_s(place) < newest_s


def _newest_s(root: Path) -> float:
    """When something in a root was last written, seconds since the epoch."""
    times_s = [root.lstat().st_mtime]
    for place, folders, names in os.walk(root):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                times_s.append((Path(place) / name).lstat().st_mtime)
    return max(times_s)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        handle = os.open(path, _LOCK)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _try(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_place(handle: int, path: Path) -> bool:
    """Whether a path still leads to the file that is open."""
    try:
        there = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(there, os.fstat(handle))


def main(arguments: list[str] | None = None) -> int:
    """Watches one root, if nobody does yet."""
    parser = argparse.ArgumentParser(prog="python -m ray_ckpt.tiers.janitor", description=__doc__)
    parser.add_argument("root", type=Path, help="the run's folder on this node")
    parser.add_argument("--linger-s", type=float, required=True, help="how long it stays unheld")
    parser.add_argument("--detach", action="store_true", help="watch in the background")
    options = parser.parse_args(arguments)
    handle = os.open(options.root / JANITOR_NAME, _LOCK | os.O_CREAT, 0o600)
    if not _try(handle, fcntl.LOCK_EX):
        return 0  # there is one
    # Twice removed from whoever called, as Ray ends the children of its workers with them.
    if options.detach:
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)  # the caller waits for the end of what it reads
    watch(options.root, options.linger_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
