"""A segment: a stretch of a run with one batch, one content of data and one order of samples.

A run has one segment, number 0, until somebody declares a change at a resume (``--change-at-resume``): other
data, weights, batch sizes, sequence length or window. From the step of the checkpoint that is resumed the run
is then in another segment, whose order begins at its own position 0::

    step of the run      1 ... 6 | 7 ... 12 |
    segment                    0 |        1 |
    its own step         0 ... 5 | 0 ...  5 |          own_step = step - start_step
    sample offset        10 .. 60| 80 .. 180|          start_offset + own_step * G of the segment

The order of segment 0 is that of (data, seed, batch). A later one draws from a seed of its own, made of the
run's seed and the segment's number (:func:`ray_ckpt.facts.order_of`): with the run's, a segment whose batch
alone changed would begin with the rows that the run began with. A number is given once. So an order is never
entered twice in the history of a checkpoint, whatever was fallen back to in between; this is what
:func:`place` sees to.

Pure: no clock, no disk. The tracker decides when to call it (:mod:`ray_ckpt.tracker.segments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

OPTIONS = (
    "--global-batch",
    "--micro-batch",
    "--seq-len",
    "--reading.window-groups",
    "--data (fingerprint of its content)",
)
"""What may change from one segment to the next: options as an error names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Where a segment begins, why, and what is trained in it.

    Attributes:
        number: of the segment; grows.
        start_step: steps of the run before it.
        start_offset: samples of the run before it.
        reason: why it was begun, in the words of whoever declared it; empty where nobody did.
        options: value of each of :data:`OPTIONS`, as far as it is known.
    """

    number: int = 0
    start_step: int = 0
    start_offset: int = 0
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("number", "start_step", "start_offset"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} of a segment is {value!r}, must be a count")
        if not isinstance(self.reason, str) or not isinstance(self.options, Mapping):
            raise ValueError(f"reason or options of segment {self.number} have a wrong type")
        if not self.number and (self.start_step or self.start_offset):
            raise ValueError(f"segment 0 starts at step {self.start_step}, must start at 0")

    def own_step(self, step: int) -> int:
        """Steps of the segment among the first ``step`` of the run: its order's own count."""
        return step - self.start_step

    def offset_at(self, step: int, global_batch: int) -> int:
        """Samples that the run has trained on after ``step`` steps; ``global_batch`` is the segment's."""
        return self.start_offset + self.own_step(step) * global_batch

    def mark(self) -> dict[str, Any]:
        """What a manifest says of the segment that its checkpoint was made in."""
        return {
            "number": self.number,
            "start_step": self.start_step,
            "start_offset": self.start_offset,
            "reason": self.reason,
        }

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {**self.mark(), "options": dict(self.options)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Segment:
        """Builds a segment from its mark or its document; what else is in there is left alone.

        Raises:
            ValueError: a wrong value.
        """
        names = ("number", "start_step", "start_offset", "reason", "options")
        return cls(**{name: document[name] for name in names if name in document})


FIRST = Segment()
"""The segment of a run in which nothing was ever changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a run is, among its segments.

    Attributes:
        segments: of the history that is gone on with; the last is the present one.
        cause: why they are others than before; empty when they are the same.
        changed: what changes where the present segment starts: option to (old, new).
    """

    segments: tuple[Segment, ...]
    cause: str = ""
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def segment(self) -> Segment:
        """The present one."""
        return self.segments[-1]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that both sides know and that differ: option to (old, new)."""
    return {k: (old[k], new[k]) for k in new if k in old and old[k] != new[k]}


def place(
    known: Sequence[Segment],
    options: Mapping[str, Any],
    reason: str,
    *,
    step: int,
    offset: int,
    origin: Segment | None,
) -> Placement:
    """Which segment a run is in that goes on from a checkpoint.

    - Other options than those of the newest segment: a new segment starts at the checkpoint.
    - A checkpoint of the newest segment: it goes on where the checkpoint has it.
    - One from before the newest segment: this one starts (again) at the checkpoint.
    - No checkpoint: nothing was kept, the run begins, and its segment is the first.

    Args:
        known: the segments so far, oldest first; at least one.
        options: of the start that is made now.
        reason: why they are others, if they are.
        step: of the checkpoint.
        offset: samples of the checkpoint.
        origin: mark of the segment that the checkpoint was made in; None for no checkpoint.
    """
    newest = known[-1]
    changed = differences(newest.options, options)
    meant = {**newest.options, **options} if changed else newest.options
    if origin is None:
        first = Segment(reason=reason if changed else newest.reason, options=meant)
        if not changed and newest.number == 0:
            return Placement(segments=(newest,))
        return Placement(
            segments=(first,), cause="nothing was kept yet: the run begins", changed=changed
        )
    made_in = _as_made(known, origin)
    if changed:
        number = 1 + max(newest.number, origin.number)
        cause = "declared for this resume"
    elif origin.number >= newest.number:
        segments = _line([*known, made_in], made_in)
        if segments == tuple(known):
            return Placement(segments=segments)
        return Placement(
            segments=segments, cause="the checkpoint is of the segment with this beginning"
        )
    else:
        number, reason = newest.number, newest.reason
        changed = differences(made_in.options, newest.options)
        cause = "the checkpoint is from before the segment, which starts from it"
    present = Segment(
        number=number, start_step=step, start_offset=offset, reason=reason, options=meant
    )
    segments = _line([*(s for s in known if s.number < made_in.number), made_in], present)
    if segments == tuple(known):
        return Placement(segments=segments)
    return Placement(segments=segments, cause=cause, changed=changed)


def _as_made(known: Sequence[Segment], origin: Segment) -> Segment:
    """The segment of a checkpoint, with the beginning that it had there."""
    found = [s for s in known if s.number == origin.number]
    if found:
        return replace(found[0], start_step=origin.start_step, start_offset=origin.start_offset)
    # A record that was made anew knows the present options alone, and they are those of the checkpoint.
    options = known[-1].options if origin.number > known[-1].number else {}
    return replace(origin, options=options)


def _line(older: Sequence[Segment], present: Segment) -> tuple[Segment, ...]:
    """The segments that ``present`` comes after: older ones, in which at least a step was made."""
    line = [present]
    for segment in sorted(older, key=lambda s: s.number, reverse=True):
        if segment.number < line[0].number and segment.start_step < line[0].start_step:
            line.insert(0, segment)
    return tuple(line)
