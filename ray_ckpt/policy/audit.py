"""Whether a run saved too often or too rarely, from what it measured and not from what was believed.

At the best interval, saves and the work done again because of failures cost the same (Young 1974), but for what is
done again for an upload, which no interval changes. So their totals tell an interval that is far off, whatever went
wrong with the numbers it was computed from. How much is done again is luck: of n failures, each anywhere in its
interval, the total has a relative standard deviation of ``sqrt(4 / 3n)``. Within two of those, and within a factor
of three, nothing is said against the interval: at a factor of three it costs 15 % more than the best one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_ckpt.policy.words import percent, seconds

FACTOR = 3.0
_FEWEST_FAILURES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What the totals say.

    Attributes:
        verdict: "balanced", "too often", "too rarely", or "too early" to tell.
        factor: that the interval should be longer (more than 1) or shorter by, 1 when nothing is said.
        reason: one line.
    """

    verdict: str
    factor: float
    reason: str


def audit(
    useful_s: float, saving_s: float, rework_s: float, failures: int, upload_rework_s: float = 0.0
) -> Audit:
    """Compares what saves took with what was done again.

    Args:
        useful_s: time of the steps that counted, seconds.
        saving_s: stalls and slow-down by uploads, in all, seconds.
        rework_s: steps done again, in all, seconds.
        failures: that made them.
        upload_rework_s: part of ``rework_s`` that was done again because an upload was not over yet, seconds.
    """
    if not (useful_s > 0 and saving_s >= 0 and rework_s >= 0 and failures >= 0):
        raise ValueError(
            "need useful time of more than 0 s, and saving, rework and failures of 0 or more, got "
            f"{useful_s} s, {saving_s} s, {rework_s} s and {failures}"
        )
    chosen_s = max(0.0, rework_s - upload_rework_s)
    told = (
        f"saving took {percent(saving_s / useful_s)} of the useful time ({seconds(saving_s)}), work done again "
        f"{percent(rework_s / useful_s)} ({seconds(rework_s)}, {failures} failure{'' if failures == 1 else 's'})"
    )
    if failures < _FEWEST_FAILURES:
        return Audit(
            verdict="too early",
            factor=1.0,
            reason=f"{told}: too few failures to say whether the interval is right",
        )
    luck = 2 * math.sqrt(4 / (3 * failures))
    # The total that luck could have made of the same interval: more for "too often", less for "too rarely".
    lucky_s, unlucky_s = chosen_s * (1 + luck), chosen_s * max(0.0, 1 - luck)
    if saving_s > FACTOR * lucky_s:
        factor = math.sqrt(saving_s / chosen_s) if chosen_s else math.inf
        ratio = f"{saving_s / chosen_s:.2g} times as much" if chosen_s else "for nothing"
        advice = f"an interval {factor:.2g} times as long" if chosen_s else "a longer interval"
        return Audit(
            verdict="too often",
            factor=factor,
            reason=f"{told}: {ratio}, {advice} would have cost least",
        )
    if unlucky_s > FACTOR * saving_s:
        factor = math.sqrt(saving_s / chosen_s)
        advice = f"an interval of {percent(factor)} of it" if saving_s else "a shorter interval"
        return Audit(
            verdict="too rarely",
            factor=factor,
            reason=f"{told}: {advice} would have cost least",
        )
    return Audit(verdict="balanced", factor=1.0, reason=f"{told}: balanced")
