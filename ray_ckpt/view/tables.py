"""Aligned text tables for terminals and logs; colour only if asked, never as the only sign."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["", "good", "bad", "dim"]

_CODES = {"good": "32", "bad": "31", "dim": "2"}
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, and the side to which its cells are moved."""

    title: str
    align: Literal["left", "right"] = "left"


def render_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    styles: Sequence[Style] | None = None,
    colour: bool = False,
) -> str:
    """A table with a title line, columns as wide as their widest cell.

    Args:
        columns: left to right.
        rows: cells as text, one per column.
        styles: one per row; used only with `colour`.
        colour: whether to paint the rows with terminal codes.

    Returns:
        Lines without trailing blanks, joined by newlines, no newline at the end.

    Raises:
        ValueError: a row has another number of cells than there are columns.
    """
    titles = [column.title for column in columns]
    lines = [titles, *([printable(cell) for cell in row] for row in rows)]
    for line in lines:
        if len(line) != len(columns):
            raise ValueError(f"row of {len(line)} cells in a table of {len(columns)} columns")
    widths = [max(display_width(line[i]) for line in lines) for i in range(len(columns))]
    texts = [
        _GAP.join(
            _padded(cell, width, column.align)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    row_styles: Sequence[Style] = ["", *(styles or [""] * len(rows))]
    return "\n".join(
        paint(text, style, colour=colour) for text, style in zip(texts, row_styles, strict=True)
    )


def render_fields(pairs: Sequence[tuple[str, str]]) -> str:
    """Lines of `name  value`, the values aligned."""
    width = max((display_width(name) for name, _ in pairs), default=0)
    return "\n".join(
        f"{_padded(name, width, 'left')}{_GAP}{printable(value)}".rstrip() for name, value in pairs
    )


def paint(text: str, style: Style, *, colour: bool) -> str:
    """`text` in a style's colour, or as it is."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if colour and style else text


def wants_colour() -> bool:
    """Whether standard output is a terminal that shows colours, and nobody asked for none."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def printable(text: str) -> str:
    """Control characters as escapes: a file's name must not move the cursor or break a line."""
    return "".join(
        repr(char)[1:-1] if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char
        for char in text
    )


def display_width(text: str) -> int:
    """Terminal cells that a text takes: wide East Asian characters two, combining marks none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _padded(text: str, width: int, align: str) -> str:
    blanks = " " * (width - display_width(text))
    return blanks + text if align == "right" else text + blanks
