"""When a worker group was wished for, asked for and up: what the goodput ledger needs to split a restart.

Ray tells these moments to the controller's callbacks, one by one; the tracker is told once, when the group is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# States of Ray Train's controller in which it has no group and looks for room for one (Ray 2.60).
WITHOUT_GROUP = frozenset({"InitializingState", "RestartingState", "ReschedulingState"})


class StartMarks:
    """Moments on the way to one worker group, by a steady clock.

    Args:
        monotonic: seconds of that clock.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._wished: float | None = None
        self._asked: float | None = None
        self._workers: float | None = None

    def no_room(self) -> None:
        """The cluster has no room for a group just now."""
        if self._wished is None:
            self._wished = self._monotonic()

    def ask(self) -> None:
        """A group is asked for."""
        self._asked, self._workers = self._monotonic(), None
        if self._wished is None:
            self._wished = self._asked

    def workers_up(self) -> None:
        """The processes of the workers are there."""
        self._workers = self._monotonic()

    def group_up(self) -> dict[str, float]:
        """The group is up: what the tracker is told of the way, seconds; and begins anew."""
        now = self._monotonic()
        asked = now if self._asked is None else self._asked
        wished = asked if self._wished is None else self._wished
        workers = now if self._workers is None else self._workers
        self._wished = self._asked = self._workers = None
        return {
            "asked_ago_s": now - asked,
            "workers_ago_s": now - workers,
            "waited_s": asked - wished,
        }
