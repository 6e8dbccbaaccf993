"""What happens to a run, on record: each event goes into the journal, then into memory, then to who looks on."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_ckpt.clocks import Instant, boot_name
from ray_ckpt.errors import StorageError
from ray_ckpt.tracker.fence import Fence
from ray_ckpt.tracker.journal import (
    JOURNAL_NAME,
    JsonLines,
    LineQueue,
    NotSyncedError,
    read_lines,
)
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.records import RunFacts

logger = logging.getLogger(__name__)


class Recorder:
    """Puts the events of one run on record; begins with what its journal tells.

    Args:
        facts: what stays the same for the run.
        clock: seconds since the epoch.
        monotonic: seconds of a clock that nobody sets.
        on_event: told every event after it is in the journal.

    Attributes:
        memory: what the journal adds up to.
        fence: who may still put something on record.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._clock, self._monotonic, self._on_event = clock, monotonic, on_event
        path = Path(facts.run_dir) / JOURNAL_NAME
        self.memory = RunMemory()
        self._events_read = 0
        for event in read_lines(path):
            self.memory.apply(event)
            self._events_read += 1
        self._journal = LineQueue(JsonLines(path, sync=True))
        self.fence = Fence(run=facts.run, path=path, journal=self._journal, memory=self.memory)

    def __call__(self, event: str, *, must: bool = False, **fields: Any) -> None:
        """Writes an event to the journal and takes it into memory.

        A full disk must not stop training, nor undo a commit that is in place: a line that cannot be
        written waits for the next one, unless it ``must`` be on record before it counts.
        """
        self.fence.check_alone()  # a late line would be the newest of its kind to whoever reads them again
        generation = fields.pop("generation", self.memory.generation)
        stamp = {"time": self._clock(), "monotonic": self._monotonic()}
        line = {**stamp, "generation": generation, "event": event, **fields}
        self._journal.add(line)
        problem: StorageError | None = None
        try:
            self._journal.flush()
        except NotSyncedError as error:
            problem = error
            logger.exception("the journal may not outlive a power cut")
        except StorageError as error:
            problem = error
            if must:
                self._journal.take_back()
                raise
            logger.exception("the journal lags behind by %d lines", len(self._journal))
        self.memory.apply(line)
        try:
            self._on_event(line)
        except Exception:
            # Whoever looks on must not undo what is on record.
            logger.exception("the event %r could not be told", event)
        if must and problem is not None:
            raise problem

    def announce(self, submitted: Instant | None) -> None:
        """Notes that a tracker took up the run (see :meth:`ray_ckpt.tracker.core.TrackerCore.announce`)."""
        here = Instant(time=self._clock(), monotonic=self._monotonic(), boot=boot_name())
        self(
            "tracker_started",
            host=platform.node(),
            pid=os.getpid(),
            events_read=self._events_read,
            boot=here.boot,
            submitted_ago_s=(submitted or here).age_s(here),
        )
