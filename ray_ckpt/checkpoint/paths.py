"""Paths that stay inside a checkpoint, on every file system, and files that are what they seem.

Storage may be written by others: a path in a manifest, or a link in a folder, must not make a restore, an export
or a deletion touch anything else.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from pathlib import Path

_LONGEST_PART = 255  # bytes of a name, on every common file system


class NotPlainFileError(Exception):
    """There is a link, a pipe or a folder where a file should be."""


def path_fault(path: str) -> str | None:
    """Why a path may not be in a manifest; None when it may."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "is not Unicode text"
    # A file system may fold what looks alike: a full-width ".." or "/" must not become a real one.
    for form in (path, unicodedata.normalize("NFKC", path)):
        if "\\" in form or any(part in ("", ".", "..") for part in form.split("/")):
            return "must be relative, stay inside the checkpoint folder and use forward slashes"
    if any(unicodedata.category(letter) == "Cc" for letter in path):
        return "has a control character"
    if any(len(part) > _LONGEST_PART for part in raw.split(b"/")):
        return f"has a part of more than {_LONGEST_PART} bytes"
    return None


def folded(path: str) -> str:
    """Equal for paths that are one file on some file system (other case, other composition)."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


def behind_link(folder: Path, path: str) -> bool:
    """Whether a folder on the way from ``folder`` to a file is a link."""
    place = folder
    for part in path.split("/")[:-1]:
        place = place / part
        if stat.S_ISLNK(place.lstat().st_mode):
            return True
    return False


def open_plain(path: Path) -> int:
    """A descriptor of a regular file; follows no link and waits for no pipe.

    Raises:
        NotPlainFileError: it is something else.
        OSError: it is not there, or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO) and path.is_symlink() | path.is_socket():
            raise NotPlainFileError(str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotPlainFileError(str(path))
    return handle


def read_plain(path: Path) -> bytes:
    """Content of a regular file; see :func:`open_plain`."""
    with open(open_plain(path), "rb") as file:
        return file.read()
