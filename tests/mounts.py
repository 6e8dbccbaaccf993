"""Disks of one's own for a test: small ones that are soon full, and ones that break as real ones do.

What is mounted is seen by the process that mounts it and by its children, and goes with the last of them. Where
mounting is not allowed nothing is done, and False is returned.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_NEW_NAMESPACE, _PRIVATE, _REMOUNT = 0x20000, (1 << 18) | (1 << 14), 1 << 5
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount_apart() -> bool:
    """From now on what this process mounts is seen by nobody else."""
    return not (_LIBC.unshare(_NEW_NAMESPACE) or _LIBC.mount(b"none", b"/", None, _PRIVATE, None))


def mount_small(place: Path, size: str, *, remount: bool = False) -> bool:
    """A disk of so many bytes, or the same one with another size; after :func:`mount_apart`."""
    place.mkdir(parents=True, exist_ok=True)
    flags = _REMOUNT if remount else 0
    options = f"size={size}".encode()
    return not _LIBC.mount(b"tmpfs", str(place).encode(), b"tmpfs", flags, options)


def fill(place: Path) -> Path:
    """Takes all room that a disk has; returns the file that has it."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass
    return filler


class BreakableDisk:
    """A disk in a file that can be taken away below it: then what is read of it fails with EIO, and writes fail too.

    Args:
        folder: for the file; a disk of its own.
        place: where it is mounted.
    """

    def __init__(self, folder: Path, place: Path) -> None:
        self._image, self._place = folder / "image", place

    def mount(self) -> bool:
        """Puts a new, empty disk there; after :func:`mount_apart`."""
        if not (shutil.which("losetup") and shutil.which("mkfs.ext4")):
            return False
        if not mount_small(self._image.parent, "5m"):
            return False
        self._image.write_bytes(b"")
        os.truncate(self._image, 4 << 20)
        self._place.mkdir(parents=True, exist_ok=True)
        # Without a journal: the system that runs the test is not to be asked to mend it.
        make = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(self._image)]
        if subprocess.run(make, capture_output=True, check=False).returncode:
            return False
        attach = ["losetup", "--find", "--show", str(self._image)]
        done = subprocess.run(attach, capture_output=True, text=True, check=False)
        if done.returncode:
            return False
        device = done.stdout.strip()
        failed = _LIBC.mount(device.encode(), str(self._place).encode(), b"ext4", 0, b"errors=continue")  # fmt: skip
        # It goes when it is mounted nowhere any more.
        subprocess.run(["losetup", "--detach", device], capture_output=True, check=False)
        return not failed

    def spoil(self) -> None:
        """From now on nothing of it can be read or written but what the system still has in memory."""
        os.sync()
        for path in self._place.rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        os.truncate(self._image, 0)  # nothing is left to be read
        fill(self._image.parent)  # and no room for what is written
