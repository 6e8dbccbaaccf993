"""Stopping a run on purpose: Ctrl-C, SIGTERM and ``ray-ckpt stop`` save at the end of a step before they end the job.

``trainer.fit()`` runs in a thread of its own, so that the main thread, which gets the signals, is free to ask for the
save. A second signal ends at once. With tiers on the nodes the save is also waited for in the durable tier: the nodes
may go with the job.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ray.exceptions import RayError

from ray_ckpt.errors import RayCkptError
from ray_ckpt.tracker.client import RayTracker

SAVE_TIMEOUT_S = 60.0
_POLL_S = 0.1
_ASK_S = 1.0  # between looks for a request of somebody else


class Stopped(Exception):
    """The run was stopped on purpose.

    Attributes:
        number: of the signal; SIGTERM's when it was asked for in another way.
    """

    def __init__(self, number: int, cause: str) -> None:
        super().__init__(cause)
        self.number = number


def fit_until_stopped(fit: Callable[[], Any], tracker: RayTracker) -> None:
    """Calls ``fit()``; on SIGINT or SIGTERM, or when somebody asked the tracker for it, saves and raises `Stopped`.

    Outside the main thread signals cannot be caught, and ``fit()`` is simply called.
    """
    if threading.current_thread() is not threading.main_thread():
        fit()
        return
    signals: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    errors: list[BaseException] = []

    def work() -> None:
        try:
            fit()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=work, name="fit", daemon=True)
    try:
        thread.start()
        cause, asked_s = "", time.monotonic()
        while thread.is_alive() and not signals and not cause:
            thread.join(_POLL_S)
            if time.monotonic() - asked_s >= _ASK_S:
                cause, asked_s = _asked(tracker), time.monotonic()
        if thread.is_alive():
            number = signals[0] if signals else signal.SIGTERM
            cause = cause or f"the job got {signal.Signals(number).name}"
            _save_and_note(tracker, cause, lambda: len(signals) < 2 and thread.is_alive())
            raise Stopped(number, cause.removeprefix("the job got "))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if errors:
        raise errors[0]


def _asked(tracker: RayTracker) -> str:
    """Why somebody wants the run to stop; empty when nobody does."""
    try:
        return str(tracker.call("status")["stop_request"])
    except (RayCkptError, RayError):
        return ""  # it restarts, or the run ends: the trainer will say so


def _save_and_note(tracker: RayTracker, cause: str, going_on: Callable[[], bool]) -> None:
    print(
        f"\n{cause}: saving at the end of this step, then stopping (a signal more stops at once)",
        flush=True,
    )
    deadline = time.monotonic() + SAVE_TIMEOUT_S

    def waiting() -> bool:
        time.sleep(_POLL_S)
        return time.monotonic() < deadline and going_on()

    try:
        status = tracker.call("status")
        if not status["attempt_open"]:
            return
        # A save that is under way already is of a step before this one: it is not the one that is waited for.
        generation = status["generation"]
        number = tracker.call("request_save", reason=cause, hold_s=SAVE_TIMEOUT_S)
        while waiting():
            status = tracker.call("status")
            if status["settled_request"] >= number or _has_ended(status, generation):
                break
        if status["settled_request"] >= number and status["last_commit_step"] is not None:
            _wait_until_durable(tracker, status, waiting)
        tracker.call("interruption", kind="user_stop", cause=cause)
    except (RayCkptError, RayError) as error:
        print(f"no save before the stop: {error}", flush=True)


def _has_ended(status: dict[str, Any], generation: int) -> bool:
    """Whether the attempt is over: its workers got the signal too, and have left with their step saved."""
    return not status["attempt_open"] or status["generation"] != generation


def _wait_until_durable(
    tracker: RayTracker, status: dict[str, Any], waiting: Callable[[], bool]
) -> None:
    at = {"generation": status["generation"], "step": status["last_commit_step"]}
    while problem := tracker.call("durable", **at):
        if not waiting():
            print(f"step {at['step']} is on the nodes alone: {problem}", flush=True)
            return
