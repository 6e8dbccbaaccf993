"""The gamma distribution: its cumulative probability and its quantiles, without scipy.

The regularised incomplete gamma function P(a, x) by its power series below the mean and by its continued fraction
above it (Abramowitz and Stegun 1964, 6.5.29 and 6.5.31), good to about 1e-12 for shapes up to 1e5. Quantiles by
Newton's method in the logarithms of both, where the function is concave, and by bisection where a step would lead
out of the bracket.
"""

from __future__ import annotations

import math

_ENOUGH = 1e-15
_TINY = 1e-300


def gamma_cdf(shape: float, x: float) -> float:
    """Probability that a gamma variable of this shape and scale 1 is at most ``x``."""
    return _with_slope(shape, x)[0]


def gamma_quantile(shape: float, probability: float) -> float:
    """The value that a gamma variable of this shape and scale 1 is below with this probability."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must be between 0 and 1, got {probability}")
    low = high = math.log(shape)
    while gamma_cdf(shape, math.exp(low)) > probability:
        if low < -690:
            return 0.0  # of a shape so small that nearly everything is as good as 0
        low = max(low - 1 - abs(low), -744.0)  # its exponential is the smallest number there is
    while gamma_cdf(shape, math.exp(high)) < probability:
        high += 1
    point = low
    for _ in range(200):
        below, slope = _with_slope(shape, math.exp(point))
        if below < probability:
            low = point
        else:
            high = point
        step = below * math.log(probability / below) / slope if below * slope else math.inf
        if min(abs(step), high - low) < 1e-13 * max(1.0, abs(point)):
            break
        point = point + step if low < point + step < high else (low + high) / 2
    return math.exp(point)


def _with_slope(shape: float, x: float) -> tuple[float, float]:
    """The probability, and how much it grows with the logarithm of ``x``."""
    if not 0 < shape < math.inf:
        raise ValueError(f"shape must be more than 0, got {shape}")
    if not x > 0:
        return 0.0, 0.0
    if math.isinf(x):
        return 1.0, 0.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        return min(1.0, front * _series(shape, x)), front
    return max(0.0, 1 - front * _fraction(shape, x)), front


def _series(shape: float, x: float) -> float:
    term = total = 1 / shape
    n = shape
    while term > _ENOUGH * total:
        n += 1
        term *= x / n
        total += term
    return total


def _fraction(shape: float, x: float) -> float:
    """By Lentz's method (Press et al. 2007, Numerical Recipes, section 5.2)."""
    b = x + 1 - shape
    c, d = 1 / _TINY, 1 / b
    value = d
    for i in range(1, 100_000):
        a = i * (shape - i)
        b += 2
        d = a * d + b
        d = 1 / (d if abs(d) > _TINY else _TINY)
        c = b + a / c
        c = c if abs(c) > _TINY else _TINY
        change = d * c
        value *= change
        if abs(change - 1) < _ENOUGH:
            break
    return value
