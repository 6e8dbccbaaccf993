"""Sums that do not care about order: 64-bit fixed point under a common power-of-two scale.

Floating-point addition is not associative, so a sum over micro-batches depends on who adds what first, and with
it on the number of workers. Integer addition is associative. A value ``x`` becomes ``round(x * 2^e)``; sums of
those are the same bits in any order and grouping (Demmel and Nguyen 2013, "Fast reproducible floating-point
summation", discuss the family of methods).

Bounds. With ``V`` addends of magnitude at most ``m``, ``m * 2^e <= 2^(62 - ceil(log2 V))`` makes an overflow
impossible. The exponent is chosen with ``HEADROOM_BITS`` to spare, so that the next step's gradients may be
``2^HEADROOM_BITS`` times larger; what exceeds even that is seen in the maximum that all ranks share, and the step
is repeated with another exponent. The largest gradient keeps at least ``LEAST_BITS`` bits, more than the 24 of
float32, and everything within ``2^(LEAST_BITS - 24)`` of it is represented without loss.
"""

from __future__ import annotations

import math

import torch

_BITS = 62
HEADROOM_BITS = 8
LEAST_BITS = 36


def exponent_for(largest: float, addends: int) -> int:
    """The exponent for values up to ``largest``, with headroom.

    Args:
        largest: greatest magnitude expected, finite and more than 0.
        addends: how many such values are summed.
    """
    # frexp: largest = mantissa * 2^power with mantissa in [0.5, 1), so largest < 2^power.
    _, power = math.frexp(largest)
    return _BITS - _addend_bits(addends) - HEADROOM_BITS - power


def fits(largest: float, exponent: int, addends: int) -> bool:
    """Whether sums of values up to ``largest`` can neither overflow nor lose float32's precision."""
    if largest == 0.0:
        return True
    _, power = math.frexp(largest)
    return LEAST_BITS <= power + exponent <= _BITS - _addend_bits(addends)


def _addend_bits(addends: int) -> int:
    return max(0, (addends - 1).bit_length())


def to_fixed(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """``round(values * 2^exponent)`` as int64, elementwise.

    The product is exact in float32 (a power of two), so nothing depends on the shape or layout of ``values``.
    What does not fit becomes some other number: its step is made again.
    """
    return _times_power_of_two(values.float(), exponent).round_().to(torch.int64)


def from_fixed(sums: torch.Tensor, exponent: int) -> torch.Tensor:
    """``sums * 2^-exponent`` in float32, elementwise, rounded once."""
    return _times_power_of_two(sums.to(torch.float32), -exponent)


def _times_power_of_two(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """``values * 2^exponent`` where the power itself may be out of float32's range."""
    while exponent > 126:
        values, exponent = values * 2.0**126, exponent - 126
    while exponent < -126:
        values, exponent = values * 2.0**-126, exponent + 126
    return values * 2.0**exponent


def largest_magnitude(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Greatest magnitude in some tensors, float32 scalar; infinite if any value is not finite."""
    if not tensors:
        return torch.zeros(())
    norms = torch._foreach_norm(tensors, ord=math.inf)
    largest = torch.stack([norm.float() for norm in norms]).max()
    return torch.where(torch.isfinite(largest), largest, torch.full_like(largest, math.inf))


# Squares of whole numbers below 2^22 are below 2^44; 256 of them add up exactly in float64.
NORM_BITS = 22
_CHUNK = 256
_WORD = 26


def square_sum_words(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """Sum of squares as two integers, the same for any division of ``values`` over ranks.

    Values are rounded to ``NORM_BITS`` bits below the greatest magnitude, so a norm of n elements is off by less than
    ``n * 2^-44`` of itself (relative, at worst: one element is large and all others just vanish). Whole numbers
    are squared and added in float64 without rounding, then added up as two words of 26 bits.

    Args:
        values: any shape, magnitudes at most ``2^(NORM_BITS - exponent)``.
        exponent: common scale.

    Returns:
        int64 [2]: high and low words, whose value is ``high * 2^26 + low``.
    """
    whole = _times_power_of_two(values.reshape(-1).float(), exponent).round_().double()
    full = whole.numel() // _CHUNK * _CHUNK
    chunks = whole[:full].view(-1, _CHUNK)
    sums = torch.cat([(chunks * chunks).sum(1), (whole[full:] * whole[full:]).sum().view(1)])
    words = sums.to(torch.int64)
    return torch.stack([(words >> _WORD).sum(), (words & ((1 << _WORD) - 1)).sum()])


def square_sum_value(words: torch.Tensor, exponent: int) -> float:
    """The sum of squares that added-up words stand for."""
    high, low = (int(word) for word in words.tolist())
    total = (high << _WORD) + low  # Python integers: exact
    return math.ldexp(total, -2 * exponent)
