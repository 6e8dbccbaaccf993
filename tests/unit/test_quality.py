"""The figures of the shuffle that order.py states stay true, and its measure knows bad shuffles."""

from __future__ import annotations

import numpy as np
import pytest

from ray_ckpt.data.quality import measure, table

SIZES = np.full(100, 100, dtype=np.int64)


@pytest.fixture(scope="module")
def figures():
    return dict(table(windows=(1, 4, 16), groups=300, group_rows=300))


@pytest.mark.parametrize(
    ("window", "distance", "same_group"), [(1, 0.03, 0.08), (4, 0.22, 0.025), (16, 0.28, 0.012)]
)
def test_a_larger_window_shuffles_better(figures, window, distance, same_group):
    found = figures[f"window {window}"]
    assert abs(found.rank_correlation) < 0.17  # three standard errors of 300 random places
    assert found.neighbour_distance > distance
    assert found.same_group < same_group


def test_a_random_order_has_the_figures_of_the_theory(figures):
    found = figures["random"]
    assert abs(found.rank_correlation) < 0.02
    assert found.neighbour_distance == pytest.approx(1 / 3, abs=0.01)
    assert found.same_group == pytest.approx(1 / 300, rel=0.1)


def test_file_order_is_found_out():
    found = measure(np.arange(10_000), SIZES, 20)
    assert found.rank_correlation == pytest.approx(1.0)
    assert found.neighbour_distance == pytest.approx(1e-4)
    assert found.same_group == 1.0


def test_pairs_of_a_batch_are_counted_inside_the_batch():
    # Two samples each of two groups: 2 of the 6 pairs. The next batch has none.
    rows = np.array([5, 105, 6, 106, 7, 107, 207, 307])
    assert measure(rows, SIZES, 4).same_group == pytest.approx((2 / 6 + 0) / 2)
