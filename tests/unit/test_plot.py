"""Charts: what is in them is where it should be, and can be told apart without colour."""

from __future__ import annotations

import itertools
import re

import pytest

from ray_ckpt.view.plot import PATTERNS, Axis, Line, Mark, plot

X = Axis(title="days", low=0.0, high=10.0, words=lambda v: f"{v:g}")
Y = Axis(title="waste", low=0.0, high=1.0, words=lambda v: f"{v:g}")


def test_texts_are_never_markup() -> None:
    text = plot(
        "<b>", X, Y, [Line(name="<script>", points=[(0, 0)])], [Mark(sign="<i>", at=(1, 1))]
    )
    assert "<script>" not in text
    assert "<b>" not in text
    assert "<i>" not in text


def test_names_stand_below_each_other_and_inside_the_frame() -> None:
    lines = [Line(name=f"n{i}", points=[(0, 0.5), (10, 0.01 * i)]) for i in range(6)]
    text = plot("l", X, Y, lines)
    heights = sorted(float(y) for y in re.findall(r'y="([\d.]+)">n\d<', text))
    assert len(heights) == 6
    assert all(b - a >= 12.9 for a, b in itertools.pairwise(heights))
    assert heights[-1] <= 290
    assert len(set(re.findall(r"line (pattern\d)", text))) == PATTERNS


def test_values_beyond_an_axis_stay_at_its_end() -> None:
    assert X.place(-5) == 0
    assert X.place(50) == 1
    log = Axis(title="", low=60.0, high=6000.0, words=str, log=True, unit=60.0)
    assert log.place(600) == pytest.approx(0.5)
    assert log.ticks(20) == [60, 120, 300, 600, 1200, 3000, 6000]
    assert X.ticks(5) == [0, 2, 4, 6, 8, 10]
