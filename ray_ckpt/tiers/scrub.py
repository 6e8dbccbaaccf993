"""Which checkpoint is read back next, so that what rots on storage is found before it is needed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping


def next_to_scrub(
    last_read_s: Mapping[str, float], *, now_s: float, every_s: float, asked_s: float = -math.inf
) -> str | None:
    """The checkpoint whose bytes nobody has looked at for the longest time, if that is too long.

    Args:
        last_read_s: checkpoint to when its bytes were last read and compared, or written, seconds since the epoch.
        now_s: seconds since the epoch.
        every_s: how long a checkpoint may go unread, seconds; 0 reads none.
        asked_s: what was last read before this time is due whatever ``every_s`` says.
    """
    if not last_read_s:
        return None
    name = min(last_read_s, key=lambda name: (last_read_s[name], name))
    stale = every_s > 0 and now_s - last_read_s[name] >= every_s
    return name if stale or last_read_s[name] < asked_s else None
