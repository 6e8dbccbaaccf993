"""Keeps calls of attempts that are over from a node's copies.

A holder, or the tracker that calls it, may be frozen for long and wake when others have taken its place. So every
call that changes something carries its attempt's generation, and each tier of a node notes the newest that it has
heard of: in a file, since whoever wakes may be another process than whoever took its place.

What has passed, and is frozen in the one moment between this look and what it does, is not stopped any more.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from ray_ckpt.errors import StaleGenerationError, StorageError

logger = logging.getLogger(__name__)

FENCE_NAME = ".generation"
_DIGITS = 20  # always as many: a change takes no space, which a full tier does not have


class Fence:
    """The newest attempt that one tier of a node has heard of.

    Args:
        root: the run's folder in the tier.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FENCE_NAME
        self._lock = threading.Lock()
        self._heard = 0

    @property
    def newest(self) -> int:
        """Its generation, 0 for none.

        Raises:
            StorageError: it cannot be told.
        """
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            text = b""
        except OSError as error:
            raise StorageError(
                f"which attempt {self._path} belongs to cannot be told ({error}), so nothing was changed. Mend access "
                "to it, then retry."
            ) from error
        # A damaged note is none: the next call writes it anew.
        return max(self._heard, int(text) if text.strip().isdigit() else 0)

    def check(self, generation: int) -> None:
        """Lets a call pass, and refuses those of older attempts from now on.

        Raises:
            StaleGenerationError: a newer attempt was here.
            StorageError: that cannot be told.
        """
        with self._lock:
            newest = self.newest
            if generation < newest:
                raise StaleGenerationError(
                    f"a call of attempt {generation}, and attempt {newest} has taken its place. Nothing was changed."
                )
            if generation > newest:
                self._heard = generation
                self._note(generation)

    def _note(self, generation: int) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._path, flags, 0o600)
            try:
                os.pwrite(handle, f"{generation:0{_DIGITS}d}".encode(), 0)
            finally:
                os.close(handle)
        except OSError as error:
            # This process knows; only one that was frozen would not be told. A full tier must stay usable.
            logger.warning("%s: attempt %d could not be noted: %s", self._path, generation, error)
