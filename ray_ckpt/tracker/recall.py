"""What a run's journal tells whoever is not its tracker: the command line, and a start that has not begun."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines
from ray_ckpt.tracker.memory import RunMemory


def recall(run_dir: Path) -> RunMemory:
    """What a run remembers; events that say less than they should are passed over.

    Raises:
        StorageError: the journal cannot be read.
    """
    memory = RunMemory()
    for event in read_lines(run_dir / JOURNAL_NAME):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            memory.apply(event)
    return memory
