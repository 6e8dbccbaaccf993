"""The durable tier on an object store: ``<uri>/<run>/checkpoints/<name>/<file>``, the same names as in a folder.

What holds in a folder holds here. A checkpoint counts from the moment that its manifest is there, which is put last,
in one request, after every byte that it names was read back from the store. Nothing is renamed.

An upload that is cut off leaves nothing, or a file that no manifest names; the store itself may keep parts of it
that only its own rules remove (for S3: "abort incomplete multipart uploads" in the lifecycle of the bucket).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint.listing import NO_MANIFEST, Listed
from ray_ckpt.checkpoint.manifest import FileEntry, Manifest, parse_manifest, seal_manifest
from ray_ckpt.checkpoint.names import (
    CHECKPOINTS_DIR,
    MANIFEST_NAME,
    QUARANTINE_NAME,
    RECORD_NAMES,
    parse_checkpoint_name,
)
from ray_ckpt.checkpoint.paths import NotPlainFileError, open_plain
from ray_ckpt.checkpoint.quarantine import decode_note, encode_note
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import DamagedCopyError, ManifestError, SignatureError, StorageError
from ray_ckpt.tiers.address import RemotePath
from ray_ckpt.tiers.collect import LEAVING_NAME
from ray_ckpt.tiers.remote_store import CHUNK_BYTES, RemoteStore
from ray_ckpt.tiers.throttle import Throttle

NUM_THREADS = 8
_NO_LIMIT = Throttle()
_RECORDS = frozenset((*RECORD_NAMES, LEAVING_NAME))


@dataclass(frozen=True, slots=True)
class RemoteEntry(Listed):
    """One checkpoint on an object store.

    Attributes:
        records: names of the package's own files in its folder, such as notes.
    """

    folder: RemotePath
    records: frozenset[str] = frozenset()


class RemoteTier:
    """The checkpoints of one run on an object store; threads may share one.

    Args:
        store: where runs lie.
        run: name of the run.
    """

    def __init__(self, store: RemoteStore, run: str) -> None:
        self.store, self.run = store, run

    @property
    def where(self) -> RemotePath:
        """The run's folder, as people may see it."""
        return self.store.where / self.run

    def place(self, name: str, path: str = "") -> str:
        """A checkpoint, or a file of it, as the store knows it."""
        folder = f"{self.run}/{CHECKPOINTS_DIR}/{name}"
        return f"{folder}/{path}" if path else folder

    def folder(self, name: str) -> RemotePath:
        """A checkpoint, as people may see it."""
        return self.where / CHECKPOINTS_DIR / name

    def put(
        self, name: str, entry: FileEntry, source: Path, throttle: Throttle = _NO_LIMIT
    ) -> None:
        """Uploads one file, and reads it back: size and checksums are those of the bytes at the target.

        A file that is there with the right bytes is not sent again. Stores have cheaper proofs (an ETag, a checksum
        of theirs), but none that all of them have and that is also in the manifest: reading back is the default,
        and costs one download.

        Args:
            name: of the checkpoint.
            entry: the file, as the manifest names it.
            source: the file on this machine.
            throttle: what goes up, and what comes back, is counted.

        Raises:
            DamagedCopyError: the source has other bytes, or the target has after it was sent twice.
            StorageError: the store failed, or the source cannot be read.
        """
        place = self.place(name, entry.path)
        # Nearly always it is not there; if that is a mistake, it is sent again.
        fault = self._compare(name, entry, throttle, lambda chunk: None, sure=False)
        if fault is None:
            return
        for _ in range(2):
            self.store.upload(place, lambda: _chunks_of(source, entry, throttle))
            fault = self.fault_of(name, entry, throttle)
            if fault is None:
                return
        raise DamagedCopyError(
            str(self.folder(name) / entry.path), entry.path, f"after the upload: {fault}"
        )

    def get(self, name: str, entry: FileEntry, to: Path, throttle: Throttle = _NO_LIMIT) -> None:
        """Downloads one file; it is in its place when all of it has arrived and is right, else nothing is.

        Raises:
            DamagedCopyError: the store has other bytes, or none.
            StorageError: the store failed, or the file cannot be written.
        """
        temporary = to.with_name(f".{to.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                fault = self._compare(name, entry, throttle, file.write)
                if fault is not None:
                    raise DamagedCopyError(str(self.folder(name) / entry.path), entry.path, fault)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(to)
        except OSError as error:
            raise StorageError(
                f"cannot write {to}: {error}. Free space or mend access to the disk, then retry."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def seal(self, name: str, manifest: Manifest) -> None:
        """Commits a checkpoint whose files are all there: puts its manifest, in one request.

        Putting the same manifest again changes nothing.

        Raises:
            ManifestError: the manifest is another checkpoint's, cannot be signed, or there is a different one.
            StorageError: the store failed; the checkpoint is not committed, or its manifest may be there.
        """
        path, place = self.folder(name) / MANIFEST_NAME, self.place(name, MANIFEST_NAME)
        data = seal_manifest(manifest, path, name)
        present = self.store.read(place)
        if present == data:
            return
        # The first part of these very bytes is a commit that was cut off, where a store is no more than a disk.
        if present is not None and not data.startswith(present):
            raise ManifestError(
                path, "already committed with other content; a commit is never changed"
            )
        try:
            self.store.write(place, data)
        except StorageError:
            # It may have arrived before the error: a refused commit must not be readable.
            with contextlib.suppress(StorageError):
                self.store.delete(place)
            raise

    def entries(self) -> list[RemoteEntry]:
        """All checkpoints, newest first; reads one small object each, several at once.

        Raises:
            StorageError: the checkpoints cannot be listed.
            ConfigError: the key in use is of no use.
        """
        items = self.store.list(f"{self.run}/{CHECKPOINTS_DIR}")
        names = [item.path for item in items if item.is_folder and parse_checkpoint_name(item.path)]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            found = [entry for entry in pool.map(self.look_at, names) if entry is not None]
        return sorted(found, key=lambda e: (e.step, e.generation), reverse=True)

    def look_at(self, name: str) -> RemoteEntry | None:
        """One line of the listing; None when there is nothing of that name."""
        key = parse_checkpoint_name(name)
        if key is None:
            raise ValueError(f"{name!r} is no name of a checkpoint")
        manifest, fault, quarantined, unreadable, mistrusted = None, None, None, False, False
        records: frozenset[str] = frozenset()
        try:
            items = [item for item in self.store.list(self.place(name)) if not item.is_folder]
            records = frozenset({item.path for item in items} & _RECORDS)
            if QUARANTINE_NAME in records:
                note = self.quarantine_note(name)
                quarantined = None if note is None else str(note["reason"])
            manifest = self.manifest(name)
        except SignatureError as error:
            fault, unreadable, mistrusted = error.fault, True, True
        except ManifestError as error:
            missing = error.fault == "missing"
            if missing and not self.store.list(self.place(name), deep=True):
                return None  # deleted; a store may still show the name of an empty folder
            fault = NO_MANIFEST if missing else error.fault
        except StorageError as error:
            fault, unreadable = f"unreadable: {error}", True
        return RemoteEntry(
            self.folder(name), *key, manifest, fault, quarantined, unreadable, mistrusted, records
        )

    def manifest(self, name: str) -> Manifest:
        """A checkpoint's manifest, checked.

        Raises:
            ManifestError: it is missing (``fault == "missing"``), damaged, or another checkpoint's.
            SignatureError: a key is in use, and this manifest is not signed with it.
            StorageError: the store failed; whether the checkpoint is committed is not known.
        """
        path = self.folder(name) / MANIFEST_NAME
        data = self.store.read(self.place(name, MANIFEST_NAME))
        if data is None:
            raise ManifestError(path, "missing")
        return parse_manifest(data, path, name)

    def verify(self, name: str, throttle: Throttle = _NO_LIMIT) -> list[Fault]:
        """Reads every byte of a checkpoint and compares it with its manifest; changes nothing.

        Returns:
            What is wrong, sorted by path; empty when every byte is as committed.
        """
        try:
            manifest = self.manifest(name)
        except SignatureError as error:
            # Says nothing about the bytes: the key may be a wrong one.
            return [Fault(MANIFEST_NAME, f"unreadable: {error.fault}")]
        except ManifestError as error:
            return [Fault(MANIFEST_NAME, error.fault)]
        except StorageError as error:
            return [Fault(MANIFEST_NAME, f"unreadable: {error}")]
        return self.verify_files(name, manifest, throttle)

    def verify_files(
        self, name: str, manifest: Manifest, throttle: Throttle = _NO_LIMIT
    ) -> list[Fault]:
        """The same with a manifest that was read before."""
        try:
            items = self.store.list(self.place(name), deep=True)
        except StorageError as error:
            return [Fault(MANIFEST_NAME, f"unreadable: {error}")]
        known = {entry.path for entry in manifest.files}
        faults = [
            Fault(path, "not in the manifest")
            for path in (item.path for item in items)
            if not (path in known or path in RECORD_NAMES or path.rpartition("/")[2][:1] == ".")
        ]

        def look(entry: FileEntry) -> str | None:
            try:
                return self.fault_of(name, entry, throttle)
            except StorageError as error:
                return f"unreadable: {error}"

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            found = zip(manifest.files, pool.map(look, manifest.files), strict=True)
            faults += [Fault(entry.path, fault) for entry, fault in found if fault is not None]
        return sorted(faults, key=lambda fault: fault.path)

    def fault_of(self, name: str, entry: FileEntry, throttle: Throttle = _NO_LIMIT) -> str | None:
        """What is wrong with one file of a checkpoint, all of which is read; None when nothing is.

        Raises:
            StorageError: the store failed.
        """
        return self._compare(name, entry, throttle, lambda chunk: None)

    def quarantine_note(self, name: str) -> dict[str, Any] | None:
        """All that a quarantine says, ``reason`` at least; None when there is none.

        Raises:
            StorageError: the store failed; whether it is quarantined is not known.
        """
        data = self.store.read(self.place(name, QUARANTINE_NAME))
        return None if data is None else decode_note(data)

    def quarantine(
        self,
        name: str,
        reason: str,
        findings: list[dict[str, Any]] | None = None,
        time_s: float = 0.0,
        by: str = "",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Marks a checkpoint as bad for good; the first reason stays.

        Args:
            name: of the checkpoint.
            reason: one sentence.
            findings: details, such as ``[{"path": ..., "fault": ...}]``.
            time_s: now, seconds since the epoch.
            by: who found it.
            facts: what else the note says.

        Raises:
            StorageError: the store failed; the checkpoint may still be offered.
        """
        if self.quarantine_note(name) is None:
            data = encode_note(reason, time_s=time_s, findings=findings, by=by, facts=facts)
            self.store.write(self.place(name, QUARANTINE_NAME), data)

    def _compare(
        self,
        name: str,
        entry: FileEntry,
        throttle: Throttle,
        use: Callable[[bytes], object],
        sure: bool = True,
    ) -> str | None:
        found = self.store.chunks(self.place(name, entry.path), sure=sure)
        if found is None:
            return "missing"
        present, chunks = found
        return _other_size(present, entry) or _fault_in(chunks, entry, throttle, use)


def _other_size(size: int, entry: FileEntry) -> str | None:
    if size == entry.bytes:
        return None
    word = "truncated" if size < entry.bytes else "too long"
    return f"{word}: {size} of {entry.bytes} bytes"


def _fault_in(
    chunks: Iterable[bytes], entry: FileEntry, throttle: Throttle, use: Callable[[bytes], object]
) -> str | None:
    """What differs between content and its entry; hands on each piece."""
    digest, size = xxhash.xxh3_128(), 0
    strong = None if entry.sha256 is None else hashlib.sha256()
    for chunk in chunks:
        throttle.spend(len(chunk))
        digest.update(chunk)
        if strong is not None:
            strong.update(chunk)
        size += len(chunk)
        use(chunk)
    if size != entry.bytes:
        return f"changed while it was read: {size} of {entry.bytes} bytes"
    if digest.hexdigest() != entry.checksum:
        return "checksum differs"
    if strong is not None and strong.hexdigest() != entry.sha256:
        return "SHA-256 differs, although the quick checksum is that of the manifest: forged"
    return None


def _chunks_of(source: Path, entry: FileEntry, throttle: Throttle) -> Iterator[memoryview]:
    """A file of this machine piece by piece; after the last one it has proved to be the right one."""
    digest, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        with open(open_plain(source), "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                throttle.spend(count)
                digest.update(buffer[:count])
                size += count
                yield buffer[:count]
    except (OSError, NotPlainFileError) as error:
        raise StorageError(f"cannot read {source}: {error}. Mend access to the disk.") from error
    if size != entry.bytes or digest.hexdigest() != entry.checksum:
        what = "checksum differs" if size == entry.bytes else f"{size} of {entry.bytes} bytes"
        raise DamagedCopyError(str(source), entry.path, what)
