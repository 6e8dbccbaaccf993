"""What people read: aligned, plain text first, and numbers without surprises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.view.human import ago, human_bytes, human_count, human_duration
from ray_ckpt.view.tables import (
    Column,
    display_width,
    paint,
    printable,
    render_fields,
    render_table,
)

COLUMNS = [Column("STEP", "right"), Column("STATE")]


def test_columns_are_as_wide_as_their_widest_cell():
    text = render_table(COLUMNS, [["7", "committed"], ["120000", "ok"]])
    assert text.splitlines() == [
        "  STEP  STATE",
        "     7  committed",
        "120000  ok",
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.text(max_size=8), min_size=2, max_size=2), max_size=5))
def test_every_row_is_one_line_and_columns_align(rows):
    lines = render_table([Column("A", "right"), Column("B")], rows).split("\n")
    assert len(lines) == len(rows) + 1
    width = max([1, *(display_width(printable(row[0])) for row in rows)])
    for line, (_, right) in zip(lines[1:], rows, strict=True):
        head = line.removesuffix(printable(right).rstrip())
        assert display_width(head.rstrip()) <= width


def test_wide_characters_take_two_cells():
    assert display_width("検証") == 4
    lines = render_table([Column("A"), Column("B")], [["検証", "x"], ["abcd", "y"]]).splitlines()
    assert lines[1:] == ["検証  x", "abcd  y"]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="row of 1 cells"):
        render_table(COLUMNS, [["7"]])


def test_colour_only_when_asked_and_never_alone():
    rows, styles = [["7", "DAMAGED"]], ["bad"]
    plain = render_table(COLUMNS, rows, styles=styles)
    painted = render_table(COLUMNS, rows, styles=styles, colour=True)
    assert "\x1b" not in plain
    assert painted.replace("\x1b[31m", "").replace("\x1b[0m", "") == plain
    assert "DAMAGED" in plain
    assert paint("x", "good", colour=False) == "x"


@pytest.mark.parametrize("bad", ["\x1b[2J", "a\nb", "\r", "\x07", "\u202e", "\udcff", "\u2028"])
def test_a_name_cannot_command_the_terminal(bad):
    text = render_fields([("file", bad)])
    assert len(text.splitlines()) == 1
    assert bad not in text
    text.encode()  # a lone surrogate would end the listing


def test_fields_are_aligned():
    assert render_fields([("a", "1"), ("long", "2")]) == "a     1\nlong  2"
    assert render_fields([]) == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 2**20, "1.5 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (-2048, "-2.0 KiB"),
        (2**70, "1048576.0 PiB"),
    ],
)
def test_bytes(num_bytes, text):
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1.0k"),
        (1234, "1.2k"),
        (999_960, "1.0M"),
        (12.4e6, "12.4M"),
        (7e9, "7.0B"),
    ],
)
def test_counts(count, text):
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00s"),
        (0.07, "0.07s"),
        (0.997, "1.0s"),
        (4.21, "4.2s"),
        (9.97, "10s"),
        (59.6, "1m 00s"),
        (200, "3m 20s"),
        (3599.7, "1h 00m"),
        (7500, "2h 05m"),
        (273_600, "3d 04h"),
        (-5, "-5.0s"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_durations(seconds, text):
    assert human_duration(seconds) == text


def test_ages_also_of_a_clock_that_runs_ahead():
    assert ago(1000.0, 1200.0) == "3m 20s ago"
    assert ago(1000.0, 1000.4) == "just now"
    assert ago(1060.0, 1000.0) == "1m 00s ahead"


@given(st.floats(0, 1e14))  # beyond 999.9T there is no larger unit
def test_human_numbers_never_print_a_full_unit(value):
    assert not human_count(value).startswith("1000")
    assert not human_bytes(value).startswith("1024")
