"""A file that comes in as a stream: under a name with a dot until it is whole, by descriptors, through no link."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint.manifest import FileEntry
from ray_ckpt.errors import CopyError, StorageError
from ray_ckpt.fault_points import fault_point

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.copying")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Passing:
    """Looks at a file's content as it passes, and says whether it was the one of its entry."""

    def __init__(self, entry: FileEntry) -> None:
        self.strong: Any = None if entry.sha256 is None else hashlib.sha256()
        self._entry, self._digest, self._bytes = entry, xxhash.xxh3_128(), 0

    def take(self, chunk: bytes | memoryview) -> None:
        """Adds what comes next."""
        self._digest.update(chunk)
        if self.strong is not None:
            self.strong.update(chunk)
        self._bytes += memoryview(chunk).nbytes

    @property
    def too_long(self) -> str | None:
        """That more came than there should be, in words."""
        if self._bytes > self._entry.bytes:
            return f"too long: more than its {self._entry.bytes} bytes came"
        return None

    @property
    def fault(self) -> str | None:
        """What differs, in words, when all has come."""
        if self._bytes != self._entry.bytes:
            return self.too_long or f"truncated: {self._bytes} of {self._entry.bytes} bytes came"
        if self._digest.hexdigest() != self._entry.checksum:
            return "checksum differs"
        return None if self.strong_fits else "SHA-256 differs"

    @property
    def strong_fits(self) -> bool:
        """Whether SHA-256 is that of the entry, if it has one."""
        return self.strong is None or self.strong.hexdigest() == self._entry.sha256


class Arrivals:
    """Files that are coming into one depot just now.

    Args:
        base: its folder of checkpoints.
        sync: whether files and their names are put on the disk for good.
        lock: held while a file gets its name.
    """

    def __init__(self, base: Path, *, sync: bool, lock: threading.Lock) -> None:
        self._base, self._sync, self._lock = base, sync, lock
        self._coming: set[str] = set()

    def receive(self, path: str, entry: FileEntry, chunks: Iterable[bytes | memoryview]) -> None:
        """Takes a file in, or leaves nothing of it.

        Args:
            path: where it goes, relative to the folder of checkpoints.
            entry: what it must be.
            chunks: its content.

        Raises:
            CopyError: the content is another one, or the place was dropped meanwhile.
            OSError: the disk refused.
        """
        temporary = f".{secrets.token_hex(8)}.copying"
        self._coming.add(temporary)
        try:
            self._base.mkdir(parents=True, exist_ok=True)
            with open_inside(self._base, path, make=True) as (folder, last):
                try:
                    if fault := self._write(entry, chunks, temporary, folder):
                        raise CopyError(
                            f"copy of {self._base / path}: {fault}; nothing of it is kept."
                        )
                    self._name(temporary, last, folder, path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary, dir_fd=folder)
                    raise
        finally:
            self._coming.discard(temporary)

    def broken_off(self, name: str) -> bool:
        """Whether a file's name is that of a copy that nobody makes any more."""
        return bool(_TEMPORARY.fullmatch(name)) and name not in self._coming

    def _write(
        self, entry: FileEntry, chunks: Iterable[bytes | memoryview], temporary: str, folder: int
    ) -> str | None:
        passing = Passing(entry)
        handle = os.open(temporary, _NEW, 0o666, dir_fd=folder)
        try:
            for chunk in chunks:
                passing.take(chunk)
                if passing.too_long:
                    break  # whoever sends it may never stop
                rest = memoryview(chunk).cast("B")
                fault_point("depot.piece", partial(os.write, handle, rest[: len(rest) // 2]))
                while rest:
                    rest = rest[os.write(handle, rest) :]
            if self._sync and passing.fault is None:
                os.fsync(handle)
        finally:
            os.close(handle)
        return passing.fault

    def _name(self, temporary: str, last: str, folder: int, path: str) -> None:
        try:
            fault_point("depot.name")
            with self._lock:
                os.rename(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
            fault_point("depot.named")
        except FileNotFoundError as error:
            raise CopyError(
                f"copy of {self._base / path}: its checkpoint was dropped meanwhile; nothing of it is kept."
            ) from error
        if self._sync:
            os.fsync(folder)


@contextlib.contextmanager
def open_inside(base: Path, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder that a file lies in, and its name there; no link on the way is followed.

    Args:
        base: open to links, unlike what is below it.
        path: of the file, relative to it.
        make: folders that are not there are made.

    Raises:
        OSError: a folder is not there, or a link.
    """
    *parts, last = path.split("/")
    handle = os.open(base, _FOLDER)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle, last
    finally:
        os.close(handle)


def refusal(what: str, error: OSError) -> StorageError:
    """The error of a tier, with the way out."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{what}: the tier is full ({error.strerror}). Keep fewer checkpoints in it, or give it more space."
        )
    return StorageError(f"{what}: {error}. Mend access to it, then retry.")
