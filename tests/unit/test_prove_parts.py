"""Scripts of events, and the comparison of two runs."""

from __future__ import annotations

import math

import pytest

from ray_ckpt.errors import ConfigError
from ray_ckpt.prove.compare import EXACT_KEYS, LOOSE_KEYS, compare_states, compare_steps
from ray_ckpt.prove.script import parse_script


def test_a_script_says_worlds_steps_and_events() -> None:
    script = parse_script("4x10 kill 2x7 resize 3x5 stop 1x2")
    assert script.worlds == (4, 2, 3, 1)
    assert script.ends == (10, 17, 22, 24)
    assert [phase.event for phase in script.phases] == ["kill", "resize", "stop", ""]
    assert parse_script(str(script)) == script
    assert len(set(parse_script("same").worlds)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least two phases"),
        ("4x10", "at least two phases"),
        ("4x10 kill", "at least two phases"),
        ("4x10 explode 2x3", "'explode' is no event"),
        ("4x10 2x3", "'2x3' is no event"),
        ("0x10 kill 2x3", "'0x10' should be WORKERSxSTEPS"),
        ("4x0 kill 2x3", "'4x0' should be"),
        ("four kill 2x3", "'four' should be"),
    ],
)
def test_a_wrong_script_is_refused_with_the_word_that_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", "\\(")):
        parse_script(text)


def history(**changes: object) -> dict[int, dict[str, object]]:
    base = {key: f"{key} of a step" for key in EXACT_KEYS} | {"loss": 2.0}
    return {step: dict(base) | (changes if step == 3 else {}) for step in range(1, 6)}


@pytest.mark.parametrize("key", EXACT_KEYS)
def test_a_difference_in_any_quantity_is_found_at_its_step(key: str) -> None:
    found = compare_steps(history(), history(**{key: "other"}), EXACT_KEYS)
    assert [(d.step, d.what) for d in found] == [(3, key)]
    assert compare_steps(history(), history(), EXACT_KEYS) == []


def test_a_missing_step_is_a_difference() -> None:
    shorter = history()
    del shorter[4]
    found = compare_steps(history(), shorter, EXACT_KEYS)
    assert [(d.step, d.what) for d in found] == [(4, "step")]


def test_a_loss_is_held_to_its_tolerance_and_nan_is_never_within_it() -> None:
    assert compare_steps(history(), history(loss=2.01), LOOSE_KEYS, 0.02) == []
    assert [d.what for d in compare_steps(history(), history(loss=2.03), LOOSE_KEYS, 0.02)] == [
        "loss"
    ]
    assert [d.what for d in compare_steps(history(), history(loss=math.nan), LOOSE_KEYS, 9.0)] == [
        "loss"
    ]
    # The same bits may be NaN: two runs that broke in the same way are the same run.
    assert compare_steps(history(grad_norm=math.nan), history(grad_norm=math.nan), EXACT_KEYS) == []


def test_a_part_of_the_state_that_differs_or_is_missing_is_named() -> None:
    found = compare_states(
        9, {"model": "a", "optimizer": "b"}, {"model": "a", "optimizer": "c", "x": "d"}
    )
    assert [(d.step, d.what) for d in found] == [(9, "optimizer"), (9, "x")]
