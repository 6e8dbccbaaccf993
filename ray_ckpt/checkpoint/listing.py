"""A cheap look at all checkpoints of a run: one small file each, none of their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ray_ckpt.checkpoint.manifest import Manifest, read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, LINKED, parse_checkpoint_name
from ray_ckpt.checkpoint.quarantine import read_quarantine
from ray_ckpt.checkpoint.storing import retry
from ray_ckpt.errors import ManifestError, SignatureError, StorageError

NO_MANIFEST = "no manifest"

AnyListed = TypeVar("AnyListed", bound="Listed")


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint as a cheap listing sees it, wherever it lies; its bytes have not been read.

    Attributes:
        folder: where it is; has a ``name``.
        step: from the folder's name.
        generation: from the folder's name.
        manifest: None when there is none or it cannot be used.
        fault: None when committed; "no manifest" when never committed; else what is wrong.
        quarantined: the reason, when the checkpoint was found bad and must not be used.
        unreadable: storage failed while looking. The checkpoint may be perfectly good: it is not
            usable now, but nothing may be quarantined or deleted on such a fault.
        mistrusted: its manifest is whole, and not signed with a key in use. Counts as unreadable too: the
            key may be the wrong one.
    """

    folder: Any
    step: int
    generation: int
    manifest: Manifest | None
    fault: str | None
    quarantined: str | None = None
    unreadable: bool = False
    mistrusted: bool = False

    @property
    def usable(self) -> bool:
        """Committed and not quarantined."""
        return self.manifest is not None and self.quarantined is None

    @property
    def committed(self) -> bool:
        """A manifest is there, good or damaged: somebody once promised this checkpoint."""
        return self.fault != NO_MANIFEST


@dataclass(frozen=True, slots=True)
class CheckpointEntry(Listed):
    """One checkpoint folder."""

    folder: Path


def list_checkpoints(run_dir: Path) -> list[CheckpointEntry]:
    """All checkpoint folders of a run, newest first (by step, then generation).

    Cheap: reads one small file per checkpoint. A run without checkpoints gives an empty list.
    Callers that find nothing `usable` must look at `committed` before they start from zero: a
    damaged or unreadable manifest is not an absence.

    Raises:
        StorageError: the folder of checkpoints cannot be listed.
    """
    root = run_dir / CHECKPOINTS_DIR
    names = retry(f"cannot list {root}", lambda: [item.name for item in root.iterdir()])
    found = []
    for name in names or ():
        key = parse_checkpoint_name(name)
        if key is not None and (entry := look_at(root / name, *key)) is not None:
            found.append(entry)
    return sorted(found, key=lambda e: (e.step, e.generation), reverse=True)


def usable(entries: list[AnyListed]) -> list[AnyListed]:
    """Those that may be offered for a restore (after `verify_files`), in the same order."""
    return [entry for entry in entries if entry.usable]


def look_at(folder: Path, step: int, generation: int) -> CheckpointEntry | None:
    """One line of the listing; None when the folder was deleted meanwhile or is not a folder."""
    manifest, fault, quarantined, unreadable, mistrusted = None, None, None, False, False
    if folder.is_symlink():
        # Whatever is done to it would be done elsewhere: neither read, nor quarantined, nor deleted.
        return CheckpointEntry(folder, step, generation, None, LINKED, unreadable=True)
    try:
        quarantined = read_quarantine(folder)
        manifest = read_manifest(folder)
    except SignatureError as error:
        fault, unreadable, mistrusted = error.fault, True, True
    except ManifestError as error:
        if not folder.is_dir():
            return None
        fault = NO_MANIFEST if error.fault == "missing" else error.fault
    except StorageError as error:
        fault, unreadable = f"unreadable: {error}", True
    return CheckpointEntry(
        folder, step, generation, manifest, fault, quarantined, unreadable, mistrusted
    )
