"""The gamma distribution: its cumulative probability and its quantiles, without scipy.

The regularised incomplete gamma function P(a, x) by its power series below the mean and by its continued fraction
above it (Abramowitz and Stegun 1964, 6.5.29 and 6.5.31), good to about 1e-12 for shapes up to 1e5. Quantiles by
bisection in the logarithm: slow and sure.
"""

from __future__ import annotations

import math

_ENOUGH = 1e-15
_TINY = 1e-300


def gamma_cdf(shape: float, x: float) -> float:
    """Probability that a gamma variable of this shape and scale 1 is at most ``x``."""
    if not 0 < shape < math.inf:
        raise ValueError(f"shape must be more than 0, got {shape}")
    if not x > 0:
        return 0.0
    if math.isinf(x):
        return 1.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        return min(1.0, front * _series(shape, x))
    return max(0.0, 1 - front * _fraction(shape, x))


def gamma_quantile(shape: float, probability: float) -> float:
    """The value that a gamma variable of this shape and scale 1 is below with this probability."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must be between 0 and 1, got {probability}")
    low = high = math.log(shape)
    while gamma_cdf(shape, math.exp(low)) > probability:
        if low < -690:
            return 0.0  # of a shape so small that nearly everything is as good as 0
        low -= 1 + abs(low)
    while gamma_cdf(shape, math.exp(high)) < probability:
        high += 1
    for _ in range(200):
        middle = (low + high) / 2
        if high - low < 1e-13 * max(1.0, abs(middle)):
            break
        if gamma_cdf(shape, math.exp(middle)) < probability:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


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
