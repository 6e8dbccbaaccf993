"""A depot: the copies of checkpoints' files that one node keeps in one tier, memory or local disk.

It is laid out as a run's folder is: files lie in ``<root>/checkpoints/step-...-gN/<path>``, and what is there
counts from the moment the manifest lies beside it. The manifest names all files of the checkpoint; here are those
that this node's own workers wrote, and copies of other nodes' files.

A file has its name only when it is whole: copies come under a name with a dot first, and their checksum is taken
on the way. Nothing is written, read or deleted through links. One process at a time copies into a depot; workers
write their own files beside it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ray_ckpt.checkpoint.listing import NO_MANIFEST, list_checkpoints
from ray_ckpt.checkpoint.manifest import FileEntry, Manifest, read_manifest, write_manifest
from ray_ckpt.checkpoint.names import (
    CHECKPOINTS_DIR,
    LINKED,
    MANIFEST_NAME,
    is_record,
    parse_checkpoint_name,
)
from ray_ckpt.checkpoint.paths import NotPlainFileError, behind_link, path_fault
from ray_ckpt.checkpoint.storing import sync_folder
from ray_ckpt.checkpoint.verify import Fault, find_faults, hash_file, verify_files
from ray_ckpt.errors import ConfigError, ManifestError, StorageError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.arrival import Arrivals, Passing, open_inside, refusal
from ray_ckpt.tiers.collect import LEAVING_NAME, remove_folder
from ray_ckpt.tiers.housekeeping import read_back

_THREADS = max(1, min(4, os.cpu_count() or 1))  # that read back; training needs the node too


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a depot has of one checkpoint; no byte of its files was read.

    Attributes:
        name: of the checkpoint.
        step: of it.
        generation: attempt that wrote it.
        manifest: None when there is none or it cannot be used.
        paths: files of the manifest that are here with the right size, in its order.
        fault: None when committed; "no manifest" when never committed; else what is wrong.
        quarantined: why it must not be used, when it was found bad.
    """

    name: str
    step: int
    generation: int
    manifest: Manifest | None
    paths: tuple[str, ...]
    fault: str | None = None
    quarantined: str | None = None


