"""Lines that were added to a file since the last look: a journal of weeks is read once, not at every look."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ray_ckpt.errors import StorageError

CHUNK_BYTES = 1 << 18
LONGEST_BYTES = 1 << 26


class Tail:
    """Follows one file of JSON lines that is appended to.

    A line counts when it is whole, as in :func:`ray_ckpt.tracker.journal.read_lines`: what is torn is passed over, and
    a last line that only lacks its end is taken.

    Args:
        path: of the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._size, self._inode = 0, 0, 0
        self._remainder = 0

    @property
    def behind_bytes(self) -> int:
        """How much was there at the last look and is not read yet; a torn end does not count."""
        return max(0, self._size - self._offset - self._remainder)

    def look(self) -> bool:
        """Looks at the file's size; whether it is another file than the one that was read so far.

        Then reading begins at its start, and whatever was made of the lines before is void.

        Raises:
            StorageError: the file is there and cannot be looked at.
        """
        try:
            found = self.path.stat()
        except FileNotFoundError:
            inode, size = 0, 0
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read ({error}).") from error
        else:
            if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for ever
                raise StorageError(f"{self.path} is no plain file")
            inode, size = found.st_ino, found.st_size
        other = self._offset > 0 and (inode != self._inode or size < self._offset)
        if other:
            self._offset = 0
        if other or size != self._size:
            self._remainder = 0
        self._inode, self._size = inode, size
        return other

    def read(self) -> list[dict[str, Any]]:
        """The next objects, about a quarter of a MiB of them; there may be more while :attr:`behind_bytes` is not 0.

        Raises:
            StorageError: the file cannot be read.
        """
        if not self.behind_bytes:
            return []
        try:
            with self.path.open("rb") as file:
                data, at_end = self._chunk(file.fileno())
        except FileNotFoundError:
            self._size = 0  # since the last look
            return []
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read ({error}).") from error
        if not at_end and b"\n" not in data:
            self._offset += len(data)
            return []  # no line of a journal: passed over, as what is torn
        whole, _, rest = data.rpartition(b"\n")
        found = [event for line in whole.split(b"\n") if (event := _object(line)) is not None]
        self._offset += len(data) - len(rest)
        self._remainder = 0
        if at_end and rest:
            last = _object(rest)
            if last is None:
                self._remainder = len(rest)
            else:
                self._offset += len(rest)
                found.append(last)
        return found

    def newest(self) -> dict[str, Any] | None:
        """The last object of the file, whatever of it is read; None when its end tells of none.

        Raises:
            StorageError: the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                data = os.pread(file.fileno(), CHUNK_BYTES, max(0, self._size - CHUNK_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read ({error}).") from error
        objects = (_object(line) for line in reversed(data.split(b"\n")))
        return next((found for found in objects if found is not None), None)

    def _chunk(self, handle: int) -> tuple[bytes, bool]:
        """Bytes from where the last look ended, with a line end unless they are the last ones or too many."""
        size = CHUNK_BYTES
        while True:
            data = os.pread(handle, size, self._offset)
            if len(data) < size:
                return data, True
            if b"\n" in data or size >= LONGEST_BYTES:
                return data, False
            size *= 2  # a line that is a whole log


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
