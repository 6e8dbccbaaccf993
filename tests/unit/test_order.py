"""One order: the sample at a position depends on (data, seed, position) and on nothing else."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.data.order import GlobalOrder, Span
from ray_ckpt.errors import ConfigError

seeds = st.integers(min_value=-(2**65), max_value=2**65)
# Mostly small groups, some empty, a few that hold many global batches.
sizes = st.lists(
    st.one_of(st.just(0), st.integers(1, 6), st.integers(1, 60), st.integers(100, 400)),
    min_size=1,
    max_size=25,
)


def make_order(groups: list[int], v: int, b: int, **more: Any) -> GlobalOrder:
    return GlobalOrder(
        row_group_sizes=np.array(groups, dtype=np.int64),
        global_batch=v * b,
        micro_batch=b,
        **more,
    )


@st.composite
def orders(draw: st.DrawFn) -> GlobalOrder:
    groups = draw(sizes)
    v, b = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    short = v * b - sum(groups)
    if short > 0:
        groups.insert(draw(st.integers(0, len(groups))), short + draw(st.integers(0, 40)))
    return make_order(groups, v, b, seed=draw(seeds), window_groups=draw(st.integers(1, 6)))


def spans_of(order: GlobalOrder, epoch: int, stream: int) -> list[Span]:
    """The spans of a stream, found by walking from its first row to its last."""
    spans, offset = [], 0
    while offset < order.stream_rows:
        span = order.span_at(epoch, stream, offset)
        assert span.offset == offset
        assert span.num_rows >= 1
        spans.append(span)
        offset += span.num_rows
    assert offset == order.stream_rows
    return spans


def walk(order: GlobalOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions, row ids) of a whole epoch, by spans."""
    positions, rows = [], []
    for stream in range(order.num_streams):
        for span in spans_of(order, epoch, stream):
            permuted, ids = order.span_rows(span)
            # The shuffle stays inside its span, and uses all of it.
            assert np.array_equal(np.sort(permuted), np.arange(span.low, span.high))
            positions.append(order.positions(span))
            rows.append(ids)
    return np.concatenate(positions), np.concatenate(rows)


def epoch_rows(order: GlobalOrder, epoch: int) -> np.ndarray:
    """Row ids of an epoch in the order of training."""
    positions, rows = walk(order, epoch)
    return rows[np.argsort(positions)]


@settings(max_examples=40, deadline=None)
@given(orders(), st.integers(0, 1000), st.data())
def test_an_epoch_uses_every_row_once_but_for_rows_mod_g(order, epoch, data):
    positions, rows = walk(order, epoch)
    per_epoch = order.steps_per_epoch * order.global_batch
    assert np.array_equal(np.sort(positions), epoch * per_epoch + np.arange(per_epoch))
    assert len(np.unique(rows)) == len(rows) == order.num_rows - order.dropped_rows
    assert rows.min() >= 0
    assert rows.max() < order.num_rows
    assert order.dropped_rows == order.num_rows % order.global_batch < order.global_batch
    # Looking up single positions, in any order, tells the same story.
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=12))
    assert order.rows_at(positions[picked]).tolist() == rows[picked].tolist()


@settings(max_examples=40, deadline=None)
@given(orders(), st.integers(0, 50))
def test_a_stream_is_whole_windows_cut_only_at_its_ends(order, epoch):
    layout = order.layout(epoch)
    for stream in range(order.num_streams):
        low = layout.first + stream * order.stream_rows
        spans = spans_of(order, epoch, stream)
        assert (spans[0].low, spans[-1].high) == (low, low + order.stream_rows)
        for before, after in itertools.pairwise(spans):
            assert before.high == after.low
            # Inside a stream a span ends where a row group ends: nobody reads that group again.
            assert before.high in layout.starts
        for span in spans:
            first, last = np.searchsorted(layout.starts, [span.low, span.high - 1], side="right")
            assert last - first < order.window_groups


@settings(max_examples=25, deadline=None)
@given(orders(), st.integers(0, 50), st.data())
def test_any_row_of_a_span_finds_the_span(order, epoch, data):
    stream = data.draw(st.integers(0, order.num_streams - 1))
    offset = data.draw(st.integers(0, order.stream_rows - 1))
    span = order.span_at(epoch, stream, offset)
    assert span.offset <= offset < span.offset + span.num_rows
    last = span.offset + span.num_rows - 1
    assert order.span_at(epoch, stream, span.offset) == span == order.span_at(epoch, stream, last)


