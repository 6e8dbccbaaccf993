"""What a step takes by itself, and how much longer beside an upload: of each attempt of a run, from its step lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from ray_ckpt.policy.slowdown import slowdown
from ray_ckpt.tracker.timeline import Mark, StepSpan


class Paces:
    """Medians of the times of steps.

    Args:
        steps: of each attempt, in order.
        marks: of the run.
    """

    def __init__(self, steps: Mapping[int, Sequence[StepSpan]], marks: Sequence[Mark]) -> None:
        uploads = _uploads(marks)
        self._beside = {number: _beside(spans, uploads) for number, spans in steps.items()}
        self._sizes = {
            mark.generation: int(mark.number("world_size"))
            for mark in marks
            if mark.kind == "attempt_started"
        }
        self._alone_s: dict[int, float] = {}
        self._shares: dict[int, float] = {}
        by_size: dict[int, list[float]] = defaultdict(list)
        beside, alone = [], []
        for number, spans in steps.items():
            slow, own = self._split(number, spans)
            if not own:
                continue
            typical_s = self._alone_s[number] = median(own)
            by_size[self._sizes.get(number, 0)].append(typical_s)
            share = slowdown(slow, own)
            if share is not None:
                self._shares[number] = share
            if typical_s > 0:
                beside += [each / typical_s for each in slow]
                alone += [each / typical_s for each in own]
        self._by_size = {size: median(found) for size, found in by_size.items()}
        # An attempt that is too short to tell is taken to be like the others.
        self._any_share = slowdown(beside, alone) or 0.0

    def _split(self, number: int, spans: Sequence[StepSpan]) -> tuple[list[float], list[float]]:
        """Times beside uploads and times of other steps; the first step of an attempt does more than others."""
        slow: list[float] = []
        own: list[float] = []
        for index, span in enumerate(spans[1:], 1):
            (slow if self._beside[number][index] else own).append(span.compute_s)
        return slow, own

    def typical_s(self, number: int) -> float | None:
        """Median time of a step that nothing disturbs, in an attempt or in others of its size; None if unknown."""
        return self._alone_s.get(number, self._by_size.get(self._sizes.get(number, 0)))

    def slowed_s(self, number: int, index: int, span: StepSpan) -> float:
        """Seconds that a step took longer because of an upload beside it."""
        if not self._beside[number][index]:
            return 0.0
        return span.compute_s * self._shares.get(number, self._any_share)


def _uploads(marks: Sequence[Mark]) -> list[tuple[float, float]]:
    """When something was being uploaded or copied, as stretches that do not touch, in order."""
    found = []
    for mark in marks:
        took_s = {"commit": "upload_s", "promote": "seconds"}.get(mark.kind)
        if took_s and mark.number(took_s):
            found.append((mark.t - mark.number(took_s), mark.t))
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(found):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _beside(spans: Sequence[StepSpan], uploads: Sequence[tuple[float, float]]) -> bytearray:
    """For each step whether an upload went on during more than half of it."""
    flags = bytearray(len(spans))
    first = 0
    for index, span in enumerate(spans):
        while first < len(uploads) and uploads[first][1] <= span.begin:
            first += 1
        shared_s, at = 0.0, first
        while at < len(uploads) and uploads[at][0] < span.end:
            shared_s += min(uploads[at][1], span.end) - max(uploads[at][0], span.begin)
            at += 1
        flags[index] = 2 * shared_s > span.end - span.begin > 0
    return flags
