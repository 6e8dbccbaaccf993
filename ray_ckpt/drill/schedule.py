"""Drills beside a run that lives: each new checkpoint that is the newest when its turn comes, until the run is done."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray_ckpt.config import Config
from ray_ckpt.drill import DrillResult, drill, newest
from ray_ckpt.errors import RestoreError, StorageError
from ray_ckpt.tracker.recall import recall

C = TypeVar("C", bound=Config)

Tell = Callable[[DrillResult], None]


def drill_every(
    config: C,
    train: Callable[[C], Any],
    every_s: float,
    tell: Tell,
    *,
    device: str = "cpu",
    tolerance: float | None = None,
    wait: Callable[[float], object] = time.sleep,
) -> bool:
    """Drills the newest checkpoint every so many seconds, if it was not drilled yet; ends when the run is finished.

    A drill that fails is told and does not end the schedule. Nor does storage that fails: it is tried again.

    Args:
        config: resolved options of the run.
        train: its training function.
        every_s: from the beginning of one look to that of the next.
        tell: called with each outcome.
        device: as in :func:`ray_ckpt.drill.drill`.
        tolerance: likewise.
        wait: for so many seconds.

    Returns:
        Whether all went well.
    """
    good = True
    while True:
        started = time.monotonic()
        # Asked before the look: a checkpoint that was committed meanwhile is found by it.
        finished = recall(config.run_dir).finished_step is not None
        try:
            if newest(config.run_dir) is not None:
                result = drill(config, train, again=False, device=device, tolerance=tolerance)
                if result is not None:
                    good &= result.drilled.ok
                    tell(result)
                elif finished:
                    return good
        except (RestoreError, StorageError) as error:
            good = False
            print(f"drill: {error}", file=sys.stderr, flush=True)
        wait(max(0.0, started + every_s - time.monotonic()))


def end_in_order() -> None:
    """Makes SIGTERM end a drill as Ctrl-C does, so that it takes its pin along."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
