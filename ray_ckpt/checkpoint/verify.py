"""Are the bytes still the ones that were committed?

DCP loads a flipped bit without a word, and its `.metadata` is a pickle. So every byte is compared
with the manifest before anything is unpickled or copied into a model. The price is one read of the
checkpoint; the size is looked at first, so that a truncated file costs nothing.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint.manifest import FileEntry, Manifest
from ray_ckpt.checkpoint.names import RECORD_NAMES
from ray_ckpt.checkpoint.paths import NotPlainFileError, behind_link, open_plain

# Small enough that what was read is hashed from the processor's own cache (with 4 MiB a GiB took 0.25 s here, with this
# 0.19 s), and the system reads ahead of it.
_CHUNK_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a checkpoint.

    Attributes:
        path: the file, relative to the checkpoint folder.
        fault: what is wrong, in words.
    """

    path: str
    fault: str

    @property
    def unreadable(self) -> bool:
        """Storage failed; the bytes may be good, so this is no ground for a quarantine."""
        return self.fault.startswith("unreadable")


def hash_file(path: Path, chunk_bytes: int = _CHUNK_BYTES, *, also: Any = None) -> tuple[int, str]:
    """Size in bytes and xxh3_128 (32 hex digits) of a file's content.

    Args:
        path: the file; a link is not followed.
        chunk_bytes: how much is read at a time.
        also: another digest, such as ``hashlib.sha256()``, to update on the way.

    Raises:
        NotPlainFileError: it is a link, a pipe or a folder.
        OSError: the file cannot be read.
        ValueError: `chunk_bytes` is not positive.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, must be at least 1")
    digest, size = xxhash.xxh3_128(), 0
    with open(open_plain(path), "rb", buffering=0) as file:
        enough = max(os.fstat(file.fileno()).st_size, 4096)  # most files of small runs are small
        buffer = memoryview(bytearray(min(chunk_bytes, enough)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if also is not None:
                also.update(buffer[:count])
            size += count
    return size, str(digest.hexdigest())


def verify_files(
    folder: Path, manifest: Manifest, only: Sequence[FileEntry] | None = None
) -> list[Fault]:
    """Compares the files of a checkpoint with its manifest; changes nothing.

    Args:
        folder: the checkpoint.
        manifest: what was committed.
        only: entries of the manifest to look at, such as this rank's share. Then files that the
            manifest does not name are not looked for. None means everything.

    Returns:
        What is wrong, sorted by path; empty when every byte is as committed.
    """
    faults = find_faults(folder, manifest.files if only is None else only)
    if only is None:
        known = {entry.path for entry in manifest.files}
        faults += _strangers(folder, known)
    return sorted(faults, key=lambda fault: fault.path)


def find_faults(folder: Path, entries: Iterable[FileEntry]) -> list[Fault]:
    """Compares some files in a folder with what they must be; changes nothing."""
    return [
        Fault(entry.path, fault)
        for entry in entries
        if (fault := _fault_of(folder, entry)) is not None
    ]


def _fault_of(folder: Path, entry: FileEntry) -> str | None:
    path = folder / entry.path
    strong = None if entry.sha256 is None else hashlib.sha256()
    try:
        if behind_link(folder, entry.path):
            return "behind a link"
        found = path.lstat()
        # A link may lead out of the checkpoint, to bytes that change or vanish on their own.
        if not stat.S_ISREG(found.st_mode):
            return "not a regular file"
        if found.st_size != entry.bytes:
            word = "truncated" if found.st_size < entry.bytes else "too long"
            return f"{word}: {found.st_size} of {entry.bytes} bytes"
        size, checksum = hash_file(path) if strong is None else hash_file(path, also=strong)
    except NotPlainFileError:
        return "changed while it was read: not a regular file"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        return f"unreadable: {error.strerror or error}"
    if size != entry.bytes:
        return f"changed while it was read: {size} of {entry.bytes} bytes"
    if checksum != entry.checksum:
        return "checksum differs"
    if strong is not None and strong.hexdigest() != entry.sha256:
        return "SHA-256 differs, although the quick checksum is that of the manifest: forged"
    return None


def _strangers(folder: Path, known: set[str]) -> Iterator[Fault]:
    """Files that nobody committed: left by another writer, or put there since."""
    errors: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=errors.append):
        # A link to a folder is not walked into, and could stand in for a committed one.
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in names + links:
            path = (Path(place) / name).relative_to(folder).as_posix()
            # Files that start with a dot are a writer's temporaries, unless they were committed.
            if path in known or path in RECORD_NAMES or name.startswith("."):
                continue
            yield Fault(path, "not in the manifest")
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            path = Path(error.filename or folder).relative_to(folder).as_posix()
            yield Fault(path, f"unreadable: {error.strerror or error}")
