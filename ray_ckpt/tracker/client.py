"""How rank 0 talks to the tracker: waiting for an answer, or not.

Two clients with the same three verbs: one for the Ray actor, one for a tracker in the same process, for
programs and tests that run without Ray.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError

from ray_ckpt.errors import RayCkptError, StorageError
from ray_ckpt.tracker.core import TrackerCore
from ray_ckpt.tracker.lock import RunLock

NAMESPACE = "ray_ckpt"
CALL_TIMEOUT_S = 120.0


def actor_name(run: str) -> str:
    """Name of a run's tracker actor, in the namespace ``ray_ckpt``."""
    return f"ray_ckpt.tracker:{run}"


class TrackerClient(Protocol):
    """Calls methods of :class:`ray_ckpt.tracker.core.TrackerCore`."""

    def call(self, method: str, **kwargs: Any) -> Any:
        """Calls and waits for the answer."""
        ...

    def post(self, method: str, **kwargs: Any) -> Any:
        """Calls without waiting; returns a ticket for :meth:`poll`."""
        ...

    def poll(self, ticket: Any) -> tuple[bool, Any]:
        """``(done, answer)`` of a posted call; raises what the call raised."""
        ...


class LocalTracker:
    """A tracker in this process.

    Args:
        core: the tracker.
        lock: on the run's folder, held for as long as this object lives.
    """

    def __init__(self, core: TrackerCore, lock: RunLock | None = None) -> None:
        self.core, self._lock = core, lock
        self._turn = threading.Lock()  # a save commits from a thread of its own

    def call(self, method: str, **kwargs: Any) -> Any:
        with self._turn:
            return getattr(self.core, method)(**kwargs)

    def post(self, method: str, **kwargs: Any) -> Any:
        return self.call(method, **kwargs)

    def poll(self, ticket: Any) -> tuple[bool, Any]:
        return True, ticket


class RayTracker:
    """The tracker actor of a run, by its name or its handle."""

    def __init__(self, run: str, handle: Any = None) -> None:
        self._run = run
        self._actor = handle
        if handle is None:
            try:
                self._actor = ray.get_actor(actor_name(run), namespace=NAMESPACE)
            except ValueError as error:
                raise StorageError(
                    f"run {run!r} has no tracker actor {actor_name(run)!r} in this Ray cluster: it ended, or "
                    "the worker is not part of the job that started the run. Start the run again."
                ) from error

    def call(self, method: str, **kwargs: Any) -> Any:
        return self._get(getattr(self._actor, method).remote(**kwargs), CALL_TIMEOUT_S)

    def post(self, method: str, **kwargs: Any) -> Any:
        return getattr(self._actor, method).remote(**kwargs)

    def poll(self, ticket: Any) -> tuple[bool, Any]:
        done, _ = ray.wait([ticket], timeout=0)
        return (True, self._get(ticket, CALL_TIMEOUT_S)) if done else (False, None)

    def _get(self, ref: Any, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise StorageError(
                f"the tracker of run {self._run!r} did not answer within {timeout_s:g} s: its node is gone or "
                "its storage hangs."
            ) from error
        except ray.exceptions.RayTaskError as error:
            # Ray wraps what the actor raised; the caller wants our own errors as they were.
            if isinstance(error.cause, RayCkptError):
                raise error.cause from error
            raise
