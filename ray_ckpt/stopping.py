"""Stopping a run on purpose: Ctrl-C and SIGTERM save at the end of a step before they end the job.

``trainer.fit()`` runs in a thread of its own, so that the main thread, which gets the signals, is free to ask for the
save. A second signal ends at once.
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


class Stopped(Exception):
    """The run was stopped by a signal.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def fit_until_stopped(fit: Callable[[], Any], tracker: RayTracker) -> None:
    """Calls ``fit()``; on SIGINT or SIGTERM asks for a save, waits for it, and raises :class:`Stopped`.

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
        while thread.is_alive() and not signals:
            thread.join(_POLL_S)
        if thread.is_alive():
            _save_and_note(tracker, signals, thread)
            raise Stopped(signals[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if errors:
        raise errors[0]


def _save_and_note(tracker: RayTracker, signals: list[int], thread: threading.Thread) -> None:
    name = signal.Signals(signals[0]).name
    print(
        f"\n{name}: saving at the end of this step, then stopping (again to stop at once)",
        flush=True,
    )
    try:
        status = tracker.call("status")
        if status["attempt_open"]:
            before = status["saves_settled"]
            tracker.call("request_save", reason=f"the job got {name}", hold_s=SAVE_TIMEOUT_S)
            deadline = time.monotonic() + SAVE_TIMEOUT_S
            while time.monotonic() < deadline and len(signals) == 1 and thread.is_alive():
                if tracker.call("status")["saves_settled"] > before:
                    break
                time.sleep(_POLL_S)
            tracker.call("interruption", kind="user_stop", cause=f"the job got {name}")
    except (RayCkptError, RayError) as error:
        print(f"no save before the stop: {error}", flush=True)
