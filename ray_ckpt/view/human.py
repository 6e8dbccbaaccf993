"""Numbers as people say them: 1.5 GiB, 3m 20s, 12.4M, 5m ago."""

from __future__ import annotations

import math

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "k", "M", "B", "T")


def human_bytes(num_bytes: float) -> str:
    """Size in binary units: 0 B, 1023 B, 1.0 KiB, 1.5 GiB."""
    value, unit = _scaled(num_bytes, 1024, _BINARY_UNITS)
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def human_count(count: float) -> str:
    """Count in thousands: 999, 1.2k, 12.4M, 7.0B (billions), 15.0T."""
    value, unit = _scaled(count, 1000, _COUNT_UNITS)
    return f"{value:.0f}" if not unit else f"{value:.1f}{unit}"


def human_duration(seconds: float) -> str:
    """Time span in its two leading units: 0.07s, 4.2s, 3m 20s, 2h 05m, 3d 04h."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{human_duration(-seconds)}"
    if seconds < 0.995:
        return f"{seconds:.2f}s"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"


def ago(then_s: float, now_s: float) -> str:
    """How long ago `then_s` was, both in seconds since the epoch: 3m 20s ago.

    Clocks of two machines differ; a time that lies ahead is said to be so, not hidden.
    """
    age_s = now_s - then_s
    if -1.0 < age_s < 1.0:
        return "just now"
    return f"{human_duration(age_s)} ago" if age_s > 0 else f"{human_duration(-age_s)} ahead"


def shorten(text: str, most: int = 200) -> str:
    """A text in one line of `most` characters; a longer one ends in "..." after a whole word."""
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    head, space, _ = text[: most - 3].rpartition(" ")
    # A single word that is longer than the line has no better place.
    return f"{head} ..." if space else f"{text[: most - 3]}..."


def _scaled(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    """`value` in the first unit in which it prints with fewer digits than the next one needs."""
    for exponent, unit in enumerate(units):
        scaled = value / base**exponent
        # What prints as 1000.0k is 1.0M: the rounding of the last digit counts.
        if abs(round(scaled, 1 if exponent else 0)) < base:
            return scaled, unit
    return value / base ** (len(units) - 1), units[-1]