@settings(max_examples=15, deadline=None)
@given(orders(), st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_the_order_does_not_depend_on_what_was_asked_before(order, epochs):
    fresh = GlobalOrder(
        row_group_sizes=order.row_group_sizes.copy(),
        global_batch=order.global_batch,
        micro_batch=order.micro_batch,
        seed=order.seed,
        window_groups=order.window_groups,
    )
    per_epoch = order.steps_per_epoch * order.global_batch
    positions = [epoch * per_epoch + epoch % per_epoch for epoch in epochs]
    warm = order.rows_at(positions)
    again = order.rows_at(positions[::-1])[::-1]
    assert warm.tolist() == again.tolist() == fresh.rows_at(positions).tolist()


@pytest.mark.parametrize("groups", [[7] * 20, [140], [1] * 140, [0, 100, 0, 3, 37]])
def test_each_epoch_leaves_out_other_rows(groups):
    order = make_order(groups, 4, 3, seed=3)
    assert order.dropped_rows == 8
    everything = set(range(order.num_rows))
    dropped = [
        frozenset(everything - set(epoch_rows(order, epoch).tolist())) for epoch in range(20)
    ]
    assert all(len(rows) == 8 for rows in dropped)
    assert len(set(dropped)) >= 5
    assert not frozenset.intersection(*dropped)


def test_no_row_is_left_out_for_good_nor_much_more_often_than_others():
    order = make_order([7] * 20, 4, 3, seed=1)
    epochs = 200
    times = np.full(order.num_rows, epochs)
    for epoch in range(epochs):
        layout = order.layout(epoch)
        kept = np.arange(layout.first, layout.first + order.num_rows - order.dropped_rows)
        place = np.searchsorted(layout.starts, kept, side="right") - 1
        starts = order.group_starts[layout.groups[place]]
        times[starts + kept - layout.starts[place]] -= 1
    expected = epochs * order.dropped_rows / order.num_rows
    assert times.min() > 0
    assert times.max() < 3 * expected


def test_nothing_is_left_out_when_the_batches_fit():
    order = make_order([5, 0, 7, 12], 4, 3)
    assert order.dropped_rows == 0
    assert sorted(epoch_rows(order, 3).tolist()) == list(range(24))


def test_seeds_epochs_and_windows_name_different_orders():
    def rows(**more: Any) -> tuple[int, ...]:
        epoch = more.pop("epoch", 0)
        return tuple(epoch_rows(make_order([10] * 12, 4, 2, **more), epoch).tolist())

    names = [
        {"seed": 0},
        {"seed": 1},
        {"seed": -1},
        {"seed": 2**40},
        {"seed": 0, "epoch": 1},
        {"seed": 1, "epoch": 0, "window_groups": 2},
        {"seed": 0, "window_groups": 1},
    ]
    assert len({rows(**name) for name in names}) == len(names)
    assert tuple(range(120)) not in {rows(**name) for name in names}


def test_rows_of_a_batch_come_from_all_over_the_data():
    order = make_order([50] * 200, 10, 2, seed=9)
    rows = epoch_rows(order, 0).astype(float)
    assert abs(np.corrcoef(np.arange(len(rows)), rows)[0, 1]) < 0.1
    spread = rows.reshape(-1, 20).std(axis=1).mean()
    # A uniform sample of n rows has a standard deviation of n / sqrt(12).
    assert spread > 0.8 * len(rows) / np.sqrt(12)


def test_a_pretended_set_of_10_to_the_12_rows_answers_at_once():
    tracemalloc.start()
    try:
        start = time.perf_counter()
        order = make_order([10**7] * 10**5, 512, 8, seed=11)
        assert order.num_rows == 10**12
        per_epoch = order.steps_per_epoch * order.global_batch
        rng = np.random.default_rng(0)
        positions = np.concatenate(
            [
                np.arange(16),
                rng.integers(0, per_epoch, size=60),
                per_epoch + np.arange(-8, 8),
                2 * per_epoch + rng.integers(0, per_epoch, size=20),
            ]
        )
        rows = order.rows_at(positions)
        spent = time.perf_counter() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spent < 2.0
    assert peak < 30e6  # some arrays of one entry a row group; one entry a row would be 8 TB
    assert rows.min() >= 0
    assert rows.max() < 10**12
    first_epoch = rows[np.unique(positions, return_index=True)[1]][:70]
    assert len(np.unique(first_epoch)) == len(first_epoch)
    # Sixteen rows in a row of two streams lie in two windows, not all over 10^12 rows.
    assert len(np.unique(rows[:8] // 10**7)) <= order.window_groups
    assert len(np.unique(rows[8:16] // 10**7)) <= order.window_groups
    span = order.span_at(2, 511, order.stream_rows - 1)
    assert span.offset + span.num_rows == order.stream_rows


@pytest.mark.parametrize("groups", [[], [0, 0], [11], [5, 6]])
def test_less_than_one_global_batch_is_refused_with_the_way_out(groups):
    with pytest.raises(ConfigError) as caught:
        make_order(groups, 4, 3)
    for word in (f"{sum(groups)} rows", "12", "--global-batch"):
        assert word in str(caught.value)


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match="--micro-batch 5"):
        GlobalOrder(row_group_sizes=np.array([50]), global_batch=12, micro_batch=5)
    with pytest.raises(ConfigError, match="window-groups must be at least 1"):
        make_order([50], 4, 3, window_groups=0)
