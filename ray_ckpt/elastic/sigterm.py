"""SIGTERM of a worker's process: a mark that the end of the step reads, whenever the signal came.

Python runs a handler between two of its own instructions, in the main thread. So the handler only makes the mark; it
rides with the sums at the end of the step (:mod:`ray_ckpt.elastic.control`), and the state is touched there alone.
Further signals change nothing: whoever means it sends SIGKILL.
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
