"""Fixed point: sums that do not care about order, within bounds that are kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.elastic import fixed

magnitudes = st.floats(min_value=1e-30, max_value=1e30)


@settings(max_examples=60, deadline=None)
@given(largest=magnitudes, addends=st.integers(1, 100_000))
def test_a_chosen_exponent_fits_and_cannot_overflow(largest: float, addends: int) -> None:
    exponent = fixed.exponent_for(largest, addends)
    assert fixed.fits(largest, exponent, addends)
    assert fixed.fits(largest * 2**fixed.HEADROOM_BITS, exponent, addends)
    assert not fixed.fits(largest * 2 ** (fixed.HEADROOM_BITS + 1), exponent, addends)
    assert addends * math.ldexp(largest, exponent) * 2**fixed.HEADROOM_BITS < 2**63


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), addends=st.integers(1, 24), spread=st.integers(0, 30))
def test_a_sum_is_the_same_bits_in_any_order_and_grouping(
    seed: int, addends: int, spread: int
) -> None:
    generator = np.random.default_rng(seed)
    scale = 2.0 ** generator.integers(-spread, 1, (addends, 1))
    values = torch.from_numpy((generator.normal(size=(addends, 37)) * scale).astype(np.float32))
    largest = float(fixed.largest_magnitude([values]))
    exponent = fixed.exponent_for(largest, addends)
    whole = fixed.to_fixed(values, exponent).sum(0)
    order = generator.permutation(addends)
    cut = int(generator.integers(0, addends + 1))
    parts = [
        fixed.to_fixed(values[order[:cut]], exponent),
        fixed.to_fixed(values[order[cut:]], exponent),
    ]
    assert torch.equal(whole, parts[0].sum(0) + parts[1].sum(0))
    result = fixed.from_fixed(whole, exponent).double()
    exact = values.double().sum(0)
    # One rounding to float32, and the fixed point's own grain.
    assert torch.all((result - exact).abs() <= exact.abs() * 2**-24 + addends * 2.0 ** (-exponent))


def test_what_is_not_finite_makes_the_maximum_infinite() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        tensors = [torch.ones(3), torch.tensor([0.5, bad]), torch.zeros(2)]
        assert float(fixed.largest_magnitude(tensors)) == math.inf
    assert float(fixed.largest_magnitude([torch.tensor([-3.0, 2.0])])) == 3.0
    assert float(fixed.largest_magnitude([])) == 0.0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 3000), cuts=st.integers(1, 7))
def test_a_norm_is_the_same_bits_for_any_division_over_ranks(
    seed: int, size: int, cuts: int
) -> None:
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(
        generator.normal(size=size).astype(np.float32) * 10.0 ** generator.integers(-12, 6)
    )
    _, power = math.frexp(float(values.abs().max()) or 1.0)
    exponent = fixed.NORM_BITS - power
    whole = fixed.square_sum_value(fixed.square_sum_words(values, exponent), exponent)
    edges = sorted(generator.integers(0, size + 1, cuts).tolist())
    pieces = [values[a:b] for a, b in zip([0, *edges], [*edges, size], strict=True)]
    words = sum(
        (fixed.square_sum_words(piece, exponent) for piece in pieces),
        torch.zeros(2, dtype=torch.int64),
    )
    assert fixed.square_sum_value(words, exponent) == whole
    assert math.sqrt(whole) == pytest.approx(float(values.double().norm()), rel=1e-5)


@pytest.mark.parametrize("exponent", [-200, -127, 0, 126, 127, 200])
def test_powers_beyond_the_range_of_float32_are_taken_in_steps(exponent: int) -> None:
    value = torch.tensor([2.0 ** (20 - exponent if abs(exponent) < 140 else -exponent // 2)])
    expected = math.ldexp(float(value), exponent)
    if abs(expected) < 2**62:
        assert fixed.to_fixed(value, exponent).item() == round(expected)
