"""The buckets of wall time, and what was put into them: in all, by attempt, by day, by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

DAY_S = 86400.0

# In the order in which people read them.
BUCKETS: Mapping[str, str] = {
    "useful": "steps that counted",
    "rework": "steps that were lost, and done again",
    "stall": "training stood still for a save",
    "slowdown": "steps took longer beside an upload",
    "evaluation": "validation, and your code between the steps",
    "data_wait": "steps waited for data",
    "start": "from the first submit to the first step",
    "restart_detect": "the failure was not yet noticed",
    "restart_reschedule": "cause found, job or group asked for anew",
    "restart_start_workers": "workers started, model built",
    "restart_process_group": "workers found each other",
    "restart_restore": "checkpoint verified and loaded",
    "restart_data_seek": "first batch awaited",
    "restart_first_step": "what the first step takes longer than others",
    "waiting_for_resources": "the cluster had no room",
    "idle": "no job: from its end to the next submit",
    "unknown": "the records do not tell",
}
RESTART = "restart_"
PHASES = tuple(name for name in BUCKETS if name.startswith(RESTART))

Buckets = dict[str, float]


def empty() -> Buckets:
    """All buckets, with nothing in them."""
    return dict.fromkeys(BUCKETS, 0.0)


@dataclass(kw_only=True)
class Restart:
    """One way back into training, or into another failure.

    Attributes:
        kind: of the interruption before it.
        begin: on the axis of the run, seconds.
        attempt: that came of it; 0 for none.
        world_size: workers of that attempt.
        buckets: where its time went; waiting for resources too.
        complete: whether a step was done in the end.
    """

    kind: str
    begin: float
    attempt: int = 0
    world_size: int = 0
    buckets: Buckets = field(default_factory=lambda: defaultdict(float))
    complete: bool = False

    @property
    def seconds(self) -> float:
        """From the interruption to the first step, without waiting for a cluster or for a person."""
        return sum(self.buckets.get(name, 0.0) for name in PHASES)


class Book:
    """Puts every stretch of time into one bucket, from a beginning onwards, without gaps and overlaps.

    Args:
        begin: where the axis begins, seconds.
        epoch: date of 0 on the axis, seconds since the epoch; None when no line tells.
    """

    def __init__(self, begin: float, epoch: float | None) -> None:
        self.begin = self.cursor = begin
        self._epoch = epoch
        self.total = empty()
        self.by_attempt: dict[int, Buckets] = {}
        self.by_day: dict[str, Buckets] = {}
        self.rework_by_cause: dict[str, float] = defaultdict(float)
        self.restarts: list[Restart] = []
        self.restart: Restart | None = None
        self._day, self._day_ends = "", begin
        self._attempt_number, self._attempt = -1, empty()

    def until(self, t: float, bucket: str, attempt: int, cause: str = "") -> None:
        """Books the time up to ``t``; what lies before the cursor is booked already.

        Args:
            t: on the axis, seconds.
            bucket: where it goes.
            attempt: whose time it is.
            cause: for rework, the kind of interruption that made it.
        """
        if not t > self.cursor:
            return
        took_s = t - self.cursor
        self.total[bucket] += took_s
        if attempt != self._attempt_number:
            self._attempt_number = attempt
            self._attempt = self.by_attempt.setdefault(attempt, empty())
        self._attempt[bucket] += took_s
        if cause:
            self.rework_by_cause[cause] += took_s
        if self.restart is not None and (bucket in PHASES or bucket == "waiting_for_resources"):
            self.restart.buckets[bucket] += took_s
        if self._epoch is not None:
            self._book_days(self._epoch, t, bucket)
        self.cursor = t

    def _book_days(self, epoch: float, t: float, bucket: str) -> None:
        begin = self.cursor
        while t > self._day_ends:
            if self._day and self._day_ends > begin:
                self.by_day[self._day][bucket] += self._day_ends - begin
                begin = self._day_ends
            date = epoch + begin
            self._day = datetime.fromtimestamp(date, UTC).date().isoformat()
            self._day_ends = begin + DAY_S - date % DAY_S
            self.by_day.setdefault(self._day, empty())
        self.by_day[self._day][bucket] += t - begin

    def begin_restart(self, kind: str) -> None:
        """An attempt ended: what follows is the way into the next one."""
        self.restart = Restart(kind=kind, begin=self.cursor)
        self.restarts.append(self.restart)

    def end_restart(self) -> None:
        """A step was done."""
        if self.restart is not None:
            self.restart.complete = True
            self.restart = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the wall time of a run went.

    Attributes:
        wall_s: from the first submit to the last sign of life.
        buckets: name to seconds; they sum to ``wall_s``.
        by_attempt: the same by attempt, each with the way into it.
        by_day: the same by day (UTC).
        rework_by_cause: kind of interruption to the seconds of work that it made undone.
        restarts: each way back into training.
        interruptions: kind to how many there were.
        lost_steps: steps executed and lost.
        reason: what the totals say about the interval between saves, in words.
    """

    wall_s: float
    buckets: Buckets
    by_attempt: Mapping[int, Buckets]
    by_day: Mapping[str, Buckets]
    rework_by_cause: Mapping[str, float]
    restarts: tuple[Restart, ...]
    interruptions: Mapping[str, int]
    lost_steps: int
    reason: str

    @property
    def goodput(self) -> float | None:
        """Useful step time over wall time; None while no time has passed."""
        return self.buckets["useful"] / self.wall_s if self.wall_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """For scripts; times in seconds."""
        return {
            "wall_s": self.wall_s,
            "buckets": self.buckets,
            "goodput": self.goodput,
            "lost_steps": self.lost_steps,
            "interruptions": dict(self.interruptions),
            "attempts": {str(number): found for number, found in self.by_attempt.items()},
            "days": dict(self.by_day),
            "rework_by_cause": dict(self.rework_by_cause),
            "restarts": [
                {
                    "kind": each.kind,
                    "at_s": each.begin,
                    "attempt": each.attempt,
                    "world_size": each.world_size,
                    "seconds": each.seconds,
                    "complete": each.complete,
                    "buckets": dict(each.buckets),
                }
                for each in self.restarts
            ],
            "audit": self.reason,
        }
