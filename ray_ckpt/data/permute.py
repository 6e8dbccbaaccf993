"""A permutation of ``range(n)`` that is computed point by point.

``permute(x, n, key)`` says where ``x`` goes in a pseudo-random order of ``range(n)`` that ``key`` names.
It is a balanced Feistel network over the smallest power of four that holds ``n``, walked along its
cycle until the value is below ``n`` (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains"). Work and memory per point are O(1): a set of 10^12 rows costs what a set of ten costs.

It shuffles; it does not encrypt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
# Made once: on short arrays, making them takes as long as the arithmetic.
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """Folds integers into one 64-bit key (SplitMix64's finaliser, Steele et al. 2014)."""
    state = 0x243F6A8885A308D3
    for word in words:
        state = (state ^ (word & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _round(half: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    value = half + np.uint64(key)
    value = (value ^ (value >> _30)) * _FACTOR_1
    value = (value ^ (value >> _27)) * _FACTOR_2
    return value ^ (value >> _31)


def draws(x: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """64 pseudo-random bits for each number: places in the SplitMix64 sequence named by ``key``."""
    return _round(x * np.uint64(0x9E3779B97F4A7C15), mix(key))


def permute(x: npt.ArrayLike, n: int, key: int) -> npt.NDArray[np.int64]:
    """Maps positions to their places in the order of ``range(n)`` named by ``key``.

    Args:
        x: int64 [...], values in ``[0, n)``.
        n: size of the permuted range, 1 to 2^62.
        key: any integer; another key is another order.

    Returns:
        int64 [...]: a bijection of ``range(n)``, value by value.

    Raises:
        ValueError: a value outside ``[0, n)``.
    """
    values = np.asarray(x, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() >= n):
        raise ValueError(f"permute: every value must be in [0, {n})")
    if n <= 1 or not values.size:
        return values.copy()
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = [mix(key, r) for r in range(_ROUNDS)]
    out = values.astype(np.uint64).ravel()
    pending = np.arange(out.size)
    while pending.size:
        left, right = out[pending] >> half_bits, out[pending] & mask
        for round_key in keys:
            left, right = right, left ^ (_round(right, round_key) & mask)
        out[pending] = (left << half_bits) | right
        pending = pending[out[pending] >= n]
    return out.astype(np.int64).reshape(values.shape)
