"""Writing through DCP with checksums taken on the way, so that no byte is read twice.

DCP's own ``FileSystemWriter`` does the writing (every checkpoint stays readable by ``dcp.load``); only the
streams it opens are wrapped. The digest is that of the bytes handed to the operating system: a disk that
changes them afterwards is found when the checkpoint is verified.

Two things make it as quick as a plain write. ``torch.save`` takes a CRC of every byte for its archives, which is slower
than the disk (0.65 s for 1 GiB here, the digest 0.28 s) and which neither torch nor we look at: it is left out
(:func:`without_crc`). And the disk begins when the first bytes are there, not when the last ones are synced.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from ray_ckpt.checkpoint.manifest import FileEntry
from ray_ckpt.fault_points import fault_point

# The disk is set to work after so many bytes: few enough to begin early, many enough to be worth a call.
_WRITE_BACK_BYTES = 32 << 20


@contextmanager
def without_crc() -> Generator[None, None, None]:
    """Within the block ``torch.save`` in this thread takes no CRC; nothing that torch or we do reads one.

    The option is a thread's own (read in torch 2.13). Where it is not, it stays on: other files of the program would
    lose theirs.
    """
    if not _is_ours_alone():
        yield
        return
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@functools.cache
def _is_ours_alone() -> bool:
    """Whether a thread that sets the option sets it for itself alone."""
    before = get_crc32_options()
    thread = threading.Thread(target=set_crc32_options, args=(not before,))
    thread.start()
    thread.join()
    if get_crc32_options() == before:
        return True
    set_crc32_options(before)
    return False


class _HashingStream:
    """A binary stream that is only ever written forwards, and digests what passes."""

    def __init__(self, stream: io.IOBase, *, strong: bool = False) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256() if strong else None
        self._digest = xxhash.xxh3_128()
        self._bytes = self._on_the_way = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            file = cast("IO[bytes]", self._stream)
            fault_point("save.file", lambda: file.write(view[: len(view) // 2]))
            file.write(view)
        except OSError as error:
            # torch turns it into an error of its own that does not say that the disk is full.
            self.error = error
            raise
        self._digest.update(view)
        if self._sha256 is not None:
            self._sha256.update(view)
        self._bytes += len(view)
        if self._bytes - self._on_the_way >= _WRITE_BACK_BYTES:
            self._write_back()
        return len(view)

    def _write_back(self) -> None:
        """Begins to write what is only in the system's memory yet, without waiting for it."""
        if hasattr(os, "posix_fadvise"):
            # Linux writes a range that is told to be of no more use; what is not on the disk yet stays in memory. Where
            # files are memory, nothing happens. It is advice: what cannot take it is not told of it.
            length = self._bytes - self._on_the_way
            with suppress(OSError):
                os.posix_fadvise(self.fileno(), self._on_the_way, length, os.POSIX_FADV_DONTNEED)
        self._on_the_way = self._bytes

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        # DCP's stream transforms flush and close; the file itself is closed by who opened it.
        self._stream.flush()

    def seek(self, *_: Any) -> int:
        # A digest cannot go back; nothing in DCP's writer does, and a silent wrong checksum is worse.
        raise OSError("a checkpoint file is written forwards only")

    def entry(self, path: str) -> FileEntry:
        strong = None if self._sha256 is None else self._sha256.hexdigest()
        return FileEntry(path, self._bytes, self._digest.hexdigest(), strong)


class HashingFileSystem(FileSystem):
    """DCP's file system; remembers size and checksum of every file written below ``root``."""

    def __init__(self, root: Path, *, strong: bool = False) -> None:
        super().__init__()
        self._root, self._strong = root, strong
        self._entries: dict[str, FileEntry] = {}
        self.problem: OSError | None = None

    @property
    def entries(self) -> list[FileEntry]:
        """Files written so far, in the order of their names."""
        return [self._entries[name] for name in sorted(self._entries)]

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if "r" not in mode and (Path(path).is_symlink() or self._root.is_symlink()):
            # Somebody put it there: writing through it would change a file elsewhere.
            self.problem = OSError(errno.ELOOP, "a link is in the place of a new file", str(path))
            raise self.problem
        with super().create_stream(path, mode) as stream:
            if "r" in mode:
                yield stream
                return
            hashing = _HashingStream(stream, strong=self._strong)
            try:
                yield cast("io.IOBase", hashing)
            finally:
                self.problem = hashing.error or self.problem
        name = self._name(path)
        self._entries[name] = hashing.entry(name)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        entry = self._entries.pop(self._name(path), None)
        if entry is not None:
            name = self._name(new_path)
            self._entries[name] = replace(entry, path=name)

    def _name(self, path: str | os.PathLike[str]) -> str:
        return Path(path).relative_to(self._root).as_posix()


class ChecksumWriter(FileSystemWriter):
    """DCP's file writer, one file per rank, synced, with checksums in :attr:`entries`.

    Args:
        folder: of the checkpoint.
        strong: take SHA-256 too, for a manifest that is signed.
    """

    def __init__(self, folder: Path, *, strong: bool = False) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._hashing = HashingFileSystem(folder, strong=strong)
        self.fs = self._hashing

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with without_crc():  # it writes in this thread: one file, one thread
            return super().write_data(plan, planner)

    @property
    def problem(self) -> OSError | None:
        """What the operating system refused, behind whatever torch says of it."""
        return self._hashing.problem

    @property
    def entries(self) -> list[FileEntry]:
        """Size and checksum of each file that this process wrote."""
        return self._hashing.entries
