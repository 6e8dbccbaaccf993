"""SIGTERM of a worker's process: a mark that the end of the step reads, whenever the signal came.

Python runs a handler between two of its own instructions, in the main thread. So the handler only makes the mark; it
rides with the sums at the end of the step (:mod:`ray_ckpt.elastic.control`), and the state is touched there alone.
Further signals change nothing: whoever means it sends SIGKILL.

A forked child is none of that, and ends by SIGTERM as it would without us. One that gets it in its first moment would
not: Python forgets signals that it has taken and not handled when it forks. So they wait until the child is whole.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(slots=True)
class _Mark:
    """Of this process.

    Attributes:
        pid: of the process that listens, 0 for none: a child that it forks has the handler too.
        got: whether the signal came.
        before: what handled it before.
    """

    pid: int = 0
    got: bool = False
    before: Any = None


_mark = _Mark()
_forking = threading.local()  # the signals that its thread did not take before it began to fork


def _before_fork() -> None:
    if _mark.pid == os.getpid():
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    mask = getattr(_forking, "mask", None)
    if mask is not None:
        _forking.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def listen() -> bool:
    """Has SIGTERM make a mark from now on; False where that is not possible: not in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if _mark.pid != os.getpid():
        _mark.got, _mark.before = False, signal.signal(signal.SIGTERM, _take)
        _mark.pid = os.getpid()
    return True


def terminated() -> bool:
    """Whether this process got SIGTERM."""
    return _mark.got


def ignore() -> None:
    """Nobody reads the mark any more: SIGTERM does again what it did before, and what came is forgotten."""
    main = threading.current_thread() is threading.main_thread()
    if main and _mark.pid == os.getpid() and signal.getsignal(signal.SIGTERM) is _take:
        signal.signal(signal.SIGTERM, _mark.before or signal.SIG_DFL)
    _mark.pid, _mark.got = 0, False


def _take(number: int, frame: FrameType | None) -> None:
    if _mark.pid == os.getpid():
        _mark.got = True
        return
    # A child of a listening process, or one that has stopped to listen in another thread than the main one.
    if callable(_mark.before):
        _mark.before(number, frame)
        return
    if _mark.before is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
