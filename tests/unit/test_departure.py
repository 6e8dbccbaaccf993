"""A node that will be taken away trains as long as is safe, and no save is begun that could not finish."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.departure import SaveTimes, decide_departure

seconds = st.floats(0, 1000, allow_nan=False)
measured = st.builds(
    SaveTimes,
    step_s=seconds,
    in_flight_s=seconds,
    stall_s=seconds,
    upload_s=seconds,
    copy_s=seconds,
)


@settings(max_examples=40)
@given(measured, st.floats(-60, 120, allow_nan=False), st.floats(0, 60))
def test_a_save_begins_only_if_it_can_finish_and_never_before_the_margin(
    times: SaveTimes, more_s: float, margin_s: float
) -> None:
    needed_s = times.needed_s
    assert needed_s is not None
    left_s = needed_s + more_s
    decision = decide_departure(left_s, times, margin_s)
    if decision.action == "save":
        assert needed_s <= left_s <= needed_s + margin_s
    elif decision.action == "leave":
        assert left_s < needed_s
    else:
        assert left_s > needed_s + margin_s


@settings(max_examples=40)
@given(measured, st.floats(1, 60), st.floats(0.01, 0.9))
def test_whoever_looks_more_often_than_the_margin_is_long_meets_the_moment_to_save(
    times: SaveTimes, margin_s: float, share: float
) -> None:
    left_s = (times.needed_s or 0.0) + 3 * margin_s
    while (decision := decide_departure(left_s, times, margin_s)).action == "wait":
        left_s -= share * margin_s
    assert decision.action == "save"


@settings(max_examples=20)
@given(st.floats(0.1, 1000), st.sampled_from(["step_s", "upload_s", "copy_s"]))
def test_what_was_never_measured_is_saved_at_once(left_s: float, unknown: str) -> None:
    times = SaveTimes(step_s=1.0, in_flight_s=0.0, stall_s=0.1, upload_s=1.0, copy_s=0.0)
    times = replace(times, **{unknown: None})
    assert decide_departure(left_s, times, 5.0).action == "save"
    assert decide_departure(-left_s, times, 5.0).action == "leave", "the node is gone"


def test_without_a_deadline_it_is_saved_at_once() -> None:
    times = SaveTimes(step_s=1.0, in_flight_s=0.0, stall_s=0.1, upload_s=1.0, copy_s=0.0)
    assert decide_departure(None, times, 5.0).action == "save"


def test_a_reason_tells_the_numbers() -> None:
    times = SaveTimes(step_s=1.0, in_flight_s=0.0, stall_s=0.5, upload_s=20.0, copy_s=0.0)
    assert decide_departure(120.0, times, 5.0).reason == (
        "120 s are left and a save needs 23.0 s: the node still trains"
    )
    assert decide_departure(25.0, times, 5.0).reason == (
        "25.0 s are left and a save needs 23.0 s, with a margin of 5 s"
    )
    assert "none is begun that could not finish" in decide_departure(10.0, times, 5.0).reason
