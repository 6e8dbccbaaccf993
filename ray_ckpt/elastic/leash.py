"""A worker that was cut off finds out that the run has gone on without it, and ends.

Whatever it does reaches nothing: each call carries its attempt's number, and the tracker refuses those of attempts that
are over. But it holds a GPU, and reads data. At the end of a step it is told; one that sits in a collective, or in its
own code, comes to no end of a step. So a thread asks, when none has ended for long, and ends the process.

How long it may live on: the time of ``--elastic.leash-s``, and an answer of the tracker. A process that is stopped asks
as soon as it goes on. What this cannot end is code that does not let go of Python's lock, and a worker that does not
reach the tracker.

Of the workers of a node one asks, in time for the others to hear of it (:mod:`ray_ckpt.elastic.word`): the last ones
whose turn it is ask only when the first did not.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from ray.exceptions import RayError

from ray_ckpt.elastic.whereabouts import HERE
from ray_ckpt.elastic.word import Word
from ray_ckpt.errors import RayCkptError, StaleGenerationError

logger = logging.getLogger(__name__)

FIRST_ASKS = (
    0.75  # of the time within which a worker must have asked or heard, the first of a node asks
)
EXIT_CODE = 70  # of a worker that ended because its attempt was over


def _end(reason: str) -> None:
    print(f"this worker ends: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)  # the training thread may be in a call that no exception reaches


class Leash:
    """Of one attempt, in one worker.

    Args:
        check: asks the tracker; raises ``StaleGenerationError`` when the attempt is over.
        quiet_s: asks when no step has ended for so long, and again after as long, seconds.
        word: what others on the node have heard; None for a worker that asks for itself.
        turn: with a word, when to ask: 0 for the first on the node, 1 for the last.
        step_since_s: when the present step began, by ``clock``.
        end: ends this process, for a reason.
        clock: seconds of a steady clock.
    """

    def __init__(
        self,
        check: Callable[[], object],
        quiet_s: float,
        *,
        word: Word | None = None,
        turn: float = 1.0,
        step_since_s: Callable[[], float] = lambda: HERE.now.step_since_s,
        end: Callable[[str], None] = _end,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check, self._word, self._step_since_s = check, word, step_since_s
        self._quiet_s = quiet_s * (FIRST_ASKS + (1 - FIRST_ASKS) * turn)
        self._end, self._clock = end, clock
        self._asked_s = clock()
        self._stop = threading.Event()

    def look(self) -> None:
        """Asks, when it is time to."""
        now_s = self._clock()
        if now_s - max(self._step_since_s(), self._asked_s) < self._quiet_s:
            return
        if self._word is not None:
            self._asked_s = max(self._asked_s, self._word.heard_s())
            if now_s - self._asked_s < self._quiet_s:
                return
        self._asked_s = now_s
        try:
            self._check()
            if self._word is not None:
                self._word.leave()
        except StaleGenerationError as error:
            self._end(str(error))
        except (RayCkptError, RayError) as error:
            logger.warning(
                "whether this attempt is still the present one cannot be told: %s", error
            )

    def start(self) -> None:
        """Begins to look."""
        threading.Thread(target=self._run, name="leash", daemon=True).start()

    def stop(self) -> None:
        """The attempt ends by itself."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(min(5.0, self._quiet_s / 4)):
            self.look()
