"""What a run's journal tells whoever is not its tracker: the command line, and a start that has not begun."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ray_ckpt.tracker.buckets import Ledger
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME, read_lines
from ray_ckpt.tracker.ledger import make_ledger
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


def read_ledger(run_dir: Path) -> Ledger | None:
    """Where the wall time of a run went; None for one that has not begun.

    Raises:
        StorageError: its journal or its step lines cannot be read.
    """
    return make_ledger(read_lines(run_dir / JOURNAL_NAME), read_lines(run_dir / STEPS_NAME))
