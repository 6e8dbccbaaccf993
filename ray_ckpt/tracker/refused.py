"""Checkpoints that the guard refused: kept to be looked at, a few of them, and never restored."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.guard import reason
from ray_ckpt.checkpoint.manifest import (
    GUARD,
    NO_MANIFEST,
    CheckpointEntry,
    list_checkpoints,
    read_quarantine_note,
    write_quarantine,
)
from ray_ckpt.errors import StorageError, UnsaneStateError

logger = logging.getLogger(__name__)


def refuse(findings: Sequence[dict[str, Any]], report: Mapping[str, Any]) -> None:
    """Raises what is wrong with a state, when something is.

    Raises:
        UnsaneStateError: the state must not be committed.
    """
    if findings:
        more = int(report.get("more_findings", 0))
        raise UnsaneStateError(reason(findings, more), list(findings))


def set_aside(
    folder: Path, error: UnsaneStateError, facts: Mapping[str, Any], *, time_s: float, keep: int
) -> None:
    """Labels a refused checkpoint with its finding, and removes the oldest of those that are too many."""
    try:
        write_quarantine(
            folder,
            error.reason,
            time_s=time_s,
            findings=error.findings,
            by=GUARD,
            facts=facts,
        )
        for entry in surplus(list_checkpoints(folder.parent.parent), keep):
            shutil.rmtree(entry.folder, ignore_errors=True)
    except StorageError:
        # Without a manifest it is no checkpoint, with or without the note.
        logger.exception("%s: what the guard found could not be noted", folder)


def surplus(entries: Sequence[CheckpointEntry], keep: int) -> list[CheckpointEntry]:
    """Refused checkpoints beyond the newest ``keep``; nothing that was ever committed is among them."""
    refused = [entry for entry in entries if is_refused(entry)]
    return sorted(refused, key=lambda e: (e.generation, e.step), reverse=True)[keep:]


def is_refused(entry: CheckpointEntry) -> bool:
    """Whether the guard refused a checkpoint."""
    if entry.quarantined is None or entry.fault != NO_MANIFEST or entry.unreadable:
        return False
    note = read_quarantine_note(entry.folder)
    return note is not None and note.get("by") == GUARD
