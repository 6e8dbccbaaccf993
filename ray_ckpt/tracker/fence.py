"""Who may change a run: the workers of its newest attempt, by the one tracker that drives it.

Every call of a worker carries its generation. A call of an older generation is refused: a worker that was
cut off and comes back cannot log a step, commit, or move anything.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ray_ckpt.errors import StaleGenerationError, StorageError
from ray_ckpt.tracker.journal import LineQueue, last_generation
from ray_ckpt.tracker.memory import RunMemory

logger = logging.getLogger(__name__)


class Fence:
    """Refuses what comes from attempts that are over, and all when another tracker has taken over.

    Args:
        run: its name.
        path: of its journal.
        journal: the same, as this tracker writes it.
        memory: of the run.
    """

    def __init__(self, *, run: str, path: Path, journal: LineQueue, memory: RunMemory) -> None:
        self._run, self._path, self._journal, self._memory = run, path, journal, memory
        self.replaced = False  # whether :meth:`stands` has found another tracker

    def check(self, generation: int) -> None:
        """Lets a call of the present attempt pass.

        Raises:
            StaleGenerationError: it is of another one, or another tracker has begun an attempt.
        """
        now = self._memory.generation
        if generation == now > 0:
            self.check_alone()
            return
        known = f"attempt {now} has taken its place" if now else "no attempt has begun yet"
        raise StaleGenerationError(
            f"this worker belongs to attempt {generation} of run {self._run!r}, which is over: "
            f"{known}. Nothing was changed."
        )

    def check_alone(self) -> None:
        """Refuses to go on beside another tracker.

        There is none while the lock on the run holds; but one that was frozen for long can lose it, where storage
        gives locks for a time only, and must find out before it changes anything.

        Raises:
            StaleGenerationError: another tracker has begun an attempt meanwhile.
        """
        if not self._journal.grew:
            return  # the usual case, and cheap: this is asked with every call
        try:
            newest = last_generation(self._path)
        except StorageError:
            logger.exception("whether another tracker has taken over cannot be told now")
            return
        if newest > self._memory.generation:
            raise StaleGenerationError(
                f"another tracker has taken over run {self._run!r} and begun attempt {newest}; this one knows of "
                f"attempt {self._memory.generation} at most. Nothing was changed. Stop this job; the other one goes on."
            )

    def stands(self) -> bool:
        """Whether this tracker may act by itself, for no caller; says once in the log when not."""
        try:
            self.check_alone()
        except StaleGenerationError as error:
            if not self.replaced:
                logger.error("%s", error)
            self.replaced = True  # nobody calls who is told: what comes from here must not either
            return False
        return True

    def problem(self) -> str:
        """Why a commit aside must not be made, in words, or nothing; whoever asks may have been frozen meanwhile."""
        try:
            newest = last_generation(self._path)
        except StorageError as error:
            return str(error)
        if newest > self._memory.generation:
            return f"attempt {newest} of another tracker has begun"
        return ""
