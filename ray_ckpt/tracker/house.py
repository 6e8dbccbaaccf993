"""The durable tier of a run as its tracker deals with it: a folder, or an object store, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ray_ckpt.checkpoint.listing import Listed, list_checkpoints
from ray_ckpt.checkpoint.manifest import Manifest, write_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, parse_checkpoint_name
from ray_ckpt.checkpoint.quarantine import GUARD, write_quarantine
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import ConfigError, RayCkptError
from ray_ckpt.tiers import pins, remote_pins
from ray_ckpt.tiers.collect import Gate
from ray_ckpt.tiers.durable import remote_of
from ray_ckpt.tiers.housekeeping import Findings, ReadBack, Round, keep_house
from ray_ckpt.tiers.pins import Pin
from ray_ckpt.tiers.remote import RemoteTier
from ray_ckpt.tiers.remote_house import RemoteRound, keep_remote_house
from ray_ckpt.tiers.remote_records import push_records
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker.journal import JOURNAL_NAME, last_generation
from ray_ckpt.tracker.rollback import Place
from ray_ckpt.tracker.shelf import incomplete


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What one round of housekeeping is to go by.

    Attributes:
        rules: which checkpoints are kept.
        generation: present attempt.
        verified: names of the checkpoints whose bytes were read and compared.
        in_use: name to what it is used for, in words.
        may_read: whether a checkpoint may be read back.
        gate: ends the round when it is shut.
        passed: why a checkpoint, although it is whole, is never restored; None when it may be.
    """

    rules: Rules
    generation: int
    verified: AbstractSet[str]
    in_use: Mapping[str, str]
    may_read: bool
    gate: Gate
    passed: Callable[[Place], str | None]


class House(Protocol):
    """Where checkpoints are that survive the loss of the cluster."""

    def entries(self) -> list[Listed]:
        """All checkpoints there, newest first; raises ``StorageError`` when they cannot be listed."""
        ...

    def seal(self, manifest: Manifest) -> str | None:
        """Commits a checkpoint whose files are all there; why not, in words, if it cannot."""
        ...

    def quarantine(self, name: str, reason: str, **note: Any) -> None:
        """Marks a checkpoint as bad for good; the first reason stays.

        Raises:
            ManifestError: its folder is a link.
            StorageError: storage failed.
        """
        ...

    def pin(self, name: str, reason: str, *, author: str, time_s: float) -> bool:
        """Pins a checkpoint; whether that is new."""
        ...

    def unpin(self, name: str, reason: str | None) -> tuple[Pin, ...]:
        """Takes pins away."""
        ...

    def keep(self, terms: Terms, *, now_s: float) -> Findings:
        """One round of housekeeping; takes long, and runs aside."""
        ...

    def read_back(self, name: str) -> list[Fault]:
        """Reads every byte of a checkpoint and compares it; takes long, and runs aside."""
        ...

    def push_records(self) -> None:
        """Copies what the run has on record there, if it is elsewhere; takes long, and runs aside."""
        ...


class FolderHouse:
    """The run's own folder.

    Args:
        run_dir: it.
        read: how a checkpoint is read back.
    """

    def __init__(self, run_dir: Path, read: ReadBack) -> None:
        self._dir, self._read = run_dir, read

    def entries(self) -> list[Listed]:
        return [*list_checkpoints(self._dir)]

    def seal(self, manifest: Manifest) -> str | None:
        folder = self._folder(manifest.name)
        try:
            problem = incomplete(folder, [asdict(entry) for entry in manifest.files])
            if problem is None:
                write_manifest(folder, manifest)
            return problem
        except (RayCkptError, OSError) as error:
            return str(error)

    def quarantine(self, name: str, reason: str, **note: Any) -> None:
        folder = self._folder(name)
        if note.get("by") == GUARD:
            folder.mkdir(parents=True, exist_ok=True)  # its files may be on their way there
        write_quarantine(folder, reason, **note)

    def pin(self, name: str, reason: str, *, author: str, time_s: float) -> bool:
        return pins.pin(self._folder(name), reason, author=author, time_s=time_s)

    def unpin(self, name: str, reason: str | None) -> tuple[Pin, ...]:
        return pins.unpin(self._folder(name), reason)

    def keep(self, terms: Terms, *, now_s: float) -> Findings:
        task = Round(
            run_dir=self._dir,
            rules=terms.rules,
            generation=terms.generation,
            newest_generation=lambda: last_generation(self._dir / JOURNAL_NAME),
            present_generation=terms.generation,
            verified=terms.verified,
            in_use=terms.in_use,
            read_back=self._read if terms.may_read else None,
            gate=terms.gate,
            passed=terms.passed,
        )
        return keep_house(task, now_s=now_s)

    def read_back(self, name: str) -> list[Fault]:
        return self._read(self._folder(name))

    def push_records(self) -> None:
        pass  # they are there

    def _folder(self, name: str) -> Path:
        return self._dir / CHECKPOINTS_DIR / _checked(name)


class RemoteHouse:
    """An object store.

    Args:
        tier: the run's checkpoints there.
        run_dir: the run's folder, with its records.
    """

    def __init__(self, tier: RemoteTier, run_dir: Path) -> None:
        self._tier, self._dir = tier, run_dir

    def entries(self) -> list[Listed]:
        return [*self._tier.entries()]

    def seal(self, manifest: Manifest) -> str | None:
        try:
            self._tier.seal(manifest.name, manifest)
        except RayCkptError as error:
            return str(error)
        return None

    def quarantine(self, name: str, reason: str, **note: Any) -> None:
        self._tier.quarantine(_checked(name), reason, **note)

    def pin(self, name: str, reason: str, *, author: str, time_s: float) -> bool:
        return remote_pins.pin(self._tier, _checked(name), reason, author=author, time_s=time_s)

    def unpin(self, name: str, reason: str | None) -> tuple[Pin, ...]:
        return remote_pins.unpin(self._tier, _checked(name), reason)

    def keep(self, terms: Terms, *, now_s: float) -> Findings:
        task = RemoteRound(
            tier=self._tier,
            rules=terms.rules,
            generation=terms.generation,
            newest_generation=lambda: last_generation(self._dir / JOURNAL_NAME),
            present_generation=terms.generation,
            verified=terms.verified,
            in_use=terms.in_use,
            read_back=self._tier.verify if terms.may_read else None,
            gate=terms.gate,
            passed=terms.passed,
        )
        return keep_remote_house(task, now_s=now_s)

    def read_back(self, name: str) -> list[Fault]:
        return self._tier.verify(_checked(name))

    def push_records(self) -> None:
        push_records(self._tier, self._dir)


def house_of(stack: Stack, run_dir: Path, read: ReadBack) -> House:
    """The durable tier of a run.

    Args:
        stack: the tiers.
        run_dir: the run's folder.
        read: how a checkpoint in a folder is read back.
    """
    remote = remote_of(stack, run_dir)
    return FolderHouse(run_dir, read) if remote is None else RemoteHouse(remote, run_dir)


def _checked(name: str) -> str:
    if parse_checkpoint_name(name) is None:  # it becomes a path
        raise ConfigError(f"{name!r} is no checkpoint: their names are like step-00001200-g3")
    return name
