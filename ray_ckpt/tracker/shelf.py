"""The checkpoint folders of a run: which one is restored, when one is complete, what may be removed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ray_ckpt.checkpoint.listing import Listed, usable
from ray_ckpt.checkpoint.manifest import FileEntry, Manifest, read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME
from ray_ckpt.errors import ManifestError, RestoreError
from ray_ckpt.segment import FIRST, Segment
from ray_ckpt.skips import Skip
from ray_ckpt.tracker.records import RestorePlan, RunFacts

logger = logging.getLogger(__name__)


def restore_plan(
    entry: Listed, entries: Sequence[Listed], unreadable: Mapping[str, str]
) -> RestorePlan:
    """The plan that restores a usable checkpoint, and names what is newer and not used.

    Args:
        entry: the checkpoint.
        entries: all of them, newest first.
        unreadable: name and reason of those that storage would not give just now.
    """
    assert entry.manifest is not None
    this = (entry.step, entry.generation)
    newer = [e for e in entries if (e.step, e.generation) > this]
    reason = "newest committed checkpoint"
    if newer:
        more = f" and {len(newer) - 1} more" if len(newer) > 1 else ""
        reason += f"; newer {newer[0].folder.name}{more} not used: {why_not(newer[0], unreadable)}"
    return RestorePlan(name=entry.folder.name, manifest=entry.manifest, reason=reason)


def newest_usable(
    run: str,
    run_dir: Path,
    entries: Sequence[Listed],
    *,
    commits: int,
    passed: Mapping[str, str] = MappingProxyType({}),
) -> Listed | None:
    """The checkpoint to restore; None for a run that never had one.

    Args:
        run: name of the run.
        run_dir: its folder.
        entries: all its checkpoints, newest first.
        commits: how many were committed, as its journal says.
        passed: name and reason of those that are passed over.

    Raises:
        RestoreError: there are checkpoints, or there were, and none can be used.
    """
    good = [entry for entry in usable(list(entries)) if entry.folder.name not in passed]
    if good:
        return good[0]
    # The journal counts too: manifests that are all gone do not make a new run.
    if commits or any(entry.committed for entry in entries):
        reasons = [f"{e.folder.name}: {why_not(e, passed)}" for e in entries[:3]]
        raise RestoreError(
            f"run {run!r} has committed checkpoints, and none below {run_dir / CHECKPOINTS_DIR} can be used "
            f"({'; '.join(reasons) or 'the folder is empty'}). Such a run never starts from zero by itself: see "
            "`ray-ckpt ls`, bring a good copy back, or choose another --run name."
        )
    return None


def why_not(entry: Listed, passed: Mapping[str, str]) -> str:
    """Why a checkpoint is not used, in words."""
    return entry.quarantined or entry.fault or passed.get(entry.folder.name) or "older than another"


def manifest_in(folder: Path) -> Manifest | None:
    """The manifest of a committed checkpoint, None when there is none.

    Raises:
        ManifestError: there is one, and it is damaged.
        StorageError: whether there is one is not known.
    """
    try:
        return read_manifest(folder)
    except ManifestError as error:
        if error.fault == "missing":
            return None
        raise


def new_manifest(
    facts: RunFacts,
    generation: int,
    save: Mapping[str, Any],
    *,
    committed_at: float,
    segment: Segment = FIRST,
) -> Manifest:
    """The manifest of what a save reports (see :meth:`ray_ckpt.tracker.core.TrackerCore.commit`)."""
    return Manifest(
        run=facts.run,
        step=int(save["step"]),
        sample_offset=int(save["samples"]),
        tokens=int(save["tokens"]),
        world_size=int(save["world_size"]),
        generation=generation,
        committed_at=committed_at,
        files=tuple(FileEntry(**entry) for entry in save["files"]),
        parallel=facts.parallel,
        guard=save["guard"],
        metrics=save["metrics"],
        config_fingerprint=facts.config_fingerprint,
        data_fingerprint=facts.data_fingerprint,
        versions=facts.versions,
        bitwise_comparable=bool(save["bitwise_comparable"]),
        segment=segment.mark(),
        skipped=tuple(Skip(**skip) for skip in save.get("skipped", ())),
        validation=save.get("validation", {}),
    )


def incomplete(folder: Path, files: list[dict[str, Any]]) -> str | None:
    """Why a list of files is not all there; None when it is."""
    names = {entry["path"] for entry in files}
    if ".metadata" not in names:
        return "the metadata of the checkpoint was not written"
    for entry in files:
        try:
            size = (folder / entry["path"]).lstat().st_size
        except OSError as error:
            return f"{folder / entry['path']} is not there ({error.strerror})"
        if size != entry["bytes"]:
            return f"{folder / entry['path']} has {size} bytes, {entry['bytes']} were written"
    return None


def discard(folder: Path) -> None:
    """Removes what a failed save left; its space may be what the next try needs.

    A folder with a manifest is somebody's checkpoint, and so may be one that storage does not tell about:
    they stay.
    """
    try:
        (folder / MANIFEST_NAME).lstat()
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        logger.warning("%s is left in place: storage does not tell what it is (%s)", folder, error)
