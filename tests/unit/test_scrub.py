"""Nothing goes unread for longer than it may, and a checkpoint that went bad is found and told."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.tiers.scrub import next_to_scrub


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1),
    st.floats(1, 50),
)
def test_in_turn_each_is_read_once_before_any_is_read_twice(
    last_read_s: dict[str, float], every_s: float
) -> None:
    now_s = 200.0
    read = []
    while name := next_to_scrub(last_read_s, now_s=now_s, every_s=every_s):
        read.append(name)
        last_read_s = {**last_read_s, name: now_s}
    assert sorted(read) == sorted(last_read_s)
    assert all(now_s - at_s < every_s for at_s in last_read_s.values())


def test_without_an_interval_or_checkpoints_nothing_is_read() -> None:
    assert next_to_scrub({"a": 0.0}, now_s=1e9, every_s=0.0) is None
    assert next_to_scrub({}, now_s=1e9, every_s=1.0) is None


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1),
    st.floats(0, 100),
    st.sampled_from([0.0, 1e9]),
)
def test_what_was_read_before_somebody_asked_is_read_again_and_nothing_else(
    last_read_s: dict[str, float], asked_s: float, every_s: float
) -> None:
    read = []
    known = dict(last_read_s)
    while name := next_to_scrub(known, now_s=200.0, every_s=every_s, asked_s=asked_s):
        read.append(name)
        known[name] = 200.0
    assert sorted(read) == sorted(name for name, at_s in last_read_s.items() if at_s < asked_s)
