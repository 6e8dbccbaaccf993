"""Talks to the tracker beside rank 0's training thread: no step waits for it, and none pays for it.

It sends the lines of the steps in bundles, and keeps what rank 0 goes by fresh also while a step takes long: a drain
does not wait for two more steps to be heard of.
"""

from __future__ import annotations

import logging
import threading
import weakref

from ray.exceptions import RayError

from ray_ckpt.errors import RayCkptError
from ray_ckpt.tracker.records import BUNDLE_S
from ray_ckpt.tracker.steward import Steward

logger = logging.getLogger(__name__)

# Without lines to send. An answer is looked at BUNDLE_S after: see ORDER_S of ray_ckpt.policy.departure.
FRESH_S = 0.5


class Listener:
    """Asks the tracker, in a thread that ends with the steward or when it is told to.

    Args:
        steward: rank 0's.
    """

    def __init__(self, steward: Steward) -> None:
        self._end = threading.Event()
        threading.Thread(
            target=_listen, args=(weakref.ref(steward), self._end), name="listener", daemon=True
        ).start()

    def close(self) -> None:
        """Ends it."""
        self._end.set()


def _listen(steward: weakref.ref[Steward], end: threading.Event) -> None:
    while not end.wait(BUNDLE_S):
        present = steward()
        if present is None:
            return
        try:
            if not present.refresh(FRESH_S):
                return
        except (RayCkptError, RayError) as error:
            # The next step's end asks again, and there it counts.
            logger.debug("the tracker did not answer: %s", error)
        del present  # or it would live as long as this thread waits
