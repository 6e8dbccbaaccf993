"""What the tracker remembers: a fold over the journal.

The same function takes an event when it happens and when the journal is read again, so a tracker that was
restarted, or a job that was resubmitted, knows what the one before it knew.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ray_ckpt.checkpoint.quarantine import GUARD
from ray_ckpt.clocks import Instant
from ray_ckpt.policy.belief import Seen
from ray_ckpt.skips import Skip
from ray_ckpt.tracker.checkpoint_memory import RECENT_SAVES, CheckpointMemory
from ray_ckpt.tracker.failure_memory import FailureMemory
from ray_ckpt.tracker.rollback import Course

# More than anybody's band needs.
RECENT_NORMS = 64

# Enough for a line over the number of workers, few enough to follow a cluster that changes.
RECENT_STARTS = 8

# Interruptions that somebody wanted: they say nothing about how often the job fails.
PLANNED = frozenset({"resize", "drain", "preempted", "user_stop"})


@dataclass(kw_only=True)
class RunMemory(CheckpointMemory, FailureMemory):
    """State of a run so far; what it knows of its checkpoints is in the class that it extends.

    Attributes:
        generation: of the newest attempt; 0 before the first.
        attempt_open: whether the newest attempt has neither been interrupted nor finished.
        world_size: workers of the newest attempt.
        nodes: that they are on.
        all_nodes: that any attempt had workers on; those that live may have copies.
        first_time: time of the first event, seconds since the epoch.
        interruptions: how many, by kind.
        lost_steps: steps executed and lost, over all interruptions.
        exposure_s: training time over which failures were counted, seconds.
        exposure_by_size: the same by number of workers, up to the last event that told it.
        failures_by_size: number of workers to unplanned interruptions by kind.
        commits: how many checkpoints were committed.
        last_commit_step: step of the newest commit, None before the first.
        last_commit_name: folder of the newest commit, empty before the first.
        last_commit_time: when it was, seconds since the epoch.
        failed_saves: how many saves failed.
        failed_in_a_row: how many since the last commit.
        last_save_step: step of the newest save that was committed or failed, or where the newest attempt began.
        stalls_s: the last few stalls, seconds.
        uploads_s: the last few uploads, seconds.
        best_step: highest step ever executed.
        fruitless: attempts in a row that won neither a new step nor a checkpoint; those that somebody
            wanted to end do not count.
        finished_step: last step of a finished run, None while it is not.
        kept_step: where the run stands without the steps counted as lost, as far as the journal tells.
        segment: number of the segment that the run is in.
        first_of_segment: folder of the first commit since the segment started, empty before it.
        committed: folders of the checkpoints that the newest attempt committed.
        last_group: worker group whose end was told last, empty when it was not named.
        last_end: how that was, in words.
        save_requests: number of the newest request for a save, 0 before the first.
        settled_request: number of the newest request whose save was committed or refused, 0 before the first.
        stop_request: why somebody wants the present job to end, empty when nobody does.
        tracker: when the newest tracker took up the run, None before the first.
        hold_s: how long the workers wait after the save of that request, seconds.
        leave: the event that says that the newest attempt is to end, None while it is not.
        started: the newest worker group that came up: the event, None once it has restored.
        starts_s: workers and seconds of the last few starts, from asking for a group until it had restored.
        grown_time: when an attempt last had more workers than the one before, seconds since the epoch.
        retention: the rules of retention on record, None before the first.
        refused: how many checkpoints the guard refused.
        refusals: of the newest attempt, by folder: the event.
        norms: step and norm of the parameters of the last saves, refused ones too, oldest first.
        trouble: the event that says that the newest attempt is no longer finite, None while it is.
        trouble_step: furthest step of the rollbacks in a row.
        rollbacks: in a row, since the last commit beyond that step.
        left: courses of the run that were left by a rollback.
        skips: holes in the run's order.
        stack: the tiers on record: ``use``, ``remote`` and ``replicas``; None before the first.
    """

    generation: int = 0
    attempt_open: bool = False
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    all_nodes: dict[str, None] = field(default_factory=dict)
    first_time: float | None = None
    interruptions: Counter[str] = field(default_factory=Counter)
    lost_steps: int = 0
    exposure_s: float = 0.0
    exposure_by_size: dict[int, float] = field(default_factory=dict)
    failures_by_size: dict[int, Counter[str]] = field(default_factory=dict)
    commits: int = 0
    last_commit_step: int | None = None
    last_commit_name: str = ""
    last_commit_time: float | None = None
    failed_saves: int = 0
    failed_in_a_row: int = 0
    last_save_step: int = 0
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_SAVES))
    uploads_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_SAVES))
    best_step: int = 0
    fruitless: int = 0
    finished_step: int | None = None
    kept_step: int = 0
    segment: int = 0
    first_of_segment: str = ""
    committed: set[str] = field(default_factory=set)
    last_group: str = ""
    last_end: str = ""
    save_requests: int = 0
    settled_request: int = 0
    stop_request: str = ""
    tracker: Instant | None = None
    hold_s: float = 0.0
    leave: dict[str, Any] | None = None
    started: dict[str, Any] | None = None
    starts_s: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STARTS))
    grown_time: float | None = None
    retention: dict[str, Any] | None = None
    refused: int = 0
    refusals: dict[str, dict[str, Any]] = field(default_factory=dict)
    norms: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_NORMS))
    trouble: dict[str, Any] | None = None
    trouble_step: int = 0
    rollbacks: int = 0
    left: list[Course] = field(default_factory=list)
    skips: tuple[Skip, ...] = ()
    stack: dict[str, Any] | None = None

    @property
    def failures(self) -> int:
        """Interruptions that nobody planned."""
        return sum(count for kind, count in self.interruptions.items() if kind not in PLANNED)

    @property
    def stall_s(self) -> float | None:
        """Median of the last stalls, seconds."""
        return median(self.stalls_s) if self.stalls_s else None

    @property
    def upload_s(self) -> float | None:
        """Median of the last uploads, seconds."""
        return median(self.uploads_s) if self.uploads_s else None

    def seen(self) -> list[Seen]:
        """Exposure and failures at each number of workers, up to now."""
        exposure_s = dict(self.exposure_by_size)
        untold_s = self.exposure_s - sum(exposure_s.values())
        size = max(1, self.world_size)
        exposure_s[size] = exposure_s.get(size, 0.0) + max(0.0, untold_s)
        return [
            Seen(
                world_size=size,
                exposure_s=exposure_s.get(size, 0.0),
                failures=dict(self.failures_by_size.get(size, {})),
            )
            for size in sorted({*exposure_s, *self.failures_by_size})
        ]

    def apply(self, event: dict[str, Any]) -> None:
        """Takes one event of the journal."""
        if event.get("event") == "group_started":
            self.started = event
        if event.get("event") == "tracker_started":
            self._tracker_started(event)
        if event.get("event") in ("tracker_started", "group_started"):
            return  # a run is as old as its first attempt, and no attempt began or ended here
        time = event.get("time")
        if self.first_time is None and isinstance(time, int | float):
            self.first_time = float(time)
        generation = event.get("generation")
        if isinstance(generation, int) and generation > self.generation:
            # Every line of an attempt proves that its number was given out, should the first be damaged.
            self.generation = generation
            self._begin()
        if isinstance(event.get("verified"), str):
            self.verified.add(event["verified"])
            self.read_at[event["verified"]] = float(event.get("time", 0.0))
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def _tracker_started(self, event: dict[str, Any]) -> None:
        """Forgets what was asked of the job before, when this tracker is another job's.

        A job may end without a word: it was killed, or stopped while no attempt was open.
        """
        here = Instant(
            time=float(event.get("time", 0.0)),
            monotonic=float(event.get("monotonic", 0.0)),
            boot=str(event.get("boot", "")),
        )
        before, self.tracker = self.tracker, here
        submitted_ago_s = float(event.get("submitted_ago_s", 0.0))
        if before is None or before.age_s(here) > submitted_ago_s:
            self.stop_request = ""

    def _begin(self) -> None:
        self.attempt_open = True
        self.finished_step = None
        self.committed.clear()
        self.refusals.clear()
        self.trouble = self.leave = self.loop = None
        self.plan = ""

    def _on_attempt_started(self, event: dict[str, Any]) -> None:
        self._begin()
        if 0 < self.world_size < int(event["world_size"]):
            self.grown_time = float(event.get("time", 0.0))
        self.world_size = int(event["world_size"])
        self.nodes = tuple(dict.fromkeys(node for node in event.get("nodes", ()) if node))
        self.all_nodes |= dict.fromkeys(self.nodes)
        self.plan = str(event.get("plan", ""))

    def _on_restored(self, event: dict[str, Any]) -> None:
        if self.started is not None and "time" in event:
            asked = float(self.started.get("time", 0.0)) - float(self.started["asked_ago_s"])
            # Of two clocks, or of one that was set, the difference may be anything.
            took_s = max(0.0, float(event["time"]) - asked)
            self.starts_s.append((max(1, int(self.started["world_size"])), took_s))
            self.started = None
        self.kept_step = self.last_save_step = int(event["step"])
        self.lost_steps += int(event.get("lost_steps_more", 0))
        self._was_restored(str(event.get("source", "")))
        for tier, step in self.tier_steps.items():
            self.tier_steps[tier] = min(
                step, self.kept_step
            )  # what is beyond is of a course that was left
        while self.norms and self.norms[-1][0] > self.kept_step:
            self.norms.pop()  # of a course that was left

    def _on_interruption(self, event: dict[str, Any]) -> None:
        step, lost, kind = int(event["step"]), int(event["lost_steps"]), str(event["kind"])
        won = step > self.best_step or (self.attempt_open and bool(self.committed))
        if won:
            self.fruitless = 0
        elif kind not in PLANNED and not event.get("restoring"):
            self.fruitless += 1
        self.attempt_open, self.leave = False, None
        if kind in ("user_stop", "lost"):
            self.stop_request = ""  # that job has ended
        self.interruptions[kind] += 1
        self.lost_steps += lost
        self.kept_step = step - lost
        self._expose(event)
        if kind not in PLANNED:
            self.failures_by_size.setdefault(max(1, self.world_size), Counter())[kind] += 1
        if kind == "user_stop":
            self.failed.clear()  # whoever stops a run has looked at it
        elif kind not in PLANNED and kind != "nonfinite":
            self._failed(event, self.generation, self.exposure_s)
        self.best_step = max(self.best_step, step)
        self.last_group = str(event.get("group", ""))
        self.last_end = f"at step {step}: {event.get('cause')}"

    def _on_crash_loop(self, event: dict[str, Any]) -> None:
        self.loop = event
        self.failed.clear()  # of a course that is left, or somebody looks at it now
        if event["action"] == "stop":
            self.rollbacks = self.trouble_step = 0
            return
        self.fruitless = 0
        self._go_back(event)

    def _on_save_requested(self, event: dict[str, Any]) -> None:
        self.save_requests = max(self.save_requests, int(event["number"]))
        self.hold_s = float(event.get("hold_s", 0.0))

    def _on_leave_requested(self, event: dict[str, Any]) -> None:
        self.leave = event

    def _on_left(self, event: dict[str, Any]) -> None:
        self.settled_request = max(self.settled_request, int(event["request"]))

    def _on_stop_requested(self, event: dict[str, Any]) -> None:
        self.stop_request = str(event["reason"])

    def _on_commit(self, event: dict[str, Any]) -> None:
        step = int(event["step"])
        self.commits += 1
        self.failed_in_a_row = 0
        self.last_commit_step = self.last_save_step = step
        self.settled_request = max(self.settled_request, int(event.get("request", 0)))
        self.last_commit_name = str(event["name"])
        self.last_commit_time = float(event["time"])
        self.stalls_s.append(float(event["stall_s"]))
        self.uploads_s.append(float(event["upload_s"]))
        self._expose(event)
        self.committed.add(self.last_commit_name)
        self.first_of_segment = self.first_of_segment or self.last_commit_name
        self._take_norm(event)
        self._arrived(event)
        if step > self.trouble_step:
            self.rollbacks = self.trouble_step = 0
        if self.attempt_open:
            # What was saved was executed, even if a power cut took the lines of its steps.
            self.kept_step = max(self.kept_step, step)

    def _on_segment(self, event: dict[str, Any]) -> None:
        self.segment = int(event["number"])
        self.first_of_segment = ""
        self.skips = ()  # the order of a segment begins without holes

    def _take_norm(self, event: dict[str, Any]) -> None:
        if event.get("param_norm") is not None:
            self.norms.append((int(event["step"]), float(event["param_norm"])))

    def _on_quarantine(self, event: dict[str, Any]) -> None:
        super()._on_quarantine(event)
        self._passed_over(str(event["name"]))
        if event.get("by") == GUARD:
            self.refused += 1
            self.settled_request = max(self.settled_request, int(event.get("request", 0)))
            self.refusals[str(event["name"])] = event
            self._take_norm(event)

    def _on_skipped(self, event: dict[str, Any]) -> None:
        self._passed_over(str(event["name"]))

    def _on_trouble(self, event: dict[str, Any]) -> None:
        self.trouble = event
        if event["action"] == "stop":
            # Whoever starts the run again has looked at it: a new row.
            self.rollbacks = self.trouble_step = 0
            return
        self._go_back(event)

    def _go_back(self, event: dict[str, Any]) -> None:
        self.rollbacks += 1
        self.trouble_step = max(self.trouble_step, int(event["step"]))
        self.left.append(Course(to_step=int(event["to_step"]), generation=self.generation))
        self.skips = tuple(Skip(**skip) for skip in event["skips"])

    def _on_save_failed(self, event: dict[str, Any]) -> None:
        self.last_save_step = int(event["step"])
        self.failed_saves += 1
        self.failed_in_a_row += 1

    def _on_finished(self, event: dict[str, Any]) -> None:
        self.attempt_open = False
        self.stop_request = ""
        self.fruitless = 0
        self.finished_step = self.kept_step = int(event["step"])
        self._expose(event)
        for tiers in self.tiers.values():
            tiers.pop("memory", None)  # nobody needs it any more

    def _expose(self, event: dict[str, Any]) -> None:
        """Credits what was exposed since the last event to the size of the newest attempt."""
        self.exposure_s = float(event.get("exposure_s", self.exposure_s))
        size = max(1, self.world_size)
        told_s = sum(self.exposure_by_size.values())
        if self.exposure_s > told_s:
            before_s = self.exposure_by_size.get(size, 0.0)
            self.exposure_by_size[size] = before_s + self.exposure_s - told_s

    def _on_tiers(self, event: dict[str, Any]) -> None:
        self.stack = {name: event[name] for name in ("use", "remote", "replicas")}

    def _on_retention(self, event: dict[str, Any]) -> None:
        self.retention = dict(event["rules"])
