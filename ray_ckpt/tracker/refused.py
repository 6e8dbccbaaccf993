"""Checkpoints that the guard refused: kept to be looked at, and never restored."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.guard import reason
from ray_ckpt.checkpoint.quarantine import GUARD, write_quarantine
from ray_ckpt.errors import ManifestError, StorageError, UnsaneStateError

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
    folder: Path, error: UnsaneStateError, facts: Mapping[str, Any], *, time_s: float
) -> None:
    """Labels a refused checkpoint with its finding."""
    try:
        write_quarantine(
            folder, error.reason, time_s=time_s, findings=error.findings, by=GUARD, facts=facts
        )
    except (ManifestError, StorageError):
        # Without a manifest it is no checkpoint, with or without the note.
        logger.exception("%s: what the guard found could not be noted", folder)
