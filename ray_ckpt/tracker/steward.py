"""Rank 0's end of the line to the tracker: sends what happened, holds the present directive.

Nothing here waits for the tracker within a step, and what is said to it in passing is said by a thread beside the
training one (:mod:`ray_ckpt.tracker.listener`): a step leaves its line, and looks at what is known. Lines are sent in
bundles, and always before a save. On ranks other than 0 a steward knows nothing and wants nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from ray_ckpt.errors import RayCkptError, StaleGenerationError
from ray_ckpt.policy.decision import steps_to_next
from ray_ckpt.tracker.client import TrackerClient
from ray_ckpt.tracker.records import Attempt, Directive, Leave

logger = logging.getLogger(__name__)


class Steward:
    """Talks to the tracker for one attempt.

    Args:
        tracker: None on ranks other than 0.
        attempt: what the tracker said when the attempt began.
        start_step: step the attempt begins at.
        total_steps: last step of the run.
    """

    def __init__(
        self, *, tracker: TrackerClient | None, attempt: Attempt, start_step: int, total_steps: int
    ) -> None:
        self._tracker = tracker
        self.generation = attempt.generation
        self._directive: Directive = attempt.directive
        self._answered_request = self._heard_request = attempt.directive.save_request
        self._heard_hold_s = 0.0
        self._last_save, self._total = start_step, total_steps
        # Storage that would not take the last saves of the attempt before may still not.
        self._failures = attempt.directive.failed_in_a_row
        self._pending: deque[dict[str, Any]] = deque()  # one thread adds to it while another takes
        self._ticket: Any = None
        self._sent = time.monotonic()
        self._stale: StaleGenerationError | None = None
        self._unheard = False  # something was met beside the training thread
        self._asked = False  # the training thread has asked, at a save, and looks for the answer
        # Of those who talk: the training thread at saves, and the one beside it.
        self._lock = threading.Lock()
        self.last_record: dict[str, Any] = {}
        self.committed_step: int | None = None
        self.problem: str = "nothing was saved"
        self.refused_step: int | None = None
        self.trouble: tuple[int, str] | None = None  # a saved step that is not finite, and why

    @property
    def asked(self) -> bool:
        """Whether somebody asked for a save that has not begun."""
        return self._directive.save_request > self._answered_request

    @property
    def answered(self) -> int:
        """Number of the newest request that a save has begun for."""
        return self._answered_request

    @property
    def holds(self) -> bool:
        """Whether whoever asked wants the workers to stand still after the save; asked after :meth:`wants_save`."""
        return self._heard_hold_s > 0

    @property
    def leave(self) -> Leave | None:
        """Why the attempt is to end, as far as the tracker has told."""
        return self._directive.leave

    @property
    def failures(self) -> int:
        """Saves that failed since the last commit."""
        return self._failures

    @property
    def durable_step(self) -> int | None:
        """Step of the newest checkpoint in the durable tier, as far as the tracker has told."""
        return self._directive.durable_step

    def is_committed(self, step: int) -> bool:
        """Whether a step is committed; asks the tracker when the answer to a commit may have been lost."""
        if self._tracker is None or self.committed_step == step:
            return self.committed_step == step
        status = self._tracker.call("status")
        if (status["last_commit_step"], status["generation"]) == (step, self.generation):
            self.committed_step = step
        return self.committed_step == step

    def wants_save(self, step: int) -> bool:
        """Whether a save is due at the end of ``step``; False on ranks other than 0."""
        if self._tracker is None:
            return False
        # A request that comes after the ranks have agreed on this step is answered by a later save.
        self._heard_request = self._directive.save_request
        self._heard_hold_s = self._directive.hold_s if self.asked else 0.0
        if step >= self._total or self.asked:
            return True
        every = steps_to_next(self._directive.every_steps, self._failures)
        return step - self._last_save >= every

    def saving(self, step: int) -> float:
        """Notes that a save of ``step`` begins; returns how long to hold after it, seconds."""
        self._last_save = step
        self._answered_request = self._heard_request
        return self._heard_hold_s

    def executed(self, record: dict[str, Any]) -> None:
        """Takes the line of an executed step."""
        if self._tracker is not None:
            self._pending.append(record)
            self.last_record = record

    def exchange(self, *, flush: bool) -> None:
        """Sends waiting lines at once, and takes the tracker's last answer if it is there.

        Args:
            flush: False leaves both to the thread that does it in passing, and only says what that has met; after a
                flush it also looks for the answer, until that is there.

        Raises:
            StaleGenerationError: another attempt has taken this one's place: stop.
        """
        if self._tracker is None or not (flush or self._unheard or self._asked):
            return
        with self._lock:
            if self._stale is not None:
                raise self._stale
            send, self._unheard = flush or self._unheard, False
            self._take_answer()
            if send:
                self._send()
            self._asked = flush or (self._asked and self._ticket is not None)

    def refresh(self, age_s: float) -> bool:
        """Takes the tracker's last answer, and sends waiting lines; in a thread beside the training one.

        Args:
            age_s: with no lines the present directive is asked for when nothing was sent for so long, seconds.

        Returns:
            Whether the attempt goes on. That it does not is raised by the next :meth:`exchange`, as is what the
            tracker could not be told: there it counts.
        """
        if self._tracker is None:
            return False
        with self._lock:
            try:
                self._take_answer()
                old = time.monotonic() - self._sent >= age_s
                if self._ticket is None and (self._pending or old):
                    self._send()
            except StaleGenerationError as error:
                self._stale, self._unheard = error, True
            except Exception:
                self._unheard = True
                raise
        return self._stale is None

    def _take_answer(self) -> None:
        if self._ticket is None:
            return
        assert self._tracker is not None
        try:
            done, answer = self._tracker.poll(self._ticket)
        except StaleGenerationError:
            raise
        except RayCkptError as error:
            logger.warning("the tracker did not take the last steps: %s", error)
            done, answer = True, None
        if done:
            self._ticket = None
            self._directive = answer or self._directive

    def _send(self) -> None:
        assert self._tracker is not None
        records = [self._pending[k] for k in range(len(self._pending))]
        # An empty bundle asks for the present directive.
        self._ticket = self._tracker.post("steps", generation=self.generation, records=records)
        for _ in records:
            self._pending.popleft()  # only now: lines that could not be sent are sent with the next ones
        self._sent = time.monotonic()

    def _is_refused(self, step: int) -> bool:
        """Whether the guard refused a save; then the run may have to end."""
        assert self._tracker is not None
        refusal = self._tracker.call("refusal", generation=self.generation, step=step)
        if refusal is None:
            return False
        self.refused_step, self.problem = step, refusal["reason"]
        if refusal["nonfinite"] and self.trouble is None:
            self.trouble = step, refusal["reason"]
        return True

    def commit(self, save: dict[str, Any]) -> bool:
        """Asks for a commit; called in the background thread of a save, on rank 0.

        A commit that is refused or fails is told and tried again with the next save; it never stops training.
        """
        assert self._tracker is not None
        try:
            committed = bool(self._tracker.call("commit", generation=self.generation, save=save))
            if not committed and not save["error"] and self._is_refused(int(save["step"])):
                return False  # storage did its part, and there is nothing to try again
            problem = save["error"] or "the tracker refused the commit, its log says why"
        except Exception as error:
            committed, problem = False, str(error)
            logger.exception("commit of step %s failed", save["step"])
        if committed:
            self._failures = 0
            self.committed_step = int(save["step"])
        else:
            self._failures += 1
            self.problem = problem
        return committed
