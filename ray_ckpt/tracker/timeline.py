"""The journal and the step lines of a run on one axis of time, whatever the clocks did meanwhile.

Each line of the journal has the date and, since the tracker writes it, a steady clock (``monotonic``) that no one
sets; the lines that begin a life of the tracker or an attempt name the boot whose clock it is. Between two lines of one
boot the steady clock counts; from one machine to another, and in journals from before there was a steady clock, the
date does. A date that went backwards counts as no time.

Step lines are written by rank 0, which may be on another machine. Its steady clock is tied to the axis where the
attempt begins: ``restored`` has both (``monotonic`` of the tracker, ``worker_monotonic`` of rank 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# What only the run's own processes write while it lives. Pins, deletions and drills may come by hand, a year later.
MARKS = frozenset(
    {
        "tracker_started",
        "group_started",
        "attempt_started",
        "restored",
        "decision",
        "commit",
        "promote",
        "save_failed",
        "save_requested",
        "interruption",
        "finished",
    }
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of the journal, and when it was written: seconds on the axis of the run."""

    t: float
    event: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Which event it is."""
        return str(self.event["event"])

    @property
    def generation(self) -> int:
        """Attempt that the line names; 0 for none."""
        found = self.event.get("generation")
        return found if isinstance(found, int) else 0

    def number(self, field: str, default: float = 0.0) -> float:
        """A field that is a number and not negative, else ``default``."""
        return number(self.event, field, default)


class StepSpan(NamedTuple):
    """An executed step: its number, from when to when, and what of that was no computing, seconds."""

    step: int
    begin: float
    end: float
    wait_s: float
    between_s: float

    @property
    def compute_s(self) -> float:
        """What is left."""
        return max(0.0, self.end - self.begin - self.wait_s - self.between_s)


def number(line: Mapping[str, Any], field: str, default: float = 0.0) -> float:
    """A field of a line that is a number and not negative, else ``default``."""
    found = _finite(line, field)
    return found if found is not None and found >= 0 else default


def _finite(line: Mapping[str, Any], field: str) -> float | None:
    found = line.get(field)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def place_marks(events: Iterable[Mapping[str, Any]]) -> list[Mark]:
    """The marks of a journal, in order, the first at 0; times never fall."""
    marks: list[Mark] = []
    boot: str | None = None
    t, before = 0.0, None
    for event in events:
        if event.get("event") not in MARKS or _finite(event, "time") is None:
            continue
        named = event.get("boot")
        # A tracker from before there were boots, on whatever machine: its lines have no steady clock either.
        new_boot = boot if named is None else str(named)
        if before is not None:
            t += _between(before, event, same_boot=new_boot == boot)
        boot, before = new_boot, event
        marks.append(Mark(t, event))
    return marks


def _between(before: Mapping[str, Any], event: Mapping[str, Any], *, same_boot: bool) -> float:
    old, new = _finite(before, "monotonic"), _finite(event, "monotonic")
    # A steady clock that fell is another one: a line that named it is lost.
    if same_boot and old is not None and new is not None and new >= old:
        return new - old
    return max(0.0, float(event["time"]) - float(before["time"]))


def place_steps(
    lines: Iterable[Mapping[str, Any]], marks: Sequence[Mark]
) -> dict[int, list[StepSpan]]:
    """The executed steps of each attempt, in order, on the axis of its marks.

    A line that was written twice, because the answer to the first was lost, counts once.
    """
    anchors: dict[int, Mark] = {}
    for mark in marks:
        if mark.kind == "restored" or (
            mark.kind == "attempt_started" and mark.generation not in anchors
        ):
            anchors[mark.generation] = mark
    spans: dict[int, list[StepSpan]] = {}
    for line in lines:
        generation, step = line.get("generation"), line.get("step")
        anchor = anchors.get(generation) if isinstance(generation, int) else None
        if anchor is None or not isinstance(step, int) or "step_time_s" not in line:
            continue
        found = spans.setdefault(anchor.generation, [])
        if found and step <= found[-1].step:
            continue
        took_s = number(line, "step_time_s")
        end = _when(line, anchor)
        if end is None:
            end = (found[-1].end if found else anchor.t) + took_s
        wait_s = min(number(line, "data_wait_s"), took_s)
        between_s = min(number(line, "between_s"), took_s - wait_s)
        found.append(StepSpan(step, end - took_s, end, wait_s, between_s))
    return spans


def _when(line: Mapping[str, Any], anchor: Mark) -> float | None:
    """When a step ended; None where its line tells no time."""
    for field, zero in (("monotonic", "worker_monotonic"), ("time", "time")):
        found, start = _finite(line, field), _finite(anchor.event, zero)
        if found is not None and start is not None:
            return anchor.t + found - start
    return None


def submit_of(marks: Sequence[Mark], index: int) -> float | None:
    """When the job was submitted whose tracker starts here; None when it was only the tracker that died."""
    mark = marks[index]
    if "submitted_ago_s" in mark.event:
        submit = mark.t - mark.number("submitted_ago_s")
        before = next((m for m in reversed(marks[:index]) if m.kind == "tracker_started"), None)
        return submit if before is None or submit > before.t else None
    # A tracker from before that was told: a new job has a new attempt.
    after = next((m.kind for m in marks[index + 1 :] if m.kind != "decision"), "")
    return mark.t if not index or after in ("attempt_started", "interruption") else None


def attempts_of(marks: Sequence[Mark]) -> list[int]:
    """For each mark the attempt that its time belongs to: the present one, or the next on the way there."""
    found = [0] * len(marks)
    coming = max((mark.generation for mark in marks), default=0)
    on_the_way = False
    for index in range(len(marks) - 1, -1, -1):
        mark = marks[index]
        if mark.kind == "attempt_started":
            coming, on_the_way = mark.generation, True
        elif mark.kind in ("restored", "finished") or (
            # One without a group's name is told by the attempt that comes, when the way to it is nearly over.
            mark.kind == "interruption" and mark.event.get("group")
        ):
            on_the_way = False
        found[index] = coming if on_the_way else mark.generation
    return found
