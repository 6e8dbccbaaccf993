"""Numbers in the sentences of a decision."""

from __future__ import annotations

import math

HOUR_S, DAY_S = 3600.0, 86400.0
_UNITS = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (HOUR_S, "h"), (DAY_S, "d"))


def seconds(value: float) -> str:
    """Seconds for a sentence: three figures and the unit that reads best."""
    if not math.isfinite(value):
        return f"{value:.3g} s"
    unit, name = _unit(value)
    return f"{value / unit:.3g} {name}"


def span(low: float, high: float) -> str:
    """Two times for a sentence: 1.6 to 7.2 h, 30 min to 4.1 h; two figures."""
    if not math.isfinite(high):
        return f"more than {seconds(low)}"
    (unit_low, name_low), (unit, name) = _unit(low), _unit(high)
    if low >= unit:
        unit_low, name_low = unit, name
    first = _two(low / unit_low)
    return f"{first}{f' {name_low}' if name_low != name else ''} to {_two(high / unit)} {name}"


def _two(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _unit(value: float) -> tuple[float, str]:
    if value >= 2 * DAY_S:
        return _UNITS[4]
    if value >= 2 * HOUR_S:
        return _UNITS[3]
    if value >= 600:
        return _UNITS[2]
    return _UNITS[1] if value >= 1 or value == 0 else _UNITS[0]


def percent(share: float) -> str:
    """A share for a sentence, two figures: 0.14 %, 3.2 %, 41 %, 230 %."""
    value = 100 * share
    if not math.isfinite(value):
        return "all"
    digits = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    return f"{value:.{digits}f} %" if value >= 0.005 or value == 0 else "under 0.01 %"
