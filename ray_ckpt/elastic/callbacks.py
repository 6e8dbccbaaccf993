"""What the Ray Train controller tells the tracker: why an attempt ended, and that a resize is near.

Two callbacks, because Ray tells worker errors to a ``UserCallback`` and decisions to a
``ControllerCallback`` (developer API, read in Ray 2.60). They share one object in the controller process.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.train import UserCallback

from ray_ckpt.errors import RayCkptError, StaleGenerationError
from ray_ckpt.ray_private import ControllerCallback
from ray_ckpt.tracker.client import RayTracker

logger = logging.getLogger(__name__)


class _Ending:
    """Why the present attempt is ending, as far as the controller has been told."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.kind, self.cause, self.fatal = "", "", ""

    def note(self, errors: dict[int, Exception]) -> None:
        """Takes the errors of workers; a dead node explains the errors of its peers."""
        kind, cause = classify(errors)
        if not self.kind or (kind == "node_loss" and self.kind != "node_loss"):
            self.kind, self.cause = kind, cause
        self.fatal = self.fatal or hopeless(errors)

    def take(self) -> tuple[str, str]:
        """Kind and cause; forgotten afterwards."""
        taken = (
            self.kind or "worker_error",
            self.cause or "the worker group did not start or failed",
        )
        self.kind, self.cause = "", ""
        return taken


class WorkerErrors(UserCallback):
    """Listens to the errors of workers."""

    def __init__(self, ending: _Ending) -> None:
        self._ending = ending

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._ending.note(worker_exceptions)


class ControllerDecisions(ControllerCallback):
    """Journals the end of attempts; saves before a resize; stops a run that cannot get on.

    Args:
        ending: shared with :class:`WorkerErrors`.
        save_timeout_s: longest wait for the save before a resize, seconds.
    """

    def __init__(self, ending: _Ending, save_timeout_s: float) -> None:
        self._ending, self._save_timeout_s = ending, save_timeout_s
        self._running = False

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        name = type(current_state).__name__
        # On its way to a resize, or with a drained node, the group still runs.
        still = name in ("ResizingState", "SchedulingState", "PreemptingState") and self._running
        self._running = name == "RunningState" or still

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        started, self._running = self._running, False
        fatal, self._ending.fatal = self._ending.fatal, ""
        kind, cause = self._ending.take()
        if not started:
            # The group never came up: no attempt of ours began, so none ended.
            logger.warning("a worker group did not start: %s", cause)
            return
        verdict = RayTracker(self._ending.run).call("interruption", kind=kind, cause=cause)
        if fatal or not verdict.go_on:
            # An error in a callback is one that the controller does not retry.
            raise RuntimeError(f"the run stops: {fatal or verdict.reason}")

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        if not self._running:
            return  # the group is already down: this decision only starts the next one
        self._running = False
        workers = resize_decision.num_workers
        tracker = RayTracker(self._ending.run)
        try:
            self._save_first(tracker, workers)
            tracker.call(
                "interruption", kind="resize", cause=f"the cluster has room for {workers} workers"
            )
        except (RayCkptError, RayError) as error:
            # The resize happens anyway; what was not saved is done again.
            logger.warning("no save before the resize to %d workers: %s", workers, error)

    def _save_first(self, tracker: RayTracker, workers: int) -> None:
        before = tracker.call("status")["commits"]
        tracker.call("request_save", reason=f"resize to {workers} workers")
        deadline = time.monotonic() + self._save_timeout_s
        while time.monotonic() < deadline:
            if tracker.call("status")["commits"] > before:
                return
            time.sleep(0.05)
        logger.warning(
            "the save before the resize did not finish within %g s", self._save_timeout_s
        )


def make_callbacks(run: str, save_timeout_s: float) -> list[Any]:
    """The callbacks of a run, for ``RunConfig(callbacks=...)``."""
    ending = _Ending(run)
    return [WorkerErrors(ending), ControllerDecisions(ending, save_timeout_s)]


def classify(errors: dict[int, Exception]) -> tuple[str, str]:
    """Kind and cause of an interruption, from the errors of workers by rank.

    When one worker dies its peers fail too, with broken connections: the error that explains most is taken.
    """
    for rank, error in sorted(errors.items()):
        root = _root(error)
        if isinstance(root, RayActorError) and ("node" in str(root).lower() and _node_died(root)):
            return "node_loss", f"the node of rank {rank} died"
    for rank, error in sorted(errors.items()):
        root = _root(error)
        if isinstance(root, RayActorError):
            return "worker_error", f"the process of rank {rank} died ({_short(root)})"
    for rank, error in sorted(errors.items(), key=lambda item: _is_echo(_root(item[1]))):
        root = _root(error)
        return "worker_error", f"rank {rank}: {type(root).__name__}: {_short(root)}"
    return "worker_error", "unknown"


def hopeless(errors: dict[int, Exception]) -> str:
    """Why another attempt would fail in the same way; empty when it may not."""
    for error in errors.values():
        root = _root(error)
        if isinstance(root, RayCkptError) and not isinstance(root, StaleGenerationError):
            return str(root)
    return ""


def _root(error: BaseException) -> BaseException:
    """The error in the training function, below the wrappers of Ray."""
    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = (
            getattr(error, "health_check_failure", None)
            or getattr(error, "_base_exc", None)
            or getattr(error, "cause", None)
        )
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _node_died(error: RayActorError) -> bool:
    text = str(error).lower()
    return isinstance(error, ActorDiedError) and any(
        words in text for words in ("node has died", "node died", "its node", "node was terminated")
    )


def _is_echo(error: BaseException) -> bool:
    """Whether an error only says that a peer is gone."""
    text = str(error)
    return any(word in text for word in ("Connection", "gloo", "NCCL", "Broken pipe"))


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
