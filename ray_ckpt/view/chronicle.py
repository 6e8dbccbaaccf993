"""What a run's journal tells whoever looks at it: attempts, interruptions, checkpoints, drills, alerts.

A fold, like :class:`ray_ckpt.tracker.memory.RunMemory`, which it keeps as well: one event at a time, so that a journal
that grew is not read again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.tracker.checkpoint_memory import DURABLE
from ray_ckpt.tracker.memory import PLANNED, RunMemory
from ray_ckpt.view.incidents import Incidents

_STORY_EVENTS = 200
_KEPT = 50
_GONE_KEPT = 5000

ALARMING = frozenset(
    {
        "alert",
        "bad_copy",
        "crash_loop",
        "delete_failed",
        "hang",
        "promote_failed",
        "quarantine",
        "save_failed",
        "skipped",
        "straggler",
        "trouble",
    }
)


def is_alarming(event: dict[str, Any]) -> bool:
    """Whether somebody should look at an event; of some kinds only what went wrong."""
    kind = event.get("event")
    return (
        kind in ALARMING
        or (kind == "drill" and not event.get("ok"))
        or (kind == "leave_requested" and event.get("saves") is False)
        or (kind == "excluded" and bool(event.get("nodes")))
        or (kind == "read_back" and bool(event.get("faults")))
    )


@dataclass(kw_only=True, slots=True)
class AttemptLine:
    """One attempt of the run.

    Attributes:
        generation: its number.
        world_size: workers; 0 when the beginning is not on record.
        num_nodes: nodes they were on.
        started_at: seconds since the epoch.
        restored_at: when it could begin to train; None when it never could.
        from_step: step it began at.
        source: checkpoint it restored, empty for none.
        restore_s: time of the restore, seconds.
        ended_at: None while it goes on.
        end: kind of the interruption, or "finished"; empty while it goes on.
        last_seen: time of the last event of it.
    """

    generation: int
    world_size: int = 0
    num_nodes: int = 0
    started_at: float = 0.0
    restored_at: float | None = None
    from_step: int | None = None
    source: str = ""
    restore_s: float | None = None
    ended_at: float | None = None
    end: str = ""
    last_seen: float = 0.0


@dataclass(kw_only=True, slots=True)
class InterruptionMark:
    """One interruption: what, when, why, and the steps that were lost by it."""

    time: float
    generation: int
    kind: str
    planned: bool
    cause: str
    step: int
    lost_steps: int


@dataclass(kw_only=True, slots=True)
class CheckpointLine:
    """What the journal tells of one checkpoint; None for what it does not.

    Attributes:
        verified_at: when its bytes in the durable tier were last read and compared, seconds since the epoch.
        read_back: tier on the nodes to the same.
    """

    name: str
    step: int
    generation: int
    committed_at: float | None = None
    bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    sample_offset: int | None = None
    tokens: int | None = None
    loss: float | None = None
    param_norm: float | None = None
    stall_s: float | None = None
    upload_s: float | None = None
    validation_loss: float | None = None
    verified_at: float | None = None
    read_back: dict[str, float] = field(default_factory=dict)
    quarantined: str | None = None
    refused: bool = False
    drilled: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Chronicle:
    """All of a run so far.

    Attributes:
        memory: what the tracker would remember.
        attempts: oldest first.
        interruptions: oldest first.
        checkpoints: name to what is known of each that was committed or set aside, and not deleted.
        drills: the newest ones, oldest first.
        alerts: the newest events that somebody should look at, oldest first.
        story: the newest events, oldest first.
        decision: the newest one on the interval.
        tier_decision: the newest one on slower tiers.
        last_failure: of a save; None before the first, and after a commit.
        last_time: time of the newest event; a clock may jump back.
        deleted: how many checkpoints were deleted.
        incidents: hangs, nodes that left, crash loops and the like.
        copied: checkpoint to how many copies the fastest tier has, and how many there are to be.
        gone: names of the last ones, oldest first; what lists folders may not have seen it yet.
        events: how many were taken.
    """

    memory: RunMemory = field(default_factory=RunMemory)
    attempts: list[AttemptLine] = field(default_factory=list)
    interruptions: list[InterruptionMark] = field(default_factory=list)
    checkpoints: dict[str, CheckpointLine] = field(default_factory=dict)
    drills: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    alerts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    story: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_STORY_EVENTS))
    decision: dict[str, Any] | None = None
    tier_decision: dict[str, Any] | None = None
    last_failure: dict[str, Any] | None = None
    last_time: float = 0.0
    deleted: int = 0
    incidents: Incidents = field(default_factory=Incidents)
    copied: dict[str, tuple[int, int]] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    events: int = 0

    def apply(self, event: dict[str, Any]) -> None:
        """Takes one event of the journal; what says less than it should counts as far as it goes."""
        self.events += 1
        with contextlib.suppress(KeyError, TypeError, ValueError):
            self.memory.apply(event)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            self._take(event)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            self.incidents.apply(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind, time_s = str(event["event"]), float(event["time"])
        self.last_time = max(self.last_time, time_s)
        self.story.append(event)
        if is_alarming(event):
            self.alerts.append(event)
        attempt = self.attempts[-1] if self.attempts else None
        # The end of an attempt that nobody told is noted by the next one: no sign of life of the old one.
        late = kind == "interruption" and event.get("kind") == "lost"
        if attempt is not None and event.get("generation") == attempt.generation and not late:
            attempt.last_seen = max(attempt.last_seen, time_s)
        if isinstance(event.get("verified"), str) and event["verified"]:
            line = self._line(event["verified"])
            line.verified_at = max(time_s, line.verified_at or 0.0)
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(event, time_s)

    def _line(self, name: str) -> CheckpointLine:
        line = self.checkpoints.get(name)
        if line is None:
            key = parse_checkpoint_name(name)
            if key is None:
                raise ValueError(name)
            line = CheckpointLine(name=name, step=key[0], generation=key[1])
            self.checkpoints[name] = line
        return line

    def _on_attempt_started(self, event: dict[str, Any], time_s: float) -> None:
        self.attempts.append(
            AttemptLine(
                generation=int(event["generation"]),
                world_size=int(event["world_size"]),
                num_nodes=len(set(event.get("nodes") or ())),
                started_at=time_s,
                last_seen=time_s,
            )
        )

    def _on_restored(self, event: dict[str, Any], time_s: float) -> None:
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is not None and attempt.generation == event["generation"]:
            attempt.restored_at, attempt.from_step = time_s, int(event["step"])
            attempt.source, attempt.restore_s = str(event["source"]), float(event["seconds"])

    def _on_interruption(self, event: dict[str, Any], time_s: float) -> None:
        kind = str(event["kind"])
        self.interruptions.append(
            InterruptionMark(
                time=time_s,
                generation=int(event["generation"]),
                kind=kind,
                planned=kind in PLANNED,
                cause=str(event.get("cause", "")),
                step=int(event["step"]),
                lost_steps=int(event["lost_steps"]),
            )
        )
        self._end(event, kind, time_s)

    def _on_finished(self, event: dict[str, Any], time_s: float) -> None:
        self._end(event, "finished", time_s)

    def _end(self, event: dict[str, Any], end: str, time_s: float) -> None:
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is None or attempt.generation != event["generation"] or attempt.end:
            return  # a worker group that ended before its attempt began
        attempt.end = end
        attempt.ended_at = attempt.last_seen if end == "lost" else time_s

    def _on_decision(self, event: dict[str, Any], time_s: float) -> None:
        self.decision = event

    def _on_tier_decision(self, event: dict[str, Any], time_s: float) -> None:
        self.tier_decision = event

    def _on_commit(self, event: dict[str, Any], time_s: float) -> None:
        line = self._line(str(event["name"]))
        line.committed_at = time_s
        line.bytes, line.files = int(event["bytes"]), int(event["files"])
        line.world_size = _whole(event.get("world_size"))
        line.sample_offset = _whole(event.get("sample_offset"))
        line.tokens = _whole(event.get("tokens"))
        line.loss, line.param_norm = _number(event.get("loss")), _number(event.get("param_norm"))
        line.stall_s, line.upload_s = float(event["stall_s"]), float(event["upload_s"])
        if event.get("validation_loss") is not None:
            line.validation_loss = float(event["validation_loss"])
        self.last_failure = None

    def _on_replicated(self, event: dict[str, Any], time_s: float) -> None:
        self._read_back(event, time_s)
        self.copied[str(event["name"])] = (int(event["copies"]), int(event["wanted"]))

    def _on_promote(self, event: dict[str, Any], time_s: float) -> None:
        self._read_back(event, time_s)

    def _read_back(self, event: dict[str, Any], time_s: float) -> None:
        """A copy on nodes counts once each node has compared what it has with the manifest."""
        line, tier = self.checkpoints.get(str(event["name"])), str(event.get("tier", DURABLE))
        if line is not None and tier != DURABLE:
            line.read_back[tier] = time_s

    def _on_copies(self, event: dict[str, Any], time_s: float) -> None:
        # Of a new attempt: that a tier still has a checkpoint is told, and not how many copies of it live.
        self.copied.clear()

    def _on_save_failed(self, event: dict[str, Any], time_s: float) -> None:
        self.last_failure = event

    def _on_quarantine(self, event: dict[str, Any], time_s: float) -> None:
        line = self._line(str(event["name"]))
        line.quarantined, line.verified_at = str(event["reason"]), None
        line.refused = event.get("by") == "guard"

    def _on_delete(self, event: dict[str, Any], time_s: float) -> None:
        name = str(event["name"])
        line = self.checkpoints.get(name)
        aside = str(event.get("tier", DURABLE)) != DURABLE and line and line.quarantined is not None
        if self.memory.tiers.get(name) or aside:
            return  # gone from one of its tiers
        self.copied.pop(name, None)
        if self.checkpoints.pop(name, None) is not None:
            self.deleted += 1
        self.gone[name] = None
        while len(self.gone) > _GONE_KEPT:
            del self.gone[next(iter(self.gone))]

    def _on_drill(self, event: dict[str, Any], time_s: float) -> None:
        self.drills.append(event)
        if str(event["name"]) in self.checkpoints:
            self._line(str(event["name"])).drilled = event


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
