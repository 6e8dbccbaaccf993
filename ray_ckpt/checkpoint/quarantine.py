"""The note that a checkpoint must not be used, and why: ``QUARANTINED.json`` in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.names import LINKED, QUARANTINE_NAME
from ray_ckpt.checkpoint.storing import read_bytes, without_nonfinite, write_atomically
from ray_ckpt.errors import ManifestError

GUARD = "guard"
"""Who found a checkpoint bad that was therefore never committed."""

_DAMAGED = f"{QUARANTINE_NAME} is there but damaged"


def write_quarantine(
    folder: Path,
    reason: str,
    *,
    time_s: float,
    findings: list[dict[str, Any]] | None = None,
    by: str = "",
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Marks a checkpoint as bad for good; the first reason stays.

    Args:
        folder: the checkpoint.
        reason: one sentence.
        time_s: now, seconds since the epoch.
        findings: details, such as `[{"path": ..., "fault": ...}]`.
        by: who found it; `GUARD` for a checkpoint that was therefore never committed.
        facts: what else the note says.

    Raises:
        ManifestError: the folder is a link, and the mark would be somewhere else.
        StorageError: the disk refused; the checkpoint is still offered.
    """
    path = folder / QUARANTINE_NAME
    if folder.is_symlink():
        raise ManifestError(path, LINKED)
    if read_quarantine_note(folder) is not None:
        return
    data = encode_note(reason, time_s=time_s, findings=findings, by=by, facts=facts)
    write_atomically(path, data)


def encode_note(
    reason: str,
    *,
    time_s: float,
    findings: list[dict[str, Any]] | None = None,
    by: str = "",
    facts: Mapping[str, Any] | None = None,
) -> bytes:
    """The bytes of a note; arguments as for :func:`write_quarantine`."""
    note = {"time": time_s, "reason": reason, "findings": findings or [], **(facts or {})}
    if by:
        note["by"] = by
    return json.dumps(without_nonfinite(note), indent=1).encode() + b"\n"


def decode_note(data: bytes) -> dict[str, Any]:
    """What a note says, `reason` at least: a damaged one does not bring the checkpoint back."""
    try:
        note = json.loads(data)
        return {**note, "reason": str(note["reason"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"reason": _DAMAGED}


def read_quarantine(folder: Path) -> str | None:
    """Why a checkpoint is quarantined, None when it is not.

    Raises:
        StorageError: storage failed; whether it is quarantined is not known.
    """
    note = read_quarantine_note(folder)
    return None if note is None else str(note["reason"])


def read_quarantine_note(folder: Path) -> dict[str, Any] | None:
    """All that a quarantine says, `reason` at least; None when there is none.

    Raises:
        StorageError: storage failed; whether it is quarantined is not known.
    """
    try:
        data = read_bytes(folder / QUARANTINE_NAME)
    except ManifestError:
        return {"reason": _DAMAGED}  # somebody wanted this checkpoint out of use
    return None if data is None else decode_note(data)