class Depot:
    """Copies of checkpoints' files on this node in one tier.

    Args:
        root: the run's folder in the tier, such as ``/dev/shm/ray_ckpt/<run key>``; made when it is needed.
        sync: whether the tier promises to survive a power cut; False for memory.
    """

    def __init__(self, root: Path, *, sync: bool) -> None:
        self.root, self.sync = root, sync
        # Commits, ends and new names come one after another: none may see another one half done.
        self._lock = threading.Lock()
        self._arrivals = Arrivals(root / CHECKPOINTS_DIR, sync=sync, lock=self._lock)

    def folder(self, name: str) -> Path:
        """Where a checkpoint's files lie, or would lie.

        Raises:
            ConfigError: it is no name of a checkpoint.
        """
        if parse_checkpoint_name(name) is None:
            raise ConfigError(f"{name!r} is no name of a checkpoint, such as step-00001200-g3")
        return self.root / CHECKPOINTS_DIR / name

    def inventory(self) -> list[Holding]:
        """What there is, newest first; cheap, no bytes of files are read.

        Raises:
            StorageError: the depot cannot be listed.
        """
        return [
            Holding(
                name=entry.folder.name,
                step=entry.step,
                generation=entry.generation,
                manifest=entry.manifest,
                paths=tuple(
                    file.path
                    for file in (entry.manifest.files if entry.manifest else ())
                    if _lack(entry.folder, file) is None
                ),
                fault=entry.fault,
                quarantined=entry.quarantined,
            )
            for entry in list_checkpoints(self.root)
        ]

    def keep(
        self,
        manifest: Manifest,
        paths: Sequence[str],
        allowed: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Commits this node's part of a checkpoint; the same call again changes nothing.

        Args:
            manifest: of the whole checkpoint.
            paths: the files of it that this node is to have.
            allowed: asked last; raises when it must not be committed any more.

        Returns:
            None when it is committed; else what is not here, in words, and nothing was changed.

        Raises:
            ManifestError: another manifest is there already, or the folder is a link.
            StorageError: storage failed; it is not committed.
        """
        folder = self.folder(manifest.name)
        entries = {entry.path: entry for entry in manifest.files}
        if not paths:
            return (
                f"no file of {manifest.name} is named, and a part of a checkpoint has at least one"
            )
        with self._lock:
            for path in paths:
                if path not in entries:
                    return f"{path} is not in the manifest of {manifest.name}"
                if lack := _lack(folder, entries[path]):
                    return f"{path} of {manifest.name}: {lack}"
            if self.sync:
                self._settle(folder, paths)
            allowed()
            write_manifest(folder, manifest)
        return None

    def renounce(self, manifest: Manifest) -> None:
        """Takes a manifest away that is damaged, or another one than the run goes by; its files stay.

        One node's bad manifest must not keep it from a checkpoint that others have.

        Raises:
            StorageError: storage failed, or the folder is a link.
        """
        folder = self.folder(manifest.name)
        base = self.root / CHECKPOINTS_DIR
        try:
            with self._lock, open_inside(base, f"{manifest.name}/{MANIFEST_NAME}") as (at, last):
                try:
                    wrong = read_manifest(folder) != manifest
                except ManifestError as error:
                    wrong = error.fault != "missing"
                if wrong:
                    os.unlink(last, dir_fd=at)
        except FileNotFoundError:
            return
        except OSError as error:
            raise refusal(f"cannot delete the manifest in {folder}", error) from error

    def find(self, name: str, path: str) -> Path | None:
        """The plain file that has a path here, whole or not; None when there is none.

        Raises:
            ConfigError: it is no name of a checkpoint.
        """
        folder = self.folder(name)
        try:
            if folder.is_symlink() or path_fault(path) or behind_link(folder, path):
                return None
            return folder / path if stat.S_ISREG((folder / path).lstat().st_mode) else None
        except OSError:
            return None

    def fault(self, name: str, entry: FileEntry) -> Fault | None:
        """What is wrong with a file; None when it is here with every byte right. Reads it.

        One that cannot be read may be good (:attr:`ray_ckpt.checkpoint.verify.Fault.unreadable`).
        """
        folder = self.folder(name)
        if folder.is_symlink():
            return Fault(entry.path, f"unreadable: {LINKED}")
        return next(iter(find_faults(folder, [entry])), None)

    def has(self, name: str, entry: FileEntry) -> bool:
        """Whether a file is here with every byte right; reads it."""
        folder = self.folder(name)
        if _lack(folder, entry) is not None:
            return False
        passing = Passing(entry)
        try:
            size, checksum = hash_file(folder / entry.path, also=passing.strong)
        except (OSError, NotPlainFileError):
            return False  # it went meanwhile, or the disk has lost it
        return (size, checksum) == (entry.bytes, entry.checksum) and passing.strong_fits

    def verify(self, name: str, paths: Sequence[str] | None = None) -> list[Fault]:
        """Reads files that are here and compares every byte with the manifest; changes nothing.

        Args:
            name: of the checkpoint.
            paths: files that must be here; None for those that are.

        Returns:
            What is wrong, sorted by path.
        """
        folder = self.folder(name)
        if folder.is_symlink():
            return [Fault(MANIFEST_NAME, f"unreadable: {LINKED}")]
        return read_back(folder, partial(_compare, paths))

    def put(self, name: str, entry: FileEntry, chunks: Iterable[bytes | memoryview]) -> None:
        """Takes a file in; does nothing, and takes no chunk, when the right one is here.

        Args:
            name: of the checkpoint.
            entry: of the file in the checkpoint's manifest.
            chunks: its content; each is done with when the next one is asked for.

        Raises:
            CopyError: the content is another one; nothing of it stays.
            StorageError: the tier is full, or refused; nothing of it stays.
        """
        place = self.folder(name) / entry.path
        if self.has(name, entry):
            return
        try:
            if (free := self.free_bytes()) < entry.bytes:
                raise OSError(errno.ENOSPC, f"{entry.bytes} bytes do not fit into the {free} free")
            with contextlib.suppress(FileNotFoundError):
                # A checkpoint that files come for again is not on its way out any more.
                base = self.root / CHECKPOINTS_DIR
                with open_inside(base, f"{name}/{LEAVING_NAME}") as (folder, last):
                    os.unlink(last, dir_fd=folder)
            self._arrivals.receive(f"{name}/{entry.path}", entry, chunks)
        except OSError as error:
            raise refusal(f"cannot write {place}", error) from error

    def set_aside(self, name: str, path: str) -> None:
        """Takes a bad copy out of use for good: this one file is deleted, the manifest stays.

        Raises:
            ConfigError: it is no path of a file of a checkpoint.
            StorageError: it cannot be deleted.
        """
        place = self.folder(name) / path
        if (fault := path_fault(path)) or is_record(path):
            raise ConfigError(f"file path {path!r} {fault or 'is that of a record'}")
        try:
            base = self.root / CHECKPOINTS_DIR
            with open_inside(base, f"{name}/{path}") as (folder, last), self._lock:
                os.unlink(last, dir_fd=folder)
                if self.sync:
                    os.fsync(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise refusal(f"cannot delete {place}", error) from error

    def drop(self, name: str, allowed: Callable[[], None] = lambda: None) -> None:
        """Ends what is here of a checkpoint: first its manifest, then the files.

        Args:
            name: of the checkpoint.
            allowed: asked last; raises when it must not end any more.

        Raises:
            StorageError: the folder is a link, or something cannot be deleted; call it again.
        """
        folder = self.folder(name)
        with self._lock:
            if folder.is_symlink():
                raise StorageError(f"cannot drop {folder}: {LINKED}. Remove the link.")
            try:
                fault_point("depot.drop")
                allowed()
                # The mark tells the next sweep that what is left here need not stay.
                with contextlib.suppress(FileNotFoundError):
                    (folder / MANIFEST_NAME).rename(folder / LEAVING_NAME)
                    if self.sync:
                        sync_folder(folder)
                fault_point("depot.dropped")
            except OSError as error:
                raise refusal(f"cannot drop {folder}", error) from error
            if folder.exists() and (problem := remove_folder(folder)):
                raise StorageError(
                    f"cannot drop all of {folder}: {problem}. Mend access to it, then retry."
                )

    def sweep(self, keep: Collection[str], older_than_generation: int) -> list[str]:
        """Clears away what was never committed: folders of attempts that are over, and broken-off copies.

        Args:
            keep: names of checkpoints that stay.
            older_than_generation: folders without a manifest of earlier attempts go, and those whose end was
                begun.

        Returns:
            Names of the folders that went, newest first.

        Raises:
            StorageError: storage failed.
        """
        gone, problems = [], list[str]()
        for holding in self.inventory():
            leaving = os.path.lexists(self.folder(holding.name) / LEAVING_NAME)
            over = leaving or holding.generation < older_than_generation
            try:
                if holding.fault == NO_MANIFEST and over and holding.name not in keep:
                    self.drop(holding.name)
                    gone.append(holding.name)
                else:
                    self._clear(holding)
            except StorageError as error:
                problems.append(str(error))  # one bad folder does not keep the others
        if problems:
            raise StorageError("; ".join(problems))
        return gone

    def free_bytes(self) -> int:
        """Space that is left in the tier.

        Raises:
            OSError: that cannot be told.
        """
        place = self.root
        while not place.exists():
            place = place.parent
        found = os.statvfs(place)
        return found.f_bavail * found.f_frsize

    # ---- edges ------------------------------------------------------------------------------------

    def _settle(self, folder: Path, paths: Sequence[str]) -> None:
        """Puts files and their names on the disk for good, whoever wrote them."""
        try:
            folders = {self.root, self.root.parent}
            for path in paths:
                with open(folder / path, "rb") as file:
                    os.fsync(file.fileno())
                folders |= {folder / part for part in Path(path).parents}
            for place in sorted(folders, reverse=True):
                sync_folder(place)
        except OSError as error:
            raise refusal(f"cannot sync {folder}", error) from error

    def _clear(self, holding: Holding) -> None:
        """Deletes copies that broke off with the process that made them."""
        named = {entry.path for entry in holding.manifest.files} if holding.manifest else set()
        folder = self.folder(holding.name)
        if folder.is_symlink():
            return
        try:
            for place, _, names, at in os.fwalk(folder):
                for name in names:
                    path = (Path(place) / name).relative_to(folder).as_posix()
                    if self._arrivals.broken_off(name) and path not in named:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=at)
        except OSError as error:
            raise refusal(f"cannot clear {folder}", error) from error


def _lack(folder: Path, entry: FileEntry) -> str | None:
    """What a look at a file, not into it, finds wrong; None when it is here with the right size."""
    try:
        if folder.is_symlink() or behind_link(folder, entry.path):
            return "behind a link"
        found = (folder / entry.path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "not here"
    except OSError as error:
        return f"unreadable: {error.strerror or error}"
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    if found.st_size != entry.bytes:
        return f"has {found.st_size} of {entry.bytes} bytes"
    return None


def _compare(paths: Sequence[str] | None, folder: Path, manifest: Manifest) -> list[Fault]:
    entries = {entry.path: entry for entry in manifest.files}
    faults = []
    if paths is None:
        paths = [path for path in entries if os.path.lexists(folder / path)]
    else:
        faults = [Fault(path, "not in the manifest") for path in paths if path not in entries]
    wanted = [entries[path] for path in dict.fromkeys(paths) if path in entries]
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(lambda entry: verify_files(folder, manifest, [entry]), wanted):
            faults += found
    return sorted(faults, key=lambda fault: fault.path)
