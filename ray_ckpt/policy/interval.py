"""Formulas for the time between saves.

All times in seconds. ``stall`` is C, what one save costs: the time training stands still for it, and what its
upload takes from the steps beside it (:func:`save_cost`). ``mtbf`` is M, the mean time between failures of the
whole job at its present size. Intervals are useful compute time between saves; a period is interval plus C.

All of them suppose failures that are memoryless (exponential times between them). They differ in what else they
neglect: :func:`exact` neglects nothing, so it is what decides; the others are what the literature prints, and
what people know by heart.
"""

from __future__ import annotations

import math

# Below this share of M, the series is better than the equation: that one loses digits by cancellation.
_TINY_SHARE = 1e-8


def young(stall: float, mtbf: float) -> float:
    """First-order optimum, ``sqrt(2 C M)`` (Young 1974, eq. 8). Valid for C much smaller than M."""
    _check(stall, mtbf)
    if stall == 0:
        return 0.0  # also for a job that never fails: 0 * inf is no number
    return math.sqrt(2 * stall * mtbf)


def daly_first(stall: float, mtbf: float, restart: float = 0.0) -> float:
    """First-order optimum with restarts, ``sqrt(2 C (M + R))`` (Daly 2006, first-order estimate).

    Valid for an interval much smaller than M. The restart is no part of the exact optimum, see :func:`exact`.
    """
    return young(stall, mtbf + _not_negative(restart=restart))


