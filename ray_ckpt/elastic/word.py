"""What a worker has heard from the tracker, left for the others on its node: one asks, and the rest need not.

Of 100,000 workers on 12,500 nodes the tracker then hears from 12,500. A word is the time at which an attempt was the
present one, by the steady clock that all processes of a node share. It lies in a file of the run in the node's
temporary folder. A word that is lost, damaged or of another attempt is none: then the worker asks itself.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash


def own_folder() -> Path:
    """This user's folder on this node, closed to others; made when it is not there.

    Raises:
        OSError: it cannot be made, or is somebody else's.
    """
    folder = Path(tempfile.gettempdir()) / f"ray_ckpt-words-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


class Word:
    """Of one attempt.

    Args:
        run_dir: the run's folder.
        generation: of the attempt.
        folder: of the node, for words.
        clock: seconds of the steady clock.
    """

    def __init__(
        self,
        run_dir: Path,
        generation: int,
        *,
        folder: Callable[[], Path] = own_folder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = xxhash.xxh3_64_hexdigest(str(run_dir).encode())
        self._generation, self._folder, self._clock = generation, folder, clock

    def leave(self) -> None:
        """The attempt is the present one, as the tracker has just said."""
        # Whoever does not find it asks by itself.
        with contextlib.suppress(OSError):
            path = self._folder() / self._name
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(f"{self._generation} {self._clock()!r}")
            new.replace(path)

    def heard_s(self) -> float:
        """When somebody on this node heard that the attempt is the present one; -inf for never."""
        try:
            generation, heard_s = (self._folder() / self._name).read_text().split()
            same, found_s = int(generation) == self._generation, float(heard_s)
        except (OSError, ValueError):
            return float("-inf")
        # Of a boot before this one it may lie in the future.
        return found_s if same and found_s <= self._clock() else float("-inf")
