"""The journal: what happened to a run, one JSON object a line, appended and never rewritten.

A line counts when it is whole. A process that dies while it writes, or a disk that is full, leaves a torn
last line; the next line begins with a line end, and readers skip what is not an object.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ray_ckpt.errors import StorageError
from ray_ckpt.fault_points import fault_point

JOURNAL_NAME = "journal.jsonl"
STEPS_NAME = "steps.jsonl"

Event = dict[str, Any]

_TAIL_BYTES = 1 << 16


class NotSyncedError(StorageError):
    """A line is in the file, but the disk did not promise to keep it: it must not be written again."""


class JsonLines:
    """Appends objects to a file, one line each.

    Args:
        path: the file; made when missing, with its folder.
        sync: whether each line is on the disk before :meth:`append` returns.
    """

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path, self._sync = path, sync
        self._grew = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._torn = _torn(path)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be opened for writing ({error}). The run's folder must be writable: "
                "choose another --storage, or mend its permissions or space."
            ) from error

    def append(self, event: Event) -> None:
        """Writes one object as one line, in one write.

        Raises:
            NotSyncedError: the line is in the file, but may not outlive a power cut.
            StorageError: the line could not be written whole.
        """
        line = (json.dumps(event, allow_nan=True) + "\n").encode()
        self._look()  # before this line hides it
        # The next line must not join a torn one. The end goes with it: alone it could fail as well.
        data = b"\n" + line if self._torn else line
        try:
            fault_point(
                "journal.line" if self._sync else "steps.line",
                lambda: self._file.write(data[: len(data) // 2]),
            )
            written = self._file.write(data)
        except OSError as error:
            self._torn = True  # how much of it is there is not known
            raise self._refused(error) from error
        if written:
            self._torn = not data[:written].endswith(b"\n")
        if written < len(data) - 1:  # a line that lacks only its end is whole
            raise self._refused("short write, is the disk full?")
        if self._sync:
            try:
                fault_point("journal.sync")
                os.fsync(self._file.fileno())
            except OSError as error:
                raise NotSyncedError(
                    f"{self.path} cannot be written to the disk for good ({error}). Mend the storage."
                ) from error

    def _refused(self, why: object) -> StorageError:
        return StorageError(f"{self.path} cannot be written ({why}). Make room on the storage.")

    @property
    def grew(self) -> bool:
        """Whether somebody else has written to the file since it was opened here; False while it cannot be told."""
        self._look()
        return self._grew

    def _look(self) -> None:
        if not self._grew:
            # Whoever has just appended stands at the end of the file.
            with contextlib.suppress(OSError):
                self._grew = os.fstat(self._file.fileno()).st_size != self._file.tell()

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


class LineQueue:
    """Lines on their way into a file, in order: what the disk refuses waits for the next try."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._waiting: deque[Event] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, *events: Event) -> None:
        """Puts lines at the end.

        Raises:
            TypeError: one of them is no JSON; none was added.
        """
        for event in events:
            json.dumps(event)  # later it would stand in the way of every line behind it
        self._waiting.extend(events)

    def flush(self) -> None:
        """Writes the lines.

        Raises:
            NotSyncedError: all lines are in the file, but may not outlive a power cut.
            StorageError: the lines that still wait could not be written.
        """
        not_synced = None
        while self._waiting:
            try:
                self._lines.append(self._waiting[0])
            except NotSyncedError as error:
                not_synced = error
            self._waiting.popleft()
        if not_synced is not None:
            raise not_synced

    @property
    def grew(self) -> bool:
        """Whether somebody else has written to the file (see :attr:`JsonLines.grew`)."""
        return self._lines.grew

    def take_back(self) -> None:
        """Forgets the last line that was added; it must still wait."""
        self._waiting.pop()


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


def last_generation(path: Path) -> int:
    """The generation of the last lines of a journal, which is its newest; 0 when it has none.

    Raises:
        StorageError: the file is there and cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error}).") from error
    found = []
    for line in tail.splitlines():
        with contextlib.suppress(ValueError):  # torn, or cut by where the tail begins
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("generation"), int):
                found.append(event["generation"])
    if found or size <= _TAIL_BYTES:
        return max(found, default=0)
    lines = (event.get("generation") for event in read_lines(path))  # a line that is a whole log
    return max((number for number in lines if isinstance(number, int)), default=0)


def newest_lines(path: Path, count: int) -> tuple[int, list[Event]]:
    """The newest generation that wrote lines of steps, and the last of its lines, ``count`` at most."""
    newest, lines = 0, deque[Event](maxlen=count)
    for line in read_lines(path):
        if not {"generation", "step", "step_time_s"} <= line.keys():
            continue
        generation = int(line["generation"])
        if generation > newest:
            newest = generation
            lines.clear()
        if generation == newest:
            lines.append(line)
    return newest, list(lines)
