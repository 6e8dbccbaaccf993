"""The way to a worker group: waiting for room is told apart from starting; each way counts from its own beginning."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.elastic.startmarks import StartMarks


class Clock:
    """A steady clock that a test moves."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


SECONDS = st.floats(0, 1e4)


@settings(max_examples=30)
@given(
    ways=st.lists(st.tuples(st.lists(SECONDS, max_size=3), SECONDS, SECONDS, SECONDS), max_size=3)
)
def test_each_way_is_told_from_its_first_wish_to_the_group(ways):
    clock = Clock()
    marks = StartMarks(clock)
    for waits_s, idle_s, start_s, join_s in ways:
        clock.now += idle_s  # before anybody wished for a group
        wished = None
        for number, wait_s in enumerate(waits_s):
            wished = clock.now if wished is None else wished
            # No room, or a group that was asked for and did not come up.
            marks.no_room() if number % 2 else marks.ask()
            clock.now += wait_s
        marks.ask()
        asked = clock.now
        clock.now += start_s
        marks.workers_up()
        workers = clock.now
        clock.now += join_s
        assert marks.group_up() == {
            "asked_ago_s": clock.now - asked,
            "workers_ago_s": clock.now - workers,
            "waited_s": asked - (asked if wished is None else wished),
        }


def test_a_ray_that_tells_less_makes_no_phase_negative():
    clock = Clock()
    marks = StartMarks(clock)
    assert set(marks.group_up().values()) == {0.0}
    marks.ask()
    clock.now += 3.0
    assert marks.group_up() == {"asked_ago_s": 3.0, "workers_ago_s": 0.0, "waited_s": 0.0}