def daly(stall: float, mtbf: float) -> float:
    """Higher-order optimum (Daly 2006, eq. 37): M for C of 2 M or more, else a series in sqrt(C / 2M).

    ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C``. Within 0.6 % of :func:`exact` up to C = M / 2.
    """
    _check(stall, mtbf)
    if stall >= 2 * mtbf:
        return mtbf
    if math.isinf(mtbf):
        return young(stall, mtbf)
    share = stall / (2 * mtbf)
    return young(stall, mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - stall


def rfo(stall: float, mtbf: float, restart: float = 0.0) -> float:
    """Refined first-order optimum, of the period ``sqrt(2 (M - R) C)`` (Aupy et al. 2013, "RFO").

    Of G. Aupy, Y. Robert, F. Vivien and D. Zaidouni, "Checkpointing algorithms and fault prediction". Their
    downtime D and recovery R together are ``restart``. Valid for C + R much smaller than M.

    Returns:
        The interval: period less C, and 0 where the formula leaves nothing.

    Raises:
        ValueError: a restart that takes as long as the mean time between failures.
    """
    _check(stall, mtbf)
    if not _not_negative(restart=restart) < mtbf:
        raise ValueError(f"the formula needs restart < mtbf, got {restart} s and {mtbf} s")
    return max(0.0, young(stall, mtbf - restart) - stall)


def exact(stall: float, mtbf: float) -> float:
    """Optimum for memoryless failures, whatever C and M are: ``M (1 + W0(-exp(-C/M - 1)))``.

    W0 is the Lambert function. It is where the derivative of Daly's expected time (2006, eq. 13; here
    :func:`overhead`) vanishes: Bougeret, Casanova, Rabie, Robert and Vivien 2011, "Checkpointing strategies
    for parallel jobs", theorem 1. Neither the restart nor an upload in the background moves it: both are paid
    once a failure, whatever the interval.

    W0 near its branch point has no digits left when C is much smaller than M. With ``T = M (1 - exp(-y))`` the
    condition is ``y + exp(-y) - 1 = C/M``, convex and increasing, and Newton's method cannot miss.
    """
    _check(stall, mtbf)
    share = stall / mtbf
    if share < _TINY_SHARE:
        return daly(stall, mtbf)  # off by a share of C/M at most
    y = share + math.sqrt(2 * share)  # never below the root
    for _ in range(60):
        less = y - (y + math.expm1(-y) - share) / -math.expm1(-y)
        if not less < y:
            break
        y = less
    return mtbf * -math.expm1(-y)


def save_cost(stall: float, upload: float = 0.0, slowdown: float = 0.0) -> float:
    """What one save takes from training, seconds: the stall, and the share lost of the time of its upload."""
    _not_negative(stall=stall, upload=upload, slowdown=slowdown)
    return stall + slowdown * upload if slowdown else stall


def waste(
    interval: float,
    stall: float,
    mtbf: float,
    restart: float = 0.0,
    *,
    upload: float = 0.0,
    slowdown: float = 0.0,
) -> float:
    """Seconds lost for each useful one, first order: ``C/T + (T/2 + U + R)/M`` (Young 1974; Daly 2006, eq. 8).

    A checkpoint is usable only when its upload is done, U after its stall: a failure throws back by half an
    interval and U. Valid for an interval much smaller than M.

    Args:
        interval: T, useful seconds between saves.
        stall: time training stands still for a save, seconds.
        mtbf: M, seconds.
        restart: R, from a failure to the first new step, seconds.
        upload: U, seconds.
        slowdown: share of the time of an upload that training loses.
    """
    _check(stall, mtbf)
    _check_interval(interval)
    cost = save_cost(stall, upload, slowdown)
    return cost / interval + (interval / 2 + upload + _not_negative(restart=restart)) / mtbf


def overhead(
    interval: float,
    stall: float,
    mtbf: float,
    restart: float = 0.0,
    *,
    upload: float = 0.0,
    slowdown: float = 0.0,
) -> float:
    """Seconds lost for each useful one, as expected for memoryless failures, exactly.

    ``M exp((R + U)/M) (exp((T + C)/M) - 1)/T - 1`` (Daly 2006, eq. 13, per second of work). The upload stands
    beside the restart: the k-th checkpoint of an attempt is usable R + U + k (T + C) after its beginning, and a
    failure keeps what the usable ones hold. Failures may also fall into a restart. For uploads that end before
    the next save begins. Arguments as for :func:`waste`.
    """
    _check(stall, mtbf)
    _check_interval(interval)
    cost = save_cost(stall, upload, slowdown)
    return growth(interval, cost, 1 / mtbf, _not_negative(restart=restart) + upload) - 1


def growth(interval: float, cost: float, rate: float, back: float, within: float = 1.0) -> float:
    """Expected seconds for each useful one.

    Args:
        interval: useful seconds between saves.
        cost: of one save, seconds.
        rate: failures per second.
        back: restart and upload together, seconds.
        within: seconds that a useful second takes already, for what else goes wrong.
    """
    lost = rate * (within * interval + cost)
    if lost + rate * back > 700:
        return math.inf  # it hardly ever gets anywhere
    again = math.expm1(lost) / lost if lost else 1.0
    return math.exp(rate * back) * again * (within + cost / interval)


def efficiency(
    interval: float,
    stall: float,
    mtbf: float,
    restart: float = 0.0,
    *,
    upload: float = 0.0,
    slowdown: float = 0.0,
) -> float:
    """Expected share of wall time that is useful (goodput), for memoryless failures: ``1 / (1 + overhead)``."""
    lost = overhead(interval, stall, mtbf, restart, upload=upload, slowdown=slowdown)
    return 1 / (1 + lost)


def ettr(interval: float, stall: float, mtbf: float, restart: float = 0.0) -> float:
    """The same, as Kokolis et al. 2024 (arXiv 2410.21680) estimate it, with ``1/M = N r_f`` for N nodes.

    ``(1 - (R + T/2)/M) / (1 + C/T)``. First order in T/M, and 0 where it would be less; below
    :func:`efficiency` by terms of (T/M) squared.
    """
    _check(stall, mtbf)
    _check_interval(interval)
    kept = 1 - (_not_negative(restart=restart) + interval / 2) / mtbf
    return max(0.0, kept) / (1 + stall / interval)


def _check(stall: float, mtbf: float) -> None:
    if not (stall >= 0 and mtbf > 0):
        raise ValueError(f"need stall >= 0 s and mtbf > 0 s, got stall={stall}, mtbf={mtbf}")


def _check_interval(interval: float) -> None:
    if not interval > 0:
        raise ValueError("interval must be more than 0 s")


def _not_negative(**values: float) -> float:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    return next(iter(values.values()))
