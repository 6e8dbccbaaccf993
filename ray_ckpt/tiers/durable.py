"""The durable tier as the nodes' holders use it: the run's own folder, or an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ray_ckpt.checkpoint.listing import Listed, list_checkpoints
from ray_ckpt.checkpoint.manifest import FileEntry
from ray_ckpt.checkpoint.paths import open_plain
from ray_ckpt.errors import CopyError, DamagedCopyError
from ray_ckpt.tiers.depot import Depot
from ray_ckpt.tiers.remote import RemoteTier
from ray_ckpt.tiers.remote_store import RemoteStore
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tiers.throttle import Throttle

_CHUNK_BYTES = 8 << 20


class Durable(Protocol):
    """Where copies go that survive the loss of the cluster."""

    def put(self, name: str, entry: FileEntry, source: Path, throttle: Throttle) -> None:
        """Copies a file there and compares what is there with the entry; a right copy is left as it is.

        Raises:
            CopyError: the bytes there, or those of the source, are others than the entry says.
            StorageError: storage failed.
        """
        ...

    def get(self, name: str, entry: FileEntry, into: Depot, throttle: Throttle) -> None:
        """Copies a file from there, and compares it with the entry; raises as ``put`` does."""
        ...


class DurableFolder:
    """A folder that every node sees."""

    def __init__(self, run_dir: Path) -> None:
        self._depot = Depot(run_dir, sync=True)

    def put(self, name: str, entry: FileEntry, source: Path, throttle: Throttle) -> None:
        self._depot.put(name, entry, chunks_of(source, throttle))
        if not self._depot.has(name, entry):
            raise CopyError(
                f"{self._depot.folder(name) / entry.path} was written whole, and is not what was written when it is "
                "read back. The storage changes what it is given: mend it."
            )

    def get(self, name: str, entry: FileEntry, into: Depot, throttle: Throttle) -> None:
        into.put(name, entry, chunks_of(self._depot.folder(name) / entry.path, throttle))


class DurableRemote:
    """An object store."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier

    def put(self, name: str, entry: FileEntry, source: Path, throttle: Throttle) -> None:
        try:
            self._tier.put(name, entry, source, throttle)
        except DamagedCopyError as error:
            raise CopyError(str(error)) from error

    def get(self, name: str, entry: FileEntry, into: Depot, throttle: Throttle) -> None:
        if into.has(name, entry):
            return
        to = into.folder(name) / entry.path
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._tier.get(name, entry, to, throttle)
        except DamagedCopyError as error:
            raise CopyError(str(error)) from error


def remote_of(stack: Stack, run_dir: Path) -> RemoteTier | None:
    """The checkpoints of a run on an object store, if that is its durable tier."""
    return RemoteTier(RemoteStore(stack.remote), run_dir.name) if stack.remote else None


def durable_entries(stack: Stack, run_dir: Path) -> list[Listed]:
    """What is in the durable tier of a run, newest first; cheap.

    Raises:
        StorageError: it cannot be listed.
    """
    tier = remote_of(stack, run_dir)
    return [*list_checkpoints(run_dir)] if tier is None else [*tier.entries()]


def durable_of(stack: Stack, run_dir: Path) -> Durable:
    """The durable tier of a run."""
    tier = remote_of(stack, run_dir)
    return DurableFolder(run_dir) if tier is None else DurableRemote(tier)


def chunks_of(path: Path, throttle: Throttle) -> Iterator[bytes]:
    """A plain file's content, piece by piece."""
    with open(open_plain(path), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            throttle.spend(len(chunk))
            yield chunk
