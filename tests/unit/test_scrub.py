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
