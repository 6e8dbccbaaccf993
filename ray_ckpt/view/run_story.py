"""What the page shows of a run beside its checkpoints: course, cost of interruptions, interval, goodput. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray_ckpt.policy.decision import steps_to_next
from ray_ckpt.tracker.buckets import PHASES, Ledger
from ray_ckpt.tracker.checkpoint_memory import DURABLE
from ray_ckpt.view.chronicle import AttemptLine, Chronicle, InterruptionMark
from ray_ckpt.view.human import shorten
from ray_ckpt.view.track import Track
from ray_ckpt.view.wording import describe

_CAUSE_CHARS = 600
MOST_ATTEMPTS = 2000


def present(chronicle: Chronicle, track: Track) -> dict[str, Any]:
    """Where the run stands."""
    memory, last = chronicle.memory, track.newest
    is_open = memory.attempt_open and last.get("generation") == memory.generation
    step = int(last["step"]) if is_open else memory.kept_step
    loss = last.get("loss")
    return {
        "step": step,
        "loss": loss if isinstance(loss, float) and math.isfinite(loss) else None,
        "lr": last.get("lr"),
        "sample_offset": last.get("sample_offset"),
        "step_time_s": last.get("step_time_s"),
        "last_step_at": last.get("time"),
        "world_size": memory.world_size,
        "generation": memory.generation,
        "segment": memory.segment,
        "first_time": memory.first_time,
        "last_time": max(chronicle.last_time, float(last.get("time") or 0.0)),
        "finished_step": memory.finished_step,
    }


def cost(chronicle: Chronicle, track: Track, mark: InterruptionMark) -> dict[str, Any]:
    """What an interruption cost: from the last step before it to the first new step after it.

    Returns:
        ``cost_s`` (None when the lines of steps do not tell), ``redone_s`` of it for steps that were done again,
        ``over``: whether there was a new step since, and ``until``: the attempt that made it.
    """
    before = [life for number, life in track.lives.items() if number <= mark.generation]
    began_s = max((life.last_time for life in before if life.last_time is not None), default=None)
    redone_s = 0.0
    for number in sorted(number for number in track.lives if number > mark.generation):
        life = track.lives[number]
        redone_s += life.redone_s
        if life.new_time is not None:
            whole_s = None if began_s is None else max(0.0, life.new_time - began_s)
            return {"cost_s": whole_s, "redone_s": redone_s, "over": True, "until": number}
    ahead = track.ahead or {}
    over = ahead.get("generation", 0) > mark.generation and ahead.get("step", 0) > mark.step
    return {"cost_s": None, "redone_s": redone_s, "over": over, "until": None, "since": began_s}


def interruption(chronicle: Chronicle, mark: InterruptionMark, track: Track) -> dict[str, Any]:
    """One interruption, as plain values, with what it cost."""
    return {
        **_plain(mark),
        "cause": shorten(mark.cause, _CAUSE_CHARS),
        **cost(chronicle, track, mark),
    }


def attempts(chronicle: Chronicle) -> list[dict[str, Any]]:
    """The newest attempts, oldest first."""
    return [_plain(attempt) for attempt in chronicle.attempts[-MOST_ATTEMPTS:]]


def marks(chronicle: Chronicle) -> list[dict[str, Any]]:
    """The newest interruptions, oldest first, without what each cost."""
    newest = chronicle.interruptions[-MOST_ATTEMPTS:]
    return [{**_plain(mark), "cause": shorten(mark.cause)} for mark in newest]


def restarts(chronicle: Chronicle) -> list[dict[str, Any]]:
    """Where attempts after the first began: their step, number and checkpoint."""
    return [
        {"step": attempt.from_step, "generation": attempt.generation, "source": attempt.source}
        for attempt in chronicle.attempts[1:][-MOST_ATTEMPTS:]
        if attempt.from_step is not None
    ]


def interval(chronicle: Chronicle, step_s: float | None) -> dict[str, Any] | None:
    """How often the run saves, and why; None before the first decision."""
    decision, memory = chronicle.decision, chronicle.memory
    if decision is None:
        return None
    every = int(decision["every_steps"])
    tiers = []
    if chronicle.tier_decision is not None:
        steps = dict(chronicle.tier_decision.get("every_steps") or {})
        reasons = list(chronicle.tier_decision.get("reasons") or ())
        # Reasons follow the order of the tiers on record; a fixed one is told without its name's order changing.
        for (tier, every_tier), reason in zip(steps.items(), reasons, strict=False):
            tiers.append({"tier": tier, "every_steps": every_tier, "reason": reason})
    return {
        "every_steps": every,
        "interval_s": decision.get("interval_s") or (step_s and every * step_s),
        "formula": decision.get("formula"),
        "reason": decision.get("reason"),
        "since": decision.get("time"),
        "next_save_step": memory.last_save_step + steps_to_next(every, memory.failed_in_a_row),
        "stall_s": memory.stall_s,
        "upload_s": memory.upload_s,
        "tiers": tiers,
    }


def durable_every_s(chronicle: Chronicle, step_s: float | None) -> float | None:
    """Expected time between two durable copies, seconds; None when it is not known."""
    if chronicle.decision is None:
        return None
    every = int(chronicle.decision["every_steps"])
    if chronicle.tier_decision is not None:
        every = max(every, int(chronicle.tier_decision["every_steps"].get(DURABLE) or every))
    upload_s = chronicle.memory.upload_s or 0.0
    copies_s = chronicle.memory.transfers_s.get(DURABLE) or (0.0,)
    return None if step_s is None else every * step_s + upload_s + max(copies_s)


# The buckets of the ledger as the bar shows them.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "useful steps": ("useful",),
    "steps that were lost": ("rework",),
    "saving": ("stall", "slowdown"),
    "data, evaluation": ("data_wait", "evaluation"),
    "start, restarts": ("start", *PHASES),
    "waiting, idle, unknown": ("waiting_for_resources", "idle", "unknown"),
}


def accounted(ledger: Ledger) -> dict[str, Any]:
    """Where the wall time went, by the run's ledger, in the parts of the bar."""
    parts = {
        name: sum(ledger.buckets[each] for each in each_of) for name, each_of in _PARTS.items()
    }
    return {"wall_s": ledger.wall_s, "goodput": ledger.goodput, "buckets": parts}


