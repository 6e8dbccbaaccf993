"""Holes in the order: no batch twice, none of those that are left out, and the same from wherever a run resumes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.skips import Skip, position_of_step, skip_past, stretches


@st.composite
def histories(draw):
    """Skips as rollbacks make them, and the batches that every rollback wanted left out."""
    skips: tuple[Skip, ...] = ()
    for _ in range(draw(st.integers(0, 4))):
        back_to = draw(st.integers(0, 20))
        skips = skip_past(skips, back_to, back_to + draw(st.integers(1, 10)))
    return skips


@given(histories(), st.integers(0, 30), st.integers(0, 30))
def test_ranges_of_the_order_are_the_positions_of_the_steps(skips, start, count):
    taken = [p for first, end in stretches(start, start + count, skips) for p in range(first, end)]
    assert taken == [position_of_step(step, skips) for step in range(start, start + count)]
    assert all(a < b for a, b in pairwise(taken)), "a batch twice, or backwards"


@given(histories(), st.integers(0, 20), st.integers(1, 10))
def test_after_a_skip_nothing_is_trained_again_up_to_the_step_that_broke(skips, back_to, ahead):
    bad = back_to + ahead
    after = skip_past(skips, back_to, bad)
    assert [position_of_step(s, after) for s in range(back_to)] == [
        position_of_step(s, skips) for s in range(back_to)
    ], "what was trained before is as it was"
    assert position_of_step(back_to, after) == position_of_step(bad - 1, skips) + 1


def test_a_run_without_holes_takes_the_order_as_it_is():
    assert [position_of_step(step, ()) for step in range(5)] == [0, 1, 2, 3, 4]
    assert list(stretches(3, 9, ())) == [(3, 9)]
    assert list(stretches(9, 9, ())) == []
    assert skip_past((), 3, 5) == (Skip(from_step=3, steps=2),)


@pytest.mark.parametrize("values", [(-1, 1), (0, 0), (True, 1), (1.0, 1), (0, "1")])
def test_a_hole_is_two_whole_numbers(values):
    with pytest.raises(ValueError, match="of a skip is"):
        Skip(from_step=values[0], steps=values[1])
