"""Pins: who wants a checkpoint kept, and why, in ``PINNED.json`` beside its manifest.

A pinned checkpoint is never deleted, whatever the rules say. A file that cannot be understood is a pin too:
somebody wanted this checkpoint kept. Storage that fails is an error, never "not pinned".

Whoever pins may race with whoever deletes. The collector takes the manifest away first and looks for pins after
that; :func:`pin` writes first and looks for the manifest after that. So at least one of them sees the other: a
pin that was accepted keeps its checkpoint, and one that came too late is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ray_ckpt.checkpoint.names import MANIFEST_NAME, PINS_NAME
from ray_ckpt.checkpoint.storing import read_bytes, sync_folder, write_atomically
from ray_ckpt.errors import ConfigError, ManifestError, StorageError
from ray_ckpt.fault_points import fault_point

DAMAGED = f"{PINS_NAME} is there but damaged"
_BACK_S = 1.0  # a collector that saw the pin puts the manifest back within this time
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Pin:
    """One reason to keep a checkpoint.

    Attributes:
        reason: in words.
        author: who pinned it.
        time: when, seconds since the epoch.
    """

    reason: str
    author: str
    time: float

    @property
    def words(self) -> str:
        """The pin in a line."""
        return f"{self.reason} ({self.author})"


def read_pins(folder: Path) -> tuple[Pin, ...]:
    """The pins of a checkpoint, oldest first.

    Raises:
        StorageError: storage failed; whether it is pinned is not known.
    """
    try:
        data = read_bytes(folder / PINS_NAME)
    except ManifestError:
        data = b""
    return () if data is None else decode_pins(data)


def decode_pins(data: bytes) -> tuple[Pin, ...]:
    """The pins in the bytes of their file, at least one."""
    try:
        pins = tuple(
            Pin(str(item["reason"]), str(item["author"]), float(item["time"]))
            for item in json.loads(data)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        pins = ()
    return pins or (
        Pin(DAMAGED, "unknown", 0.0),
    )  # an empty list is damage too: unpin() leaves no file


def encode_pins(pins: tuple[Pin, ...]) -> bytes:
    """The bytes of a file of pins."""
    return json.dumps([asdict(p) for p in pins], indent=1).encode() + b"\n"


def refuse_silence(reason: str, author: str) -> None:
    """Refuses a pin that does not say why, or whose.

    Raises:
        ConfigError: one of them is empty.
    """
    for what, text in (("reason", reason), ("author", author)):
        if not text.strip():
            raise ConfigError(f"the {what} of a pin is empty: say it in words, somebody will ask")


def pin(folder: Path, reason: str, *, author: str, time_s: float) -> bool:
    """Pins a checkpoint; the same reason of the same author counts once.

    Args:
        folder: the checkpoint.
        reason: one sentence.
        author: who wants it.
        time_s: now, seconds since the epoch.

    Returns:
        Whether the pin is new.

    Raises:
        ConfigError: no reason, no author, or the checkpoint is gone, was never committed, or is a link.
        StorageError: the disk refused; whether it is pinned is not known.
    """
    refuse_silence(reason, author)
    _refuse_link(folder)
    if not _is_there(folder):
        raise not_there(folder.name)
    with _alone(folder):
        before = read_pins(folder)
        if any((old.reason, old.author) == (reason, author) for old in before):
            new = False
        else:
            new = True
            try:
                fault_point("pins.write")
                _write(folder, (*before, Pin(reason, author, time_s)))
                fault_point("pins.written")
            except StorageError:
                if not _is_there(folder):
                    raise not_there(folder.name) from None
                raise
        if not _comes_back(folder):
            if new:
                with contextlib.suppress(StorageError):  # it holds nothing any more
                    _write(folder, before)
            raise not_there(folder.name)
    return new


def unpin(folder: Path, reason: str | None = None) -> tuple[Pin, ...]:
    """Takes pins away: those of one reason, or all.

    Returns:
        The pins that were taken away.

    Raises:
        ConfigError: the folder is a link, or there is no pin with this reason; those that are there are named.
        StorageError: the disk refused.
    """
    _refuse_link(folder)
    with _alone(folder):
        pins = read_pins(folder)
        gone = with_reason(pins, reason, folder.name)
        if gone:
            _write(folder, tuple(p for p in pins if p not in gone))
    return gone


def with_reason(pins: tuple[Pin, ...], reason: str | None, name: str) -> tuple[Pin, ...]:
    """Those of a checkpoint's pins that have a reason; None is all of them.

    Raises:
        ConfigError: there is no pin with this reason; those that are there are named.
    """
    found = tuple(p for p in pins if reason is None or p.reason == reason)
    if reason is not None and not found:
        there = ", ".join(repr(p.reason) for p in pins) or "none"
        raise ConfigError(f"{name} has no pin with the reason {reason!r}; its pins: {there}")
    return found


def _write(folder: Path, pins: tuple[Pin, ...]) -> None:
    path = folder / PINS_NAME
    if pins:
        write_atomically(path, encode_pins(pins))
        return
    try:
        path.unlink(missing_ok=True)
        sync_folder(folder)
    except FileNotFoundError:
        pass  # the folder is gone, and its pins with it
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {error}. Mend access to the storage.") from error


def _is_there(folder: Path) -> bool:
    try:
        return read_bytes(folder / MANIFEST_NAME) is not None
    except ManifestError as error:
        raise ConfigError(f"{folder.name} cannot be pinned: {error}") from error


def _comes_back(folder: Path) -> bool:
    deadline = time.monotonic() + _BACK_S
    while not _is_there(folder):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise ConfigError(
            f"{folder} is a link, and its pins are those of another folder: pin the checkpoint there"
        )


def not_there(name: str) -> ConfigError:
    """What to say of a checkpoint that is to be pinned and has no manifest."""
    return ConfigError(
        f"{name} cannot be pinned: it has no {MANIFEST_NAME}, so it was never committed, or was just "
        "deleted. Choose another one (ray-ckpt ls RUN)."
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two people who pin at once must not overwrite each other; where folders cannot be locked, they might."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield  # what is wrong with the folder is told by whoever reads it
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
