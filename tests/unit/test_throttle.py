"""However chunks come, no more passes than the rate allows; without a rate nobody waits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.tiers.throttle import Throttle


class _Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 5)), min_size=1, max_size=20),
    st.integers(1, 5000),
)
def test_no_more_than_the_rate_passes_but_for_the_last_chunk(
    chunks: list[tuple[int, float]], rate: int
) -> None:
    time = _Time()
    throttle = Throttle(rate, clock=lambda: time.now_s, sleep=time.sleep)
    passed_before, began_s = 0, time.now_s
    for count, pause_s in chunks:
        throttle.spend(count)
        assert passed_before <= rate * (time.now_s - began_s) + 1e-6 * rate + 1e-6
        passed_before += count
        time.now_s += pause_s


def test_without_a_rate_nobody_waits() -> None:
    def never(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    Throttle(0, sleep=never).spend(1 << 40)
