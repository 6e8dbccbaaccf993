"""Names in a run's folder of checkpoints: those of the checkpoints, and of the package's own records beside them."""

from __future__ import annotations

import re

from ray_ckpt.checkpoint.paths import folded

MANIFEST_NAME = "COMMITTED.json"
QUARANTINE_NAME = "QUARANTINED.json"
PINS_NAME = "PINNED.json"
DRILLS_NAME = "DRILLED.json"
# What the package itself writes beside the files of a checkpoint: never one of them, never a stray.
RECORD_NAMES = (MANIFEST_NAME, QUARANTINE_NAME, PINS_NAME, DRILLS_NAME)
CHECKPOINTS_DIR = "checkpoints"
LINKED = "the checkpoint's folder is a link; copy the checkpoint instead"

_NAME = re.compile(r"step-([0-9]{8,})-g([0-9]+)")
# Names that differ in case alone are one file on some file systems.
_FOLDED_RECORDS = frozenset(folded(name) for name in RECORD_NAMES)


def is_record(path: str) -> bool:
    """Whether a path in a checkpoint is, on some file system, that of one of the package's own records."""
    return folded(path) in _FOLDED_RECORDS


def checkpoint_name(step: int, generation: int) -> str:
    """Folder name of a checkpoint; names of one run sort by step."""
    return f"step-{step:08d}-g{generation}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """(step, generation) of a checkpoint folder's name, None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match[1]), int(match[2])
    # "step-000000012-g03" would be a second spelling of one checkpoint.
    return (step, generation) if checkpoint_name(step, generation) == name else None
