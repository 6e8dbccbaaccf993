"""Where the wall time of a run went: a fold over its journal and its step lines. No clock, no disk.

A run is a sequence of marks (:mod:`ray_ckpt.tracker.timeline`); a cursor moves from each to the next, and the time
between two of them goes into one bucket (:data:`ray_ckpt.tracker.buckets.BUCKETS`). So the buckets sum to the wall
time by construction, and none is negative. In the order in which it happens::

    submit ............... tracker_started   start; in a later job restart_reschedule, and idle before it
    tracker_started or
    interruption ......... first wish        restart_reschedule: group asked for, after a wait for fast failures
    first wish ........... last wish         waiting_for_resources: no room, or a group that did not come up
    last wish ............ workers up        restart_start_workers
    workers up ........... group_started     restart_process_group
    group_started ........ attempt_started   restart_start_workers: imports, the model is built
    attempt_started ...... restored          restart_restore; buffers for saving too, up to the first step
    first step line       data_wait_s        restart_data_seek
                          more than a step   restart_first_step
                          the rest           useful, or rework
    a step line           between_s          evaluation: from step_end() to the next batch()
                          data_wait_s        data_wait
                          beside an upload   slowdown: the share by which such steps are slower
                          the rest           useful, or rework
    step line ............ next step begins  evaluation (validation_s of the commit), then stall
                                             unknown where lines of steps are missing
    last step line ....... noticed           restart_detect; stall where the end was planned, or the run is finished
    noticed .............. interruption      restart_reschedule
    the job died ......... next submit       idle

Up to the first step of a run all of its own time is ``start``. ``rework`` is known only afterwards: a step is rework
when a later attempt began before it. What old records do not tell is ``unknown``: from an interruption to the next
attempt before there was ``group_started``.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ray_ckpt.policy.audit import audit
from ray_ckpt.tracker.buckets import Book, Ledger
from ray_ckpt.tracker.lost_steps import LOST, LostSteps
from ray_ckpt.tracker.memory import PLANNED, RunMemory
from ray_ckpt.tracker.paces import Paces
from ray_ckpt.tracker.timeline import (
    Mark,
    StepSpan,
    attempts_of,
    place_marks,
    place_steps,
    submit_of,
)

Parts = list[tuple[str, float]]


def make_ledger(
    events: Iterable[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]]
) -> Ledger | None:
    """The ledger of a run.

    Args:
        events: lines of its journal.
        lines: of executed steps.

    Returns:
        None for a run that has not begun.
    """
    events = list(events)
    marks = place_marks(events)
    if not marks:
        return None
    memory = RunMemory()
    for event in events:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            memory.apply(dict(event))
    book = _Fold(marks, place_steps(lines, marks)).book
    total = book.total
    rework_s, uploads_s = total["rework"], memory.upload_s or 0.0
    verdict = "nothing was trained yet"
    if total["useful"] > 0:
        verdict = audit(
            total["useful"],
            total["stall"] + total["slowdown"],
            rework_s,
            memory.failures,
            min(rework_s, memory.failures * uploads_s),
        ).reason
    return Ledger(
        wall_s=book.cursor - book.begin,
        buckets=total,
        by_attempt=book.by_attempt,
        by_day=book.by_day,
        rework_by_cause=book.rework_by_cause,
        restarts=tuple(book.restarts),
        interruptions=Counter(memory.interruptions),
        lost_steps=memory.lost_steps,
        reason=verdict,
    )


class _Fold:
    """Moves the cursor over all marks.

    Args:
        marks: of the run, at least one.
        steps: of each attempt.
    """

    def __init__(self, marks: Sequence[Mark], steps: Mapping[int, Sequence[StepSpan]]) -> None:
        self._marks, self._steps = marks, steps
        self._paces = Paces(steps, marks)
        self._lost = LostSteps(marks)
        saves = {(m.generation, m.event.get("step")): m for m in marks if m.kind == "commit"}
        self._validation_s = {key: mark.number("validation_s") for key, mark in saves.items()}
        self._stall_s = {key: mark.number("stall_s") for key, mark in saves.items()}
        dates = [float(mark.event["time"]) - mark.t for mark in marks]
        first = marks[0]
        begin = first.t - first.number("submitted_ago_s")
        # The date by most lines: a clock that was wrong for a while must not move the days.
        self.book = Book(begin, median(dates) if dates else None)
        self._began = False  # whether a first step was done, or a first attempt ended
        # Attempt and number of the last step, as long as training goes on.
        self._step: tuple[int, int] | None = None
        self._open = "start"
        self._is_known = False  # whether what happens up to the next attempt is told
        self._guessed = False  # whether nobody has told yet how the last attempt ended
        self._coming = attempts_of(marks)
        for index, mark in enumerate(marks):
            self._attempt = self._coming[index]
            getattr(self, f"_on_{mark.kind}", lambda *_: None)(index, mark)
        self._end()

    def _until(self, t: float, bucket: str) -> None:
        own = self._began or bucket in ("waiting_for_resources", "idle")
        self.book.until(t, bucket if own else "start", self._attempt)

    # ---- between attempts -----------------------------------------------------------------------

    def _on_tracker_started(self, index: int, mark: Mark) -> None:
        submit = submit_of(self._marks, index)
        if submit is None:
            return  # the tracker died, and not its job
        if index:
            self._until(submit, "idle")
            self._surely_left()
        self._is_known = "submitted_ago_s" in mark.event
        self._open = "restart_reschedule"
        self._until(mark.t, self._open)

    def _on_group_started(self, index: int, mark: Mark) -> None:
        asked = mark.t - mark.number("asked_ago_s")
        wished = asked - mark.number("waited_s")
        self._until(wished, "restart_detect" if self._surely_left() else "restart_reschedule")
        self._until(asked, "waiting_for_resources")
        self._until(mark.t - mark.number("workers_ago_s"), "restart_start_workers")
        self._until(mark.t, "restart_process_group")
        self._open, self._is_known = "restart_start_workers", True

    def _on_attempt_started(self, index: int, mark: Mark) -> None:
        self._surely_left()
        self._until(mark.t, "restart_start_workers" if self._is_known else "unknown")
        self._open, self._guessed = "restart_restore", False
        if self.book.restart is not None:
            self.book.restart.attempt = mark.generation
            self.book.restart.world_size = int(mark.number("world_size"))

    def _on_interruption(self, index: int, mark: Mark) -> None:
        kind = str(mark.event.get("kind"))
        if self._guessed and self.book.restart is not None and not mark.event.get("group"):
            # Told by the attempt that came after: the end itself was long before.
            self.book.restart.kind, self._guessed = kind, False
            return
        noticed = mark.t - mark.number("noticed_ago_s")
        ended = self._step
        if ended is None:
            self._until(mark.t, self._open)
        elif kind in PLANNED:
            self._pause(mark.t, *ended)
        else:
            known_s = self._validation_s.get(ended, 0.0) + self._stall_s.get(ended, 0.0)
            self._pause(min(noticed, self.book.cursor + known_s), *ended)
        self._leave(kind)
        if ended is not None and kind == LOST:
            self._until(mark.t, "unknown")  # it died at some time, and at some time came again
        self._until(noticed, "restart_detect")
        self._until(mark.t, "restart_reschedule")

    def _surely_left(self) -> bool:
        """A new attempt is on its way: ends the one before, if nobody told its end; whether that was so."""
        if not self._began or (self._step is None and self.book.restart is not None):
            return False
        self._leave("finished" if self._open == "idle" else LOST, guessed=True)
        return True

    def _leave(self, kind: str, *, guessed: bool = False) -> None:
        """An attempt is over."""
        self._began, self._step, self._guessed = True, None, guessed
        self._open, self._is_known = "restart_reschedule", False
        self.book.begin_restart(kind)

    def _on_finished(self, index: int, mark: Mark) -> None:
        if self._step is not None:
            self._pause(mark.t, *self._step)
        else:
            self._until(mark.t, self._open)
        self._step, self._open, self._began = None, "idle", True
        self.book.end_restart()

    def _end(self) -> None:
        """Up to the last sign of life."""
        last = self._marks[-1].t
        if self._step is not None:
            self._until(last, "unknown")  # in the midst of a step
        elif self._open != "idle":
            self._until(last, self._open)

    # ---- in an attempt --------------------------------------------------------------------------

    def _on_restored(self, index: int, mark: Mark) -> None:
        if self._surely_left():
            self._open = "unknown"
        self._until(mark.t, self._open)
        self._open = "restart_data_seek"
        number, limit = mark.generation, self._limit(index)
        later = self._lost.after(index)
        before: StepSpan | None = None
        for place, span in enumerate(self._steps.get(number, ())):
            begin = min(span.begin, limit)
            if begin >= limit:
                break
            late_s = 0.0
            if before is None:
                self._until(begin, "restart_restore")
                parts = self._first_parts(number, span)
            else:
                if span.step != before.step + 1:
                    self._until(begin, "unknown")
                else:
                    late_s = self._pause(begin, number, before.step)
                parts = self._parts(number, place, span, late_s)
            self._take(span, min(span.end, limit), parts, later)
            self._step, before = (number, span.step), span

    def _pause(self, t: float, attempt: int, step: int) -> float:
        """Books the time after a step; returns what of its save's stall was not then, but in the next step."""
        key, begin = (attempt, step), self.book.cursor
        self._until(min(t, begin + self._validation_s.get(key, 0.0)), "evaluation")
        stood = max(0.0, t - self.book.cursor)
        self._until(t, "stall")
        return max(0.0, self._stall_s.get(key, 0.0) - stood)

    def _first_parts(self, number: int, span: StepSpan) -> Parts:
        typical_s = self._paces.typical_s(number)
        more_s = max(0.0, span.compute_s - typical_s) if typical_s is not None else 0.0
        return [
            ("restart_first_step", span.between_s),
            ("restart_data_seek", span.wait_s),
            ("restart_first_step", more_s),
        ]

    def _parts(self, number: int, place: int, span: StepSpan, late_s: float) -> Parts:
        slow_s = self._paces.slowed_s(number, place, span)
        typical_s = self._paces.typical_s(number) or span.compute_s
        # Copies beside a step are waited for in it. The wait is that of the slowest worker: no more than is there.
        late_s = min(late_s, max(0.0, span.compute_s - slow_s - typical_s))
        return [
            ("evaluation", span.between_s),
            ("data_wait", span.wait_s),
            ("stall", late_s),
            ("slowdown", slow_s),
        ]

    def _take(
        self, span: StepSpan, end: float, parts: Parts, later: Sequence[tuple[int, str]]
    ) -> None:
        """Books one step: its parts, and what is left of it."""
        begin = max(span.begin, self.book.cursor)
        # Less than it took where the records contradict each other: then all its parts are less.
        scale = (end - begin) / (span.end - span.begin) if end > begin else 0.0
        at = begin
        for bucket, seconds in parts:
            at = min(end, at + scale * seconds)
            self._until(at, bucket)
        self._began = True
        self.book.end_restart()
        cause = next((kind for step, kind in later if step < span.step), "")
        self.book.until(end, "rework" if cause else "useful", self._attempt, cause)

    def _limit(self, index: int) -> float:
        """When the attempt that was restored is over at the latest."""
        for at in range(index + 1, len(self._marks)):
            mark = self._marks[at]
            if mark.kind in ("interruption", "finished", "attempt_started"):
                return mark.t
            if mark.kind == "tracker_started":
                submit = submit_of(self._marks, at)
                if submit is not None:
                    return submit
        return math.inf
