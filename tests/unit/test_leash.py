"""A worker asks whether its attempt is over when no step ends for long, and only then; it ends when it is told so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.elastic.leash import Leash
from ray_ckpt.errors import StaleGenerationError, StorageError


class Stand:
    """A tracker, a step and a clock, as a test sets them."""

    def __init__(self, quiet_s: float = 60.0) -> None:
        self.now = self.step_since_s = 0.0
        self.asked, self.ended, self.over, self.reachable = 0, [], False, True
        self.leash = Leash(
            self.check,
            quiet_s,
            step_since_s=lambda: self.step_since_s,
            end=self.ended.append,
            clock=lambda: self.now,
        )

    def check(self) -> None:
        self.asked += 1
        if not self.reachable:
            raise StorageError("no way there")
        if self.over:
            raise StaleGenerationError("attempt 2 has taken its place")

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.leash.look()


@given(st.integers(1, 59))
def test_steps_that_end_ask_nothing(step_s: int) -> None:
    stand = Stand()
    for _ in range(20):
        stand.pass_s(step_s)
        stand.step_since_s = stand.now
    assert stand.asked == 0


@given(st.integers(0, 400))
def test_a_worker_ends_within_its_bound_after_the_run_went_on_without_it(after_s: int) -> None:
    stand = Stand()
    stand.pass_s(after_s)
    assert stand.ended == []
    assert stand.asked == after_s // 60
    stand.over = True
    stand.pass_s(60)
    assert stand.ended == ["attempt 2 has taken its place"]


def test_a_process_that_was_stopped_asks_as_soon_as_it_goes_on() -> None:
    stand = Stand()
    stand.over = True
    stand.now = 1000.0
    stand.leash.look()
    assert stand.ended


def test_a_tracker_that_is_not_reached_ends_nobody_and_is_asked_again() -> None:
    stand = Stand()
    stand.over, stand.reachable = True, False
    stand.pass_s(200)
    assert (stand.asked, stand.ended) == (3, [])
    stand.reachable = True
    stand.pass_s(60)
    assert stand.ended
