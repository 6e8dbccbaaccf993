"""The loss over steps, in few points however long the run is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MOST_POINTS = 500


class _Bucket(NamedTuple):
    key: int
    last_step: int
    num_finite: int
    total: float
    low: float
    high: float
    nonfinite: int


class Curve:
    """Mean, lowest and highest loss of equally many steps a point; twice as many when there are too many points."""

    def __init__(self) -> None:
        self.stride = 1
        self._origin: int | None = None
        self._buckets: list[_Bucket] = []

    def add(self, step: int, loss: float) -> None:
        """Takes the loss of a step; steps come in order."""
        if self._origin is None:
            self._origin = step
        finite = math.isfinite(loss)
        one = _Bucket(
            (step - self._origin) // self.stride,
            step,
            int(finite),
            loss if finite else 0.0,
            loss if finite else math.inf,
            loss if finite else -math.inf,
            int(not finite),
        )
        if self._buckets and self._buckets[-1].key == one.key:
            self._buckets[-1] = _merged(self._buckets[-1], one)
            return
        self._buckets.append(one)
        if len(self._buckets) > MOST_POINTS:
            self.stride *= 2
            halved: list[_Bucket] = []
            for bucket in self._buckets:
                half = bucket._replace(key=bucket.key // 2)
                if halved and halved[-1].key == half.key:
                    halved[-1] = _merged(halved[-1], half)
                else:
                    halved.append(half)
            self._buckets = halved

    def rewind(self, step: int) -> int:
        """Forgets the steps from one on, which is executed again.

        Returns:
            The first step that has to be added again, since it shared a point with that step.
        """
        if self._origin is None:
            return step
        key = (step - self._origin) // self.stride
        while self._buckets and self._buckets[-1].key >= key:
            self._buckets.pop()
        return self._origin + key * self.stride

    def points(self) -> list[list[Any]]:
        """A list of step, mean, lowest, highest, and how many steps were not finite; None for what is not known."""
        found: list[list[Any]] = []
        for bucket in self._buckets:
            values: list[float | None] = [None, None, None]
            if bucket.num_finite:
                mean = bucket.total / bucket.num_finite
                values = [_short(mean), _short(bucket.low), _short(bucket.high)]
            found.append([bucket.last_step, *values, bucket.nonfinite])
        return found


def _merged(first: _Bucket, then: _Bucket) -> _Bucket:
    return _Bucket(
        then.key,
        then.last_step,
        first.num_finite + then.num_finite,
        first.total + then.total,
        min(first.low, then.low),
        max(first.high, then.high),
        first.nonfinite + then.nonfinite,
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")
