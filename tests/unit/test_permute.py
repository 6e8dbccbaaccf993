"""permute is a bijection of any range, named by its key, and costs the same at any size."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ckpt.data.permute import mix, permute

keys = st.integers(min_value=-(2**70), max_value=2**70)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), keys)
@example(1, 0)
@example(2, 0)
@example(4, 7)
@example(5, 7)
@example(1024, -1)
@example(1025, -1)
def test_every_place_is_taken_once(n, key):
    out = permute(np.arange(n), n, key)
    assert out.dtype == np.int64
    assert np.array_equal(np.sort(out), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2**62), keys, st.data())
def test_a_point_does_not_depend_on_its_company(n, key, data):
    points = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=12))
    together = permute(points, n, key)
    alone = [int(permute(point, n, key)) for point in points]
    assert together.tolist() == alone
    assert all(0 <= value < n for value in alone)
    # Different points stay different, also where no array of length n could show it.
    assert len(set(alone)) == len(set(points))


@settings(max_examples=30, deadline=None)
@given(st.integers(100, 2000), keys, keys)
def test_another_key_is_another_order(n, one, other):
    a, b = permute(np.arange(n), n, one), permute(np.arange(n), n, other)
    if (one - other) % 2**64:
        # Two random orders agree in one place on average.
        assert np.count_nonzero(a == b) < 15
    else:
        assert np.array_equal(a, b)


@pytest.mark.parametrize(("n", "orders"), [(2, 2), (3, 6), (4, 24)])
def test_small_ranges_reach_every_order_about_equally_often(n, orders):
    tries = 40 * orders
    seen = Counter(tuple(permute(np.arange(n), n, key).tolist()) for key in range(tries))
    assert len(seen) == orders
    assert max(seen.values()) < 80
    assert min(seen.values()) > 12


def test_neighbours_are_scattered_evenly():
    n = 100_000
    out = permute(np.arange(n), n, 42).astype(float)
    assert abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.02
    # Two independent uniform places are n/3 apart on average.
    assert abs(np.mean(np.abs(np.diff(out))) / n - 1 / 3) < 0.01


@pytest.mark.parametrize("n", [10**12, 2**62])
def test_a_huge_range_costs_no_more_than_a_small_one(n):
    points = np.linspace(0, n - 1, 2000).astype(np.int64).clip(0, n - 1)
    start = time.perf_counter()
    out = permute(points, n, 5)
    assert time.perf_counter() - start < 1.0
    assert out.min() >= 0
    assert out.max() < n
    assert len(np.unique(out)) == len(np.unique(points))


def test_the_shape_is_kept_and_the_input_is_not_touched():
    points = np.arange(6).reshape(2, 3)
    out = permute(points, 6, 1)
    assert out.shape == (2, 3)
    assert points.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert permute(np.empty(0, dtype=np.int64), 5, 1).size == 0
    one = np.zeros(1, dtype=np.int64)
    assert permute(one, 1, 1) is not one


@pytest.mark.parametrize(("value", "n"), [(-1, 5), (5, 5), (0, 0), (2**62, 2**62)])
def test_a_value_outside_the_range_is_refused(value, n):
    with pytest.raises(ValueError, match=rf"\[0, {n}\)"):
        permute([value], n, 0)


def test_keys_are_told_apart_by_every_word_and_their_order():
    words = [(), (0,), (1,), (0, 0), (1, 0), (0, 1), (1, 2), (2, 1), (-1,), (1, 2, 3), (3, 2, 1)]
    assert len({mix(*each) for each in words}) == len(words)
    assert all(0 <= mix(*each) < 2**64 for each in words)
    # Neighbouring seeds and epochs must not give related keys: about half of the bits differ.
    flips = [bin(mix(s, e) ^ mix(s, e + 1)).count("1") for s in range(20) for e in range(20)]
    assert 30 < np.mean(flips) < 34
    assert min(flips) > 12
