"""A chart as SVG text: lines with bands, and marks. Every line has a pattern and its name at its end: no colour needed.

Texts are escaped here; numbers are whatever the caller gives. Size and colours are those of ``static/plot.css``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDE, NARROW = 1180, 640
"""Widths, for the whole page and for half of it: texts are as large as the page's in both."""

_HEIGHT = 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 236, 26, 40
_LABEL_HEIGHT = 13
PATTERNS = 6
"""Patterns of lines that ``static/plot.css`` knows."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A curve.

    Attributes:
        name: at its end.
        points: x and y, by x.
        low: lower edge of its band, as points; may be empty.
        high: upper edge.
    """

    name: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A sign at a place."""

    sign: str
    at: Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One direction.

    Attributes:
        title: with the unit.
        low: at one end.
        high: at the other; values beyond are cut off.
        words: a value as text.
        log: whether equal factors are equally long.
        unit: of the round values, as 60 for minutes.
    """

    title: str
    low: float
    high: float
    words: Callable[[float], str]
    log: bool = False
    unit: float = 1.0

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Round values: on a logarithmic axis 1, 2 and 5 of each power of ten."""
        if self.log:
            first = math.floor(math.log10(self.low / self.unit))
            last = math.ceil(math.log10(self.high / self.unit))
            values = [d * 10.0**n * self.unit for n in range(first, last + 1) for d in (1, 2, 5)]
            inside = [value for value in values if self.low <= value <= self.high]
            return inside[:: 1 + len(inside) // (most + 1)]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(d * power for d in (1, 2, 5, 10) if d * power >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def plot(
    label: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    width: int = WIDE,
) -> str:
    """The chart.

    Args:
        label: what it shows, for those who do not see it.
        x: to the right.
        y: upwards.
        lines: at most as many as there are patterns look different.
        marks: drawn above the lines.
        width: of the picture; it is as wide as there is room.
    """
    frame = _Frame(x, y, width)
    bands = [frame.band(line, n) for n, line in enumerate(lines) if line.low]
    paths = [frame.path(line.points, f"line pattern{n % PATTERNS}") for n, line in enumerate(lines)]
    signs = [
        f'<text class="mark" x="{px:.1f}" y="{py + 5:.1f}" text-anchor="middle">{escape(mark.sign)}</text>'
        for mark in marks
        for px, py in [frame.at(mark.at)]
    ]
    parts = [*frame.axes(), *bands, *paths, *frame.names(lines), *signs]
    head = f'<svg class="plot" viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


class _Frame:
    """Where values are in the picture."""

    def __init__(self, x: Axis, y: Axis, width: int) -> None:
        self._x, self._y = x, y
        self._right, self._base = width - _RIGHT, _HEIGHT - _BOTTOM

    def at(self, point: Point) -> Point:
        return (
            _LEFT + self._x.place(point[0]) * (self._right - _LEFT),
            self._base - self._y.place(point[1]) * (self._base - _TOP),
        )

    def path(self, points: Sequence[Point], style: str) -> str:
        return f'<path class="{style}" d="{self._trail(points)}"/>'

    def _trail(self, points: Sequence[Point]) -> str:
        places = [self.at(point) for point in points]
        return "".join(f"{'L' if n else 'M'}{px:.1f} {py:.1f}" for n, (px, py) in enumerate(places))

    def band(self, line: Line, number: int) -> str:
        there, back = self._trail(line.high), self._trail(list(reversed(line.low)))
        edge = f"band pattern{number % PATTERNS}"
        return f'<path class="{edge}" d="{there}{back.replace("M", "L", 1)}Z"/>'

    def axes(self) -> list[str]:
        found = []
        for value in self._y.ticks(6):
            _, py = self.at((self._x.low, value))
            found.append(
                f'<line class="axis" x1="{_LEFT}" x2="{self._right}" y1="{py:.1f}" y2="{py:.1f}"/>'
                f'<text x="{_LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{escape(self._y.words(value))}</text>'
            )
        for value in self._x.ticks(8):
            px, _ = self.at((value, self._y.low))
            found.append(
                f'<line class="axis" x1="{px:.1f}" x2="{px:.1f}" y1="{self._base}" y2="{self._base + 4}"/>'
                f'<text x="{px:.1f}" y="{self._base + 16}" text-anchor="middle">'
                f"{escape(self._x.words(value))}</text>"
            )
        middle = (_LEFT + self._right) / 2
        found.append(
            f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(self._x.title)}</text>'
            f'<text x="0" y="12">{escape(self._y.title)}</text>'
        )
        return found

    def names(self, lines: Sequence[Line]) -> list[str]:
        """Names at the ends, none above another."""
        ends = sorted((self.at(line.points[-1])[1], n) for n, line in enumerate(lines))
        found, floor = [], _TOP - _LABEL_HEIGHT / 2
        spare = self._base - _LABEL_HEIGHT * (len(ends) - 1)
        for above, (py, n) in enumerate(ends):
            floor = max(floor + _LABEL_HEIGHT, min(py, spare + above * _LABEL_HEIGHT))
            found.append(
                f'<path class="line pattern{n % PATTERNS}" d="M{self._right + 4} {floor:.1f}h22"/>'
                f'<text x="{self._right + 30}" y="{floor + 4:.1f}">{escape(lines[n].name)}</text>'
            )
        return found
