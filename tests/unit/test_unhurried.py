"""Ray Data's loop rests when nothing happens, and at no other time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.data import unhurried
from ray_ckpt.data.unhurried import LONGEST_S, Unhurried, rest_s
from ray_ckpt.ray_private import counts_of

NAMES = (
    "num_tasks_submitted",
    "num_tasks_finished",
    "num_task_outputs_generated",
    "num_outputs_taken",
)


def executor(numbers: dict[str, int]) -> Any:
    metrics = SimpleNamespace(**{name: numbers.get(name, 0) for name in NAMES})
    return SimpleNamespace(_topology=[SimpleNamespace(metrics=metrics)])


@given(st.integers(0, 10_000))
def test_rests_grow_and_are_bounded(rounds: int) -> None:
    assert 0 < rest_s(rounds) <= rest_s(rounds + 1) <= LONGEST_S


@given(st.lists(st.sampled_from(("", *NAMES)), max_size=40))
def test_it_rests_exactly_after_rounds_in_which_nothing_happened(rounds: list[str]) -> None:
    rests: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unhurried.time, "sleep", rests.append)
        pace, numbers = Unhurried(), dict[str, int]()
        pace.on_execution_step(executor(numbers))
        idle = 0
        for moved in rounds:
            rests.clear()
            if moved:
                numbers[moved] = numbers.get(moved, 0) + 1
            pace.on_execution_step(executor(numbers))
            assert rests == ([] if moved else [rest_s(idle)])
            idle = 0 if moved else idle + 1


def test_of_another_ray_nothing_is_guessed(caplog: pytest.LogCaptureFixture) -> None:
    assert counts_of(SimpleNamespace()) is None
    assert "The feature that uses it is off" in caplog.text
    pace = Unhurried()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unhurried.time, "sleep", lambda _: pytest.fail("it rested"))
        for _ in range(3):
            pace.on_execution_step(SimpleNamespace())
