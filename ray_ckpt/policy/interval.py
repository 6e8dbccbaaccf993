"""Formulas for the time between saves.

All times in seconds. ``stall`` is C, the time training stands still for one save; ``mtbf`` is M, the
mean time between failures of the whole job at its present size. Intervals are compute time between
saves; a period is interval plus stall.
"""

from __future__ import annotations

import math


def young(stall: float, mtbf: float) -> float:
    """First-order optimum, ``sqrt(2 C M)`` (Young 1974, eq. 8). Valid for C much smaller than M."""
    _check(stall, mtbf)
    if stall == 0:
        return 0.0  # also for a job that never fails: 0 * inf is no number
    return math.sqrt(2 * stall * mtbf)


def waste(interval: float, stall: float, mtbf: float, restart: float = 0.0) -> float:
    """Share of time lost, first order: ``C/T + (T/2 + R)/M`` (Young 1974; Daly 2006, eq. 8)."""
    _check(stall, mtbf)
    if interval <= 0:
        raise ValueError("interval must be more than 0 s")
    return stall / interval + (interval / 2 + restart) / mtbf


def _check(stall: float, mtbf: float) -> None:
    if not (stall >= 0 and mtbf > 0):
        raise ValueError(f"need stall >= 0 s and mtbf > 0 s, got stall={stall}, mtbf={mtbf}")
