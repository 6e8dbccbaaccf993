"""Which executed steps of a run were lost, and to which kind of interruption."""

from __future__ import annotations

from collections.abc import Sequence

from ray_ckpt.tracker.timeline import Mark

# What ended an attempt, when no one told: the job died.
LOST = "lost"


class LostSteps:
    """Which steps were lost: later attempts began before them.

    Args:
        marks: of the run.
    """

    def __init__(self, marks: Sequence[Mark]) -> None:
        cuts: list[tuple[int, int, str]] = []
        kind, waiting = LOST, []
        for index, mark in enumerate(marks):
            if mark.kind == "interruption":
                kind = str(mark.event.get("kind"))
                kept = mark.number("step") - mark.number("lost_steps")
                waiting.append((index, int(kept), kind))  # as long as nothing was restored after it
            elif mark.kind == "restored":
                cuts.append((index, int(mark.number("step")), kind))
                waiting.clear()
        self._cuts = cuts + waiting

    def after(self, index: int) -> list[tuple[int, str]]:
        """Where the attempts after a mark began, as far as that is before those in between; and why they had to."""
        found: list[tuple[int, str]] = []
        for at, step, kind in self._cuts:
            if at > index and (not found or step < found[-1][0]):
                found.append((step, kind))
        return found
