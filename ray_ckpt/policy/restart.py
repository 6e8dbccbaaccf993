"""How long a restart takes at a number of workers, from those that were seen.

Finding, scheduling and starting more workers takes longer: published cold recoveries grow nearly in proportion,
from 200 s at 16,384 GPUs to 900 s at 98,304 (arXiv 2602.00277). So one more measured size gives a line, and until
then the one size that was seen is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def restart_at(world_size: int, seen: Sequence[tuple[int, float]]) -> float | None:
    """Expected time of a restart, seconds.

    A line by least squares over the number of workers, that neither falls with it nor begins below 0.

    Args:
        world_size: workers of the restart.
        seen: workers and seconds of each restart that was measured.

    Returns:
        None when none was.
    """
    if not seen:
        return None
    if world_size < 1 or any(size < 1 or seconds < 0 for size, seconds in seen):
        raise ValueError("a restart has 1 worker or more and takes 0 s or more")
    middle, typical = fmean(size for size, _ in seen), fmean(seconds for _, seconds in seen)
    spread = sum((size - middle) ** 2 for size, _ in seen)
    slope = sum((size - middle) * (s - typical) for size, s in seen) / spread if spread else 0.0
    if slope <= 0:
        return typical
    if typical - slope * middle < 0:  # then the best line through 0
        slope = sum(size * s for size, s in seen) / sum(size * size for size, _ in seen)
        return slope * world_size
    return typical + slope * (world_size - middle)
