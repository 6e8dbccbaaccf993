"""Small files on storage: written whole and for good, and read with an error that is not taken for an absence."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.paths import NotPlainFileError, read_plain
from ray_ckpt.errors import ManifestError, StorageError
from ray_ckpt.fault_points import fault_point

_READ_PAUSES_S = (0.05, 0.2)  # waits between tries: a flaky read is retried, a broken disk is told

# Points in :func:`write_atomically`: of a manifest, and of what else is written so.
_COMMIT_POINTS = ("commit.temporary", "commit.rename", "commit.renamed")
_RECORD_POINTS = ("record.temporary", "record.rename", "record.renamed")

_T = TypeVar("_T")


def write_atomically(path: Path, data: bytes) -> None:
    """Puts a file in place so that a reader sees all of it or nothing, also after a power cut.

    Raises:
        StorageError: the disk refused. A reader sees the old file or the new one, whole, but a
            power cut may still choose between them.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    at = _COMMIT_POINTS if path.name == MANIFEST_NAME else _RECORD_POINTS
    try:
        with temporary.open("xb") as file:
            fault_point(at[0], lambda: os.write(file.fileno(), data[: len(data) // 2]))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fault_point(at[1])
        temporary.replace(path)
        fault_point(at[2])
        # Without these a power cut may forget the new name, or the folder that holds it.
        sync_folder(path.parent)
        sync_folder(path.parent.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"cannot write {path}: {error}. Free space or mend access to the storage, then retry."
        ) from error


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk for good.

    Raises:
        OSError: the disk refused.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems have no such call for folders, and need none.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def read_bytes(path: Path) -> bytes | None:
    """Content of a plain file, None when there is none; a flaky read is tried again.

    Raises:
        ManifestError: it is a link, a pipe or a folder.
        StorageError: it cannot be read, which does not mean that it is not there.
    """
    try:
        return retry(f"cannot read {path}", lambda: read_plain(path))
    except NotPlainFileError as error:
        raise ManifestError(path, "not a regular file") from error


def retry(what: str, action: Callable[[], _T]) -> _T | None:
    """Runs a read; None when there is no such file, StorageError when it keeps failing."""
    for pause_s in (*_READ_PAUSES_S, None):
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if pause_s is None:
                raise StorageError(
                    f"{what}: {error} ({len(_READ_PAUSES_S) + 1} tries). An error is not an "
                    "absence: mend access to the storage, then retry."
                ) from error
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def without_nonfinite(value: Any) -> Any:
    """Copies a JSON value with NaN and infinities as the strings "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(item) for item in value]
    return value
