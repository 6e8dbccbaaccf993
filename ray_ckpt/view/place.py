"""Where a run lies, for the command line: in a folder, or on an object store. Both are looked at in the same words."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.listing import Listed, list_checkpoints
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME
from ray_ckpt.checkpoint.quarantine import read_quarantine_note
from ray_ckpt.checkpoint.trust import key_problem, problem_of
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tiers import pins, remote_pins
from ray_ckpt.tiers.address import below, is_uri, split_run
from ray_ckpt.tiers.pins import Pin
from ray_ckpt.tiers.remote import RemoteTier
from ray_ckpt.tiers.remote_house import remote_stock
from ray_ckpt.tiers.remote_records import pull_records
from ray_ckpt.tiers.remote_store import RemoteStore
from ray_ckpt.tiers.stock import stock_of
from ray_ckpt.tracker.journal import JOURNAL_NAME
from ray_ckpt.tracker.recall import recall
from ray_ckpt.tracker.rollback import passed
from ray_ckpt.view.chronicle import Chronicle
from ray_ckpt.view.keeping import Keeping
from ray_ckpt.view.runs import find_run, some_like, verified_times
from ray_ckpt.view.told import chronicle_in

MOST_LOOKS = 10


class FolderRun:
    """A run in a folder.

    Args:
        folder: of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def entries(self) -> list[Listed]:
        """Its checkpoints, newest first."""
        return [*list_checkpoints(self.folder)]

    @contextmanager
    def records_folder(self) -> Iterator[Path]:
        """Where its journal and its step lines can be read, for as long as the block lasts."""
        yield self.folder

    def verified_times(self) -> dict[str, float]:
        """Name of a checkpoint to the last time that the run read it back."""
        return verified_times(self.folder)

    def keeping(self, entries: Sequence[Any]) -> Keeping:
        """Why each of its checkpoints is kept."""
        chronicle = chronicle_in(self.folder)
        memory = chronicle.memory
        stock = stock_of(entries, verified=memory.verified, passed=passed(memory.left))
        return Keeping(memory, stock, chronicle.checkpoints)

    def faults(self, entry: Any) -> list[Fault]:
        """Reads every byte of a checkpoint whose manifest was read."""
        return verify_files(entry.folder, entry.manifest)

    def is_there(self, entry: Any) -> bool:
        """Whether a checkpoint still has its manifest."""
        there: bool = (entry.folder / MANIFEST_NAME).exists()
        return there

    def note(self, entry: Any) -> dict[str, Any]:
        """What the note of a quarantine says."""
        return read_quarantine_note(entry.folder) or {}

    def key_problem(self) -> str | None:
        """What to say when the key in use is a wrong one."""
        return key_problem(self.folder)

    def read_pins(self, name: str) -> tuple[Pin, ...]:
        """Pins of a checkpoint."""
        return pins.read_pins(self._of(name))

    def pin(self, name: str, reason: str, *, author: str, time_s: float) -> bool:
        """Pins a checkpoint; whether that is new."""
        return pins.pin(self._of(name), reason, author=author, time_s=time_s)

    def unpin(self, name: str, reason: str | None) -> tuple[Pin, ...]:
        """Takes pins away."""
        return pins.unpin(self._of(name), reason)

    def _of(self, name: str) -> Path:
        return next(e.folder for e in self.entries() if e.folder.name == name)


class RemoteRun:
    """A run on an object store.

    Args:
        tier: its checkpoints.
        folder: that has the run's records; they are on the store too, as of the last commit there.
    """

    def __init__(self, tier: RemoteTier, folder: Path | None = None) -> None:
        self.tier, self.folder = tier, folder

    def __str__(self) -> str:
        return str(self.tier.where)

    def entries(self) -> list[Listed]:
        """Its checkpoints, newest first."""
        return [*self.tier.entries()]

    @contextmanager
    def records_folder(self) -> Iterator[Path]:
        """Where its journal and its step lines can be read, for as long as the block lasts."""
        if self.folder is not None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="ray-ckpt-") as place:
            folder = Path(place) / "run"
            pull_records(self.tier, folder)
            yield folder

    @cached_property
    def records(self) -> tuple[Chronicle, dict[str, float]]:
        """What its journal there tells, and when checkpoints were read back."""
        with self.records_folder() as folder:
            return chronicle_in(folder), verified_times(folder)

    def verified_times(self) -> dict[str, float]:
        """Name of a checkpoint to the last time that the run read it back."""
        return self.records[1]

    def keeping(self, entries: Sequence[Any]) -> Keeping:
        """Why each of its checkpoints is kept."""
        chronicle = self.records[0]
        memory = chronicle.memory
        verified, course = memory.verified, passed(memory.left)
        stock = remote_stock(self.tier, entries, verified=verified, passed=course)
        return Keeping(memory, stock, chronicle.checkpoints)

    def faults(self, entry: Any) -> list[Fault]:
        """Reads every byte of a checkpoint whose manifest was read."""
        return self.tier.verify_files(entry.folder.name, entry.manifest)

    def is_there(self, entry: Any) -> bool:
        """Whether a checkpoint still has its manifest."""
        return self.tier.store.size(self.tier.place(entry.folder.name, MANIFEST_NAME)) is not None

    def note(self, entry: Any) -> dict[str, Any]:
        """What the note of a quarantine says."""
        return self.tier.quarantine_note(entry.folder.name) or {}

    def key_problem(self) -> str | None:
        """What to say when the key in use is a wrong one."""
        return problem_of(self.entries())

    def read_pins(self, name: str) -> tuple[Pin, ...]:
        """Pins of a checkpoint."""
        return remote_pins.read_pins(self.tier, name)

    def pin(self, name: str, reason: str, *, author: str, time_s: float) -> bool:
        """Pins a checkpoint; whether that is new."""
        return remote_pins.pin(self.tier, name, reason, author=author, time_s=time_s)

    def unpin(self, name: str, reason: str | None) -> tuple[Pin, ...]:
        """Takes pins away."""
        return remote_pins.unpin(self.tier, name, reason)


def open_run(text: str, storage: str) -> FolderRun | RemoteRun:
    """The run that a person means: a path, an address, or a name below a storage that is either.

    Raises:
        ConfigError: there is no such run.
        StorageError: the storage cannot be read.
    """
    uri = text if is_uri(text) else ""
    if not uri and is_uri(storage) and text == Path(text).name:
        uri = below(storage, text)
    if not uri:
        folder = find_run(text, storage)
        stack = recall(folder).stack
        if not stack or not stack["remote"]:
            return FolderRun(folder)
        return RemoteRun(RemoteTier(RemoteStore(stack["remote"]), folder.name), folder)
    base, name = split_run(uri)
    tier = RemoteTier(RemoteStore(base), name)
    if not tier.store.list(name):
        raise ConfigError(f"no run {name!r} in {tier.store.where}{_instead(tier.store, name)}")
    return RemoteRun(tier)


def _instead(store: RemoteStore, name: str) -> str:
    """What is there in place of a run, for a hint; a folder may hold many things, and only runs have checkpoints."""
    with contextlib.suppress(StorageError):
        folders = [item.path for item in store.list() if item.is_folder]
        marks = {CHECKPOINTS_DIR, JOURNAL_NAME}
        # Each look is a request: enough of them for a hint, those first that are most like what was asked for.
        some = some_like(name, folders)[:MOST_LOOKS]
        runs = [each for each in some if marks & {item.path for item in store.list(each)}]
        if runs:
            return f". Runs there: {', '.join(runs)}"
    return ", and no other run is there. Give the address of one: URI/RUN."
