"""Whether the workers of a group live, asked beside something that waits for them.

A group that is about to be resized is asked for a save first. When a worker dies just then, nobody tells: the
controller, which would hear of it, is the one that waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ray_ckpt.elastic.causes import sign_of_life

ASK_S = 1.0  # least time between two questions to a worker


class Pulse:
    """Of one worker group.

    Args:
        workers: Ray Train's ``Worker`` objects, by rank.
        clock: in seconds.
    """

    def __init__(self, workers: Sequence[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._workers, self._clock = workers, clock
        self._idle = list(range(len(workers)))  # ranks that are not asked just now
        self._refs: dict[Any, int] = {}
        self._looked_s = clock()

    def dead(self) -> dict[int, Exception]:
        """Errors of the workers that are known to be dead by now, by rank; waits for nobody."""
        now_s = self._clock()
        if now_s - self._looked_s < ASK_S:
            return {}
        self._looked_s = now_s
        self._refs |= {self._workers[rank].execute_async(sign_of_life): rank for rank in self._idle}
        if not self._refs:
            return {}
        ready, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0)
        self._idle = []
        found: dict[int, Exception] = {}
        for ref in ready:
            rank = self._refs.pop(ref)
            try:
                ray.get(ref)
            except RayActorError as error:
                found[rank] = error
            except RayError:
                pass  # it answered, if only that something else is wrong: its own error will come
            else:
                self._idle.append(rank)
        return found
