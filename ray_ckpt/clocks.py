"""Two clocks, side by side: one that tells the date and may be set, one that only runs and knows no date.

The steady one (``time.monotonic``) counts from the boot of a machine, the same for all its processes. So times of it
can be compared where the name of the boot is the same, and nowhere else.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# A driver that calls run() later than this after its process began did something else before, as a notebook does.
PREPARED_S = 300.0


@cache
def boot_name() -> str:
    """What this boot of this machine is called; a process that cannot find it out has a boot of its own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:13]
    except OSError:
        return uuid.uuid4().hex[:13]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """One moment on both clocks.

    Attributes:
        time: seconds since the epoch.
        monotonic: seconds of the steady clock.
        boot: whose steady clock it is.
    """

    time: float
    monotonic: float
    boot: str

    def age_s(self, now: Instant) -> float:
        """Seconds from here to ``now``, by the steady clock where it is the same one; never less than 0."""
        same = self.boot == now.boot
        return max(0.0, now.monotonic - self.monotonic if same else now.time - self.time)


def now() -> Instant:
    """This moment."""
    return Instant(time=time.time(), monotonic=time.monotonic(), boot=boot_name())


def submitted() -> Instant:
    """When the job began, for a driver that is about to start its run.

    That is the start of its process: the import of torch and Ray is part of what a start takes. A process that is
    older than :data:`PREPARED_S` was not started for this run, and for that the job begins now.
    """
    here = now()
    age_s = _process_age_s()
    if age_s > PREPARED_S:
        return here
    return Instant(time=here.time - age_s, monotonic=here.monotonic - age_s, boot=here.boot)


def _process_age_s() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        # The name of the program, in brackets, may hold blanks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
