"""The journal: what happened to a run, one JSON object a line, appended and never rewritten.

A line counts when it is whole. A process that dies while it writes leaves a torn last line; the next
one that opens the journal puts a line end behind it, and readers skip what is not an object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ray_ckpt.errors import StorageError

JOURNAL_NAME = "journal.jsonl"
STEPS_NAME = "steps.jsonl"

Event = dict[str, Any]


class JsonLines:
    """Appends objects to a file, one line each.

    Args:
        path: the file; made when missing, with its folder.
        sync: whether each line is on the disk before :meth:`append` returns.
    """

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path, self._sync = path, sync
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if _torn(path):
                self._file.write(b"\n")
        except OSError as error:
            raise StorageError(
                f"{path} cannot be opened for writing ({error}). The run's folder must be writable: "
                "choose another --storage, or mend its permissions or space."
            ) from error

    def append(self, event: Event) -> None:
        """Writes one object as one line, in one write.

        Raises:
            StorageError: the line could not be written whole.
        """
        line = (json.dumps(event, allow_nan=True) + "\n").encode()
        try:
            written = self._file.write(line)
            if written != len(line):
                # A short write is how a full disk shows itself: the next line must not join it.
                self._file.write(b"\n")
                raise OSError(28, "short write, is the disk full?")
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written ({error}). Make room on the storage."
            ) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _torn(path: Path) -> bool:
    """Whether the file ends inside a line."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_lines(path: Path) -> Iterator[Event]:
    """Yields the whole lines of a journal; a missing file has none.

    Raises:
        StorageError: the file is there and cannot be read: that is not an empty journal.
    """
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # a torn line: its writer died before it was whole
                if isinstance(event, dict):
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error}).") from error
