"""Holes in the order of a run: global batches that are not trained on, because the run broke on them.

Step i of a run (counted from 0) takes the i-th global batch of the order, until batches are skipped; from then
on it takes a later one. Steps and samples still count what was trained. What a run skips is in its journal, and
in the manifest of every checkpoint made since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """One hole.

    Attributes:
        from_step: finished steps of the run at which the hole is: the next step jumps over it.
        steps: global batches that are left out.
    """

    from_step: int
    steps: int

    def __post_init__(self) -> None:
        for name, value, least in (("from_step", self.from_step, 0), ("steps", self.steps, 1)):
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{name} of a skip is {value!r}, must be a whole number from {least}"
                )


def position_of_step(step: int, skips: Sequence[Skip]) -> int:
    """The global batch of the order that a run takes after ``step`` finished steps."""
    return step + sum(skip.steps for skip in skips if skip.from_step <= step)


def skip_past(skips: Sequence[Skip], back_to: int, bad_step: int) -> tuple[Skip, ...]:
    """What a run skips that goes back to ``back_to`` and leaves out all it trained on up to ``bad_step``.

    Args:
        skips: in force so far.
        back_to: finished steps of the checkpoint that is restored.
        bad_step: step, counted from 1, that must not be repeated; later than ``back_to``.
    """
    # A hole at or after the place that the run goes back to is part of the new one.
    kept = tuple(skip for skip in skips if skip.from_step < back_to)
    following = position_of_step(bad_step - 1, skips) + 1
    return (
        *kept,
        Skip(from_step=back_to, steps=following - position_of_step(back_to, kept)),
    )


def stretches(start: int, stop: int, skips: Sequence[Skip]) -> Iterator[tuple[int, int]]:
    """The global batches of the steps in ``[start, stop)``, as ranges of the order without holes."""
    holes = sorted({skip.from_step for skip in skips if start < skip.from_step < stop})
    for first, end in zip([start, *holes], [*holes, stop], strict=True):
        if first < end:
            shift = position_of_step(first, skips) - first
            yield first + shift, end + shift
