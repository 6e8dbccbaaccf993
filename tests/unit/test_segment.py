"""Every sample of a segment's order is used once, in order, in the history of every checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.config import Config, ReadingConfig
from ray_ckpt.data.catalog import MixedIndex, parse_sources
from ray_ckpt.data.index import DataIndex
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.facts import order_of
from ray_ckpt.segment import FIRST, Placement, Segment, differences, place

BATCH, DATA = "--global-batch", "--data (fingerprint of its content)"


@dataclass(frozen=True)
class Made:
    """A checkpoint of the model run: where it is, and what every step before it was trained on."""

    step: int
    samples: int
    mark: dict[str, object]
    trail: tuple[tuple[int, int, int], ...]  # of each step: segment, its own step, batch


attempts = st.lists(
    st.fixed_dictionaries(
        {
            "batch": st.none() | st.integers(1, 3),  # None: as before
            "fall_back": st.sampled_from(
                [0, 0, 0, 1, 2, 5]
            ),  # newer checkpoints that are not usable
            "steps": st.integers(0, 4),
            "save_every": st.integers(1, 3),
            "dies_first": st.booleans(),  # before the start of the segment is on record
        }
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(attempts)
def test_any_history_uses_each_position_of_each_segment_once_and_in_order(story):
    """The model: attempts that change the batch, fall back, die early, and go on; numbers never mix orders."""
    known: tuple[Segment, ...] = (Segment(options={BATCH: 2}),)
    made: list[Made] = []
    contents: dict[int, int] = {}
    for act in story:
        usable = sorted(made, key=lambda m: m.step)
        start = usable[max(0, len(usable) - 1 - act["fall_back"])] if usable else None
        batch = act["batch"] or known[-1].options[BATCH]
        where = {
            "step": start.step if start else 0,
            "offset": start.samples if start else 0,
            "origin": Segment.from_json(start.mark) if start else None,
        }
        placement = place(known, {BATCH: batch}, "why", **where)
        if act["dies_first"]:
            continue
        assert bool(placement.cause) == (placement.segments != known)
        known = placement.segments
        # Asked again, as by an attempt that died before its first commit: the same, and nothing to record.
        assert place(known, {BATCH: batch}, "why", **where) == Placement(segments=known)
        now = known[-1]
        assert now.options[BATCH] == batch
        for a, b in pairwise(known):
            assert a.number < b.number
            assert a.start_step < b.start_step
        trail = start.trail if start else ()
        step, samples = where["step"], where["offset"]
        for _ in range(act["steps"]):
            trail += ((now.number, now.own_step(step), batch),)
            step, samples = step + 1, samples + batch
            assert samples == now.offset_at(step, batch)
            if step % act["save_every"] == 0:
                made.append(Made(step, samples, now.mark(), trail))
        check(trail)
        for number, _, used in trail if made else ():
            assert contents.setdefault(number, used) == used, (
                "a number was given to another content"
            )
        if not made:
            contents.clear()  # nothing was kept: the run begins anew


def check(trail: tuple[tuple[int, int, int], ...]) -> None:
    blocks = [(number, list(steps)) for number, steps in groupby(trail, key=lambda t: t[0])]
    numbers = [number for number, _ in blocks]
    assert numbers == sorted(set(numbers)), "a segment was entered twice"
    for _, steps in blocks:
        assert [own for _, own, _ in steps] == list(range(len(steps)))
        assert len({batch for _, _, batch in steps}) == 1


def test_a_change_starts_a_segment_at_the_checkpoint_and_says_what_changed():
    known = (Segment(options={BATCH: 10, DATA: "a"}),)
    found = place(known, {BATCH: 20, DATA: "a"}, "larger batch", step=6, offset=60, origin=FIRST)
    assert found.segments == (
        known[0],
        Segment(
            number=1,
            start_step=6,
            start_offset=60,
            reason="larger batch",
            options={BATCH: 20, DATA: "a"},
        ),
    )
    assert found.changed == {BATCH: (10, 20)}
    assert found.cause == "declared for this resume"
    assert found.segment.offset_at(9, 20) == 60 + 3 * 20


def test_a_checkpoint_from_before_the_segment_makes_it_start_there():
    known = (
        Segment(options={BATCH: 10}),
        Segment(number=1, start_step=6, start_offset=60, reason="r", options={BATCH: 20}),
    )
    found = place(known, {BATCH: 20}, "", step=3, offset=30, origin=FIRST)
    assert [s.mark() for s in found.segments] == [
        FIRST.mark(),
        {"number": 1, "start_step": 3, "start_offset": 30, "reason": "r"},
    ]
    assert found.changed == {BATCH: (10, 20)}
    assert "from before the segment" in found.cause
    # The same step in two lines of history: what counts is the segment that it was made in.
    again = (known[0], found.segment)
    other_line = place(again, {BATCH: 20}, "", step=6, offset=60, origin=FIRST)
    assert other_line.segment.mark() == known[1].mark()


def test_a_checkpoint_that_comes_back_brings_the_start_of_its_segment_with_it():
    """Storage did not give step 9 for a while: the segment had begun at 6, then again at 3."""
    first = Segment(options={BATCH: 10})
    early = Segment(number=1, start_step=6, start_offset=60, reason="r", options={BATCH: 20})
    again = Segment(number=1, start_step=3, start_offset=30, reason="r", options={BATCH: 20})
    found = place(
        (first, again), {BATCH: 20}, "", step=9, offset=120, origin=Segment.from_json(early.mark())
    )
    assert found.segments == (first, early)
    assert found.segment.own_step(9) == 3
    assert found.cause


def test_a_record_made_anew_takes_the_segment_from_the_checkpoint():
    mark = Segment(number=2, start_step=6, start_offset=60, reason="r")
    found = place((Segment(options={BATCH: 20}),), {BATCH: 20}, "", step=9, offset=120, origin=mark)
    assert found.segment.mark() == mark.mark()
    assert found.segment.options == {BATCH: 20}
    assert found.cause


def test_without_a_checkpoint_a_change_is_what_the_run_begins_with():
    known = (Segment(options={BATCH: 10}),)
    found = place(known, {BATCH: 20}, "typo", step=0, offset=0, origin=None)
    assert found.segments == (Segment(reason="typo", options={BATCH: 20}),)
    assert found.changed == {BATCH: (10, 20)}
    assert place(known, {BATCH: 10}, "", step=0, offset=0, origin=None) == Placement(segments=known)


def test_an_option_that_the_record_does_not_know_is_no_change():
    assert differences({BATCH: 10}, {BATCH: 10, DATA: "a"}) == {}
    later = Segment(number=1, start_step=6, start_offset=60, reason="r", options={BATCH: 10})
    known = (Segment(options={BATCH: 5}), later)
    found = place(known, {BATCH: 10, DATA: "a"}, "", step=6, offset=60, origin=FIRST)
    assert found == Placement(segments=known)


@pytest.mark.parametrize(
    "values",
    [
        {"number": -1},
        {"number": True},
        {"number": 1, "start_step": 1.0},
        {"number": 1, "start_offset": "6"},
        {"start_step": 3},
        {"start_offset": 3},
        {"number": 1, "reason": None},
        {"number": 1, "options": []},
    ],
)
def test_what_is_no_segment_is_refused(values):
    with pytest.raises(ValueError, match="segment"):
        Segment(**values)


counts = st.integers(0, 2**40)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 99), counts, counts, st.text(max_size=5))
def test_what_is_written_is_what_is_read(number, step, offset, reason):
    segment = Segment(
        number=number, start_step=step, start_offset=offset, reason=reason, options={BATCH: 3}
    )
    assert Segment.from_json({**segment.to_json(), "colour": "green"}) == segment


# ---- the order of a segment --------------------------------------------------------------------


def index_of(sizes: list[int]) -> DataIndex:
    return _Sizes(np.array(sizes, dtype=np.int64))


@dataclass(frozen=True)
class _Sizes:
    row_group_sizes: np.ndarray


def config_of(batch: int, micro: int, seed: int) -> Config:
    return Config(
        global_batch=batch,
        micro_batch=micro,
        workers="1",
        seed=seed,
        reading=ReadingConfig(window_groups=2),
    )


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(lambda s: sum(s) >= 12),
    parts=st.lists(
        st.tuples(st.sampled_from([(2, 1), (6, 2), (12, 3)]), st.integers(1, 6)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**31),
)
def test_each_segment_has_its_own_order_from_its_own_beginning(sizes, parts, seed):
    """Walks a run step by step over its boundaries: in a segment, each row once an epoch."""
    step = offset = 0
    index = index_of(sizes)
    for number, ((batch, micro), steps) in enumerate(parts):
        segment = Segment(number=number, start_step=step, start_offset=offset)
        order = order_of(index, config_of(batch, micro, seed), segment)
        seen: Counter[tuple[int, int]] = Counter()
        used = []
        for _ in range(steps):
            first = segment.own_step(step) * batch
            positions = np.arange(first, first + batch)
            rows = order.rows_at(positions)
            seen.update(
                (order.epoch_at(p), r)
                for p, r in zip(positions.tolist(), rows.tolist(), strict=True)
            )
            used += positions.tolist()
            step, offset = step + 1, offset + batch
            assert offset == segment.offset_at(step, batch)
        assert used == list(range(steps * batch))
        assert max(seen.values()) == 1


def test_segment_0_is_the_plain_order_and_no_other_segment_is():
    """With the run's own seed a batch twice as large would begin with the rows that the run began with."""
    index = index_of([40, 40, 40, 40])
    plain = GlobalOrder(
        row_group_sizes=index.row_group_sizes,
        global_batch=12,
        micro_batch=2,
        seed=5,
        window_groups=2,
    )
    rows = [
        order_of(index, config_of(12, 2, 5), segment).rows_at(np.arange(48)).tolist()
        for segment in (
            FIRST,
            Segment(number=1),
            Segment(number=2),
            Segment(number=1, start_step=9),
        )
    ]
    assert rows[0] == plain.rows_at(np.arange(48)).tolist()
    assert rows[1] == rows[3], "an order depends on the segment's number, not on where it starts"
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert rows[a] != rows[b]
        assert len(set(rows[a]) & set(rows[b])) < 40


def test_a_mixture_has_an_order_of_its_own_in_each_segment():
    sources = parse_sources(["a=/a:2", "b=/b:1"])
    mixed = MixedIndex(sources=sources, parts=(index_of([30, 30]), index_of([20, 7])))
    config = config_of(12, 2, 5)
    rows = [
        order_of(mixed, config, segment).rows_at(np.arange(48)).tolist()
        for segment in (FIRST, Segment(number=1))
    ]
    assert rows[0] == order_of(mixed, config).rows_at(np.arange(48)).tolist()
    assert rows[0] != rows[1]
