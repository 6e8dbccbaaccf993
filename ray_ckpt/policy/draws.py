"""Failures for many simulated runs: times between them, and kinds. Every policy meets the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Draw = Callable[[int], Floats]
"""So many times between failures, seconds."""

_BLOCK = 32


def exponential(mtbf_s: float, rng: np.random.Generator) -> Draw:
    """Memoryless failures."""
    return lambda count: rng.exponential(mtbf_s, count)


def weibull(mtbf_s: float, shape: float, rng: np.random.Generator) -> Draw:
    """Failures that come in bursts (shape below 1), as clusters have them, or with age (above 1)."""
    scale_s = mtbf_s / math.gamma(1 + 1 / shape)
    return lambda count: scale_s * rng.weibull(shape, count)


def trace(gaps_s: Floats, rng: np.random.Generator) -> Draw:
    """Times between failures that were seen, drawn again and again in any order."""
    return lambda count: rng.choice(gaps_s, count)


class Failures:
    """The n-th failure of each run, whatever a policy does: drawn when first asked for, and then kept.

    A gap is told in seconds of the whole job; a smaller job lives through it more slowly. So a job that is restarted
    in another way, or is smaller for a while, meets the same failures after the same exposure.

    Args:
        draw: of the gaps.
        shares: of the kinds, which sum to 1.
        runs: how many.
        rng: draws the kinds.
    """

    def __init__(
        self, draw: Draw, shares: Mapping[str, float], *, runs: int, rng: np.random.Generator
    ) -> None:
        self._draw, self._runs, self._rng = draw, runs, rng
        self._until = np.cumsum([*shares.values()])[:-1]
        self._gaps_s = np.empty((0, runs))
        self._kinds = np.empty((0, runs), np.int64)

    def gaps_s(self, number: Ints, runs: Ints) -> Floats:
        """Seconds of exposure from the failure before to this one.

        Args:
            number: of the failure, from 0: [n].
            runs: which: [n].
        """
        self._draw_up_to(number)
        return self._gaps_s[number, runs]

    def kinds(self, number: Ints, runs: Ints) -> Ints:
        """Their kinds, as places in ``shares``."""
        self._draw_up_to(number)
        return self._kinds[number, runs]

    def _draw_up_to(self, number: Ints) -> None:
        # By blocks of a failure of all runs each: how early they are asked for must not change them.
        while len(number) and number.max() >= len(self._gaps_s):
            gaps = [self._draw(self._runs) for _ in range(_BLOCK)]
            kinds = np.searchsorted(self._until, self._rng.random((_BLOCK, self._runs)), "right")
            self._gaps_s = np.concatenate([self._gaps_s, np.stack(gaps)])
            self._kinds = np.concatenate([self._kinds, kinds])
