"""A limit on bytes per second, shared by whoever copies on a node: training needs the same network and disks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """Lets bytes pass at a rate; threads that share one share the rate.

    Args:
        bytes_per_s: the rate; 0 is no limit.
        clock: monotonic seconds.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the bytes that passed so far have been paid for

    def spend(self, count: int) -> None:
        """Waits until ``count`` bytes may pass; call it once for each chunk, of a few MiB at most."""
        if self._rate <= 0:
            return
        with self._lock:
            start = max(self._clock(), self._free_at)
            self._free_at = start + count / self._rate
            wait_s = start - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