def goodput(chronicle: Chronicle, track: Track) -> dict[str, Any]:
    """The same, roughly, where nobody has time for the ledger: since the first attempt; what is no step is one part.

    Nothing is told before all lines of steps are read.
    """
    memory = chronicle.memory
    if memory.first_time is None or track.ahead is not None:
        return {"wall_s": 0.0, "goodput": None, "buckets": {}}
    last_s = max(chronicle.last_time, float(track.newest.get("time") or 0.0))
    wall_s = max(0.0, last_s - memory.first_time)
    kept_s = track.useful_until(present(chronicle, track)["step"])
    useful_s = min(kept_s, wall_s)
    redone_s = min(max(0.0, track.executed_s - kept_s), wall_s - useful_s)
    return {
        "wall_s": wall_s,
        "goodput": useful_s / wall_s if wall_s > 0 and track.lines else None,
        "buckets": {
            "useful steps": useful_s,
            "steps that were lost": redone_s,
            "no step: starts, restarts, waiting": wall_s - useful_s - redone_s,
        },
    }


def counts(chronicle: Chronicle) -> dict[str, Any]:
    """Plain counts of the run."""
    memory = chronicle.memory
    return {
        "attempts": len(chronicle.attempts),
        "interruptions": dict(memory.interruptions),
        "lost_steps": memory.lost_steps,
        "commits": memory.commits,
        "failed_saves": memory.failed_saves,
        "failed_in_a_row": memory.failed_in_a_row,
        "refused": memory.refused,
        "deleted": chronicle.deleted,
        "events": chronicle.events,
    }


def drills(chronicle: Chronicle) -> list[dict[str, Any]]:
    """The newest drills, newest first."""
    return [
        {
            "name": event.get("name"),
            "time": event.get("drilled_at", event.get("time")),
            "ok": bool(event.get("ok")),
            "line": told(event),
        }
        for event in reversed(chronicle.drills)
    ]


def lines(events: Any) -> list[dict[str, Any]]:
    """Events in words, newest first; none is left out."""
    return [
        {
            "time": event.get("time"),
            "event": event.get("event"),
            "generation": event.get("generation"),
            "line": told(event),
        }
        for event in reversed(events)
    ]


def told(event: dict[str, Any]) -> str:
    """An event in words."""
    return shorten(describe(event), _CAUSE_CHARS)


def _plain(record: AttemptLine | InterruptionMark) -> dict[str, Any]:
    """Its fields; `dataclasses.asdict` copies each value deeply, which is slow for thousands of them."""
    return {name: getattr(record, name) for name in record.__slots__}
