"""Where this process is in its training: one record, changed as it goes on, that can be asked for at any time.

A worker of Ray Train runs its training function in a thread of its own, so its process still answers when that thread
hangs: it tells its whereabouts and what each of its threads is doing (:func:`look_around`). A process that is stopped,
or that does not let go of Python's lock, does not answer; that says something too.

A change costs less than a microsecond, and nothing is sent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass

from ray_ckpt.policy.phases import Whereabouts

STACKS_BYTES = 64 << 10  # of one process; what its threads do is in the innermost frames


class Here:
    """The record of one process; its training thread changes it, any thread may read it."""

    def __init__(self) -> None:
        now_s = time.monotonic()
        # A plain tuple, the fields of `Whereabouts`: it is made a dozen times a step, and looked at hardly ever.
        self._now = (0, "start", 0, now_s, now_s)

    @property
    def now(self) -> Whereabouts:
        """The record, as it is at this moment."""
        return Whereabouts(*self._now)

    def enter(self, phase: str, step: int | None = None, left: int = 0) -> None:
        """Notes that a phase begins.

        Args:
            phase: one of :data:`ray_ckpt.policy.phases.PHASES`.
            step: that is worked on from here on; None for the same.
            left: passes of the step that come after this one.
        """
        now_s = time.monotonic()
        at_step, _, _, _, step_since_s = self._now
        if step is not None and step != at_step:
            at_step, step_since_s = step, now_s
        self._now = (at_step, phase, left, now_s, step_since_s)


HERE = Here()
"""Of this process, which takes part in one run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a process answers.

    Attributes:
        where: its whereabouts.
        age_s: how long it has been there, seconds.
        step_age_s: how long it has worked on the step, seconds.
        stacks: what each of its threads is doing, as text.
    """

    where: Whereabouts
    age_s: float
    step_age_s: float
    stacks: str


def look_around() -> Look:
    """Looks around in this process."""
    where, now_s = HERE.now, time.monotonic()
    return Look(
        where=where,
        age_s=now_s - where.since_s,
        step_age_s=now_s - where.step_since_s,
        stacks=stacks_of_threads(),
    )


def stacks_of_threads(most_bytes: int = STACKS_BYTES) -> str:
    """What each thread of this process is doing, the innermost call last.

    Args:
        most_bytes: what is more is cut in the middle.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"process {os.getpid()}: {' '.join(sys.argv)[:200]}\n"]
    for ident, frame in sys._current_frames().items():
        head = f"\nthread {ident} ({names.get(ident, 'unknown to Python')})\n"
        parts.append(head + "".join(traceback.format_stack(frame)))
    return cut("".join(parts), most_bytes)


def cut(text: str, most_bytes: int) -> str:
    """A text of so many bytes at most, without its middle when it is longer."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    word = f"\n... {len(data) - most_bytes} bytes are left out ...\n"
    half = max(0, most_bytes - len(word)) // 2
    end = data[len(data) - half :] if half else b""
    return data[:half].decode(errors="ignore") + word + end.decode(errors="ignore")
