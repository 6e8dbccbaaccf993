"""What a run met besides failures: nodes that leave, hangs, slow and excluded nodes, crash loops, sizes. A fold.

Part of :class:`ray_ckpt.view.chronicle.Chronicle`. How it ended is told in words, since several events make one story:
a notice, an order to save, a checkpoint that is safe, the end of the attempt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ray_ckpt.policy.loops import LoopRule
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.view.health import Level
from ray_ckpt.view.human import human_duration
from ray_ckpt.view.wording import describe

_KEPT = 50


@dataclass(kw_only=True, slots=True)
class Leaving:
    """The end of an attempt that was announced, from the first notice on.

    Attributes:
        time: of the first that was heard of it, seconds since the epoch.
        generation: of the attempt.
        nodes: that will be taken away, for people; none when it was no notice about a node.
        deadline: when the first of them goes, seconds since the epoch; None when nobody said.
        cause: why the workers were told to leave, in words; empty while they are not.
        saves: whether they save before; None while nothing is decided.
        reason: of that, in words.
        step: that is safe; None while none is.
        safe_at: since when, seconds since the epoch.
        end: kind of the interruption; empty while the attempt goes on.
        lost_steps: by that.
    """

    time: float
    generation: int
    nodes: list[str] = field(default_factory=list)
    deadline: float | None = None
    cause: str = ""
    saves: bool | None = None
    reason: str = ""
    step: int | None = None
    safe_at: float | None = None
    end: str = ""
    lost_steps: int = 0

    def verdict(self) -> tuple[Level, str]:
        """Whether the save made it, in words."""
        if self.step is not None:
            return "ok", f"step {self.step} was safe{self._margin()}{self._lost()}"
        if self.saves is False:
            level: Level = "attention" if self.lost_steps or not self.end else "ok"
            return level, f"no save was begun: {self.reason}{self._lost()}"
        if self.end and self.saves:
            level = "failing" if self.lost_steps else "attention"
            return (
                level,
                f"the attempt ended ({self.end}) before the save was known to be safe{self._lost()}",
            )
        if self.end:
            level = "attention" if self.lost_steps else "ok"
            return level, f"the attempt ended before it was time to save ({self.end}){self._lost()}"
        if self.saves:
            return "attention", f"the workers save and leave: {self.reason}"
        return "attention", "the workers train on until it is time to save"

    def _margin(self) -> str:
        if self.deadline is None or self.safe_at is None:
            return ""
        left_s = self.deadline - self.safe_at
        side = "before" if left_s >= 0 else "AFTER"
        return f", {human_duration(abs(left_s))} {side} the deadline"

    def _lost(self) -> str:
        if not self.end:
            return ""
        if not self.lost_steps:
            return "; no step lost"
        return f"; {self.lost_steps} step{'' if self.lost_steps == 1 else 's'} lost"

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        level, outcome = self.verdict()
        who = f"node {', '.join(self.nodes)} will be taken away" if self.nodes else self.cause
        return {
            "time": self.time,
            "generation": self.generation,
            "nodes": self.nodes,
            "deadline": self.deadline,
            "saves": self.saves,
            "step": self.step,
            "safe_at": self.safe_at,
            "end": self.end,
            "lost_steps": self.lost_steps,
            "level": level,
            "line": f"{who}: {outcome}",
        }


@dataclass(kw_only=True)
class Incidents:
    """What a run met so far.

    Attributes:
        leavings: announced ends, oldest first.
        hangs: events, oldest first.
        slow: node to the event that called it a straggler, while it is one.
        excluded: the newest event, None before the first.
        resizes: decisions about the size, oldest first.
        loops: what was done about failures that came again, oldest first.
        read_back: the newest reading of all copies on the nodes that somebody asked for.
        names: Ray's name of a node to what people call it, of the nodes that were ever named.
    """

    leavings: deque[Leaving] = field(default_factory=lambda: deque(maxlen=_KEPT))
    hangs: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    slow: dict[str, dict[str, Any]] = field(default_factory=dict)
    excluded: dict[str, Any] | None = None
    resizes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    loops: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    read_back: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)

    def name(self, node: str) -> str:
        """What people call a node, as far as the journal tells."""
        return self.names.get(node, node[:12])

    def apply(self, event: dict[str, Any]) -> None:
        """Takes one event of the journal."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def _leaving(self, event: dict[str, Any]) -> Leaving:
        """The announced end of an event's attempt; begun with it when nothing was heard before."""
        generation = int(event["generation"])
        last = self.leavings[-1] if self.leavings else None
        if last is None or last.end or last.generation != generation:
            last = Leaving(time=float(event["time"]), generation=generation)
            self.leavings.append(last)
        return last

    def _on_drain_notice(self, event: dict[str, Any]) -> None:
        leaving = self._leaving(event)
        self.names[str(event["node"])] = str(event["name"])
        if event["name"] not in leaving.nodes:
            leaving.nodes.append(str(event["name"]))
        if event["left_s"] is not None:
            at = float(event["time"]) + float(event["left_s"])
            leaving.deadline = at if leaving.deadline is None else min(leaving.deadline, at)

    def _on_leave_requested(self, event: dict[str, Any]) -> None:
        leaving = self._leaving(event)
        leaving.cause, leaving.reason = str(event["cause"]), str(event["reason"])
        leaving.saves = bool(event["saves"])

    def _on_left(self, event: dict[str, Any]) -> None:
        leaving = self._leaving(event)
        leaving.step, leaving.safe_at = int(event["step"]), float(event["time"])

    def _on_interruption(self, event: dict[str, Any]) -> None:
        last = self.leavings[-1] if self.leavings else None
        if last is not None and not last.end and last.generation == event["generation"]:
            last.end, last.lost_steps = str(event["kind"]), int(event["lost_steps"])

    def _on_finished(self, event: dict[str, Any]) -> None:
        self._on_interruption({**event, "kind": "finished", "lost_steps": 0})

    def _on_hang(self, event: dict[str, Any]) -> None:
        self.hangs.append(event)
        self.names.update(zip(event.get("nodes", ()), event.get("names", ()), strict=False))

    def _on_straggler(self, event: dict[str, Any]) -> None:
        self.slow[str(event["node"])] = event

    def _on_straggler_over(self, event: dict[str, Any]) -> None:
        self.slow.pop(str(event["node"]), None)

    def _on_excluded(self, event: dict[str, Any]) -> None:
        self.excluded = event
        self.names.update(zip(event["nodes"], event["names"], strict=True))

    def _on_resize_decision(self, event: dict[str, Any]) -> None:
        self.resizes.append(event)

    def _on_crash_loop(self, event: dict[str, Any]) -> None:
        self.loops.append(event)

    def _on_read_back(self, event: dict[str, Any]) -> None:
        self.read_back = event


def incidents(found: Incidents, memory: RunMemory, folder: str) -> dict[str, Any]:
    """All of it as plain values, newest first; each has a ``line`` in words and a ``level``.

    Args:
        found: in the journal.
        memory: of the run.
        folder: of the run, where the files of hangs are.
    """
    excluded = found.excluded if found.excluded and found.excluded.get("nodes") else None
    reading = found.read_back
    bad = bool(reading and reading.get("faults"))
    return {
        "leaving": [leaving.plain() for leaving in reversed(found.leavings)],
        "hangs": [_hang(event, folder) for event in reversed(found.hangs)],
        "slow": [
            {**_line(event, "attention"), "nodes": [found.name(node)]}
            for node, event in found.slow.items()
        ],
        "excluded": [] if excluded is None else [_line(excluded, "attention")],
        "loops": [
            _line(event, "failing" if event.get("action") == "stop" else "attention")
            for event in reversed(found.loops)
        ],
        "limits": limits(memory),
        "resizes": [_line(event, "ok") for event in reversed(found.resizes)],
        "read_back": [] if reading is None else [_line(reading, "failing" if bad else "ok")],
    }


def limits(memory: RunMemory) -> dict[str, Any]:
    """How many failures there may be yet, before the run stops by itself.

    Returns:
        ``window_s``, ``budgets`` (kind, how many of it within the window, and how many are one too many) and
        ``same``: how often the newest failure came in a row, of how many ``tries``, and what is done then.
    """
    rule, failed = memory.limits or _DEFAULT, list(memory.failed)
    begin_s = memory.exposure_s - float(rule["window_s"])
    counts = [
        {
            "kind": kind,
            "count": sum(f.kind == kind and f.exposure_s >= begin_s for f in failed),
            "most": most,
        }
        for kind, most in dict(rule["budgets"]).items()
        if most
    ]
    same = 0
    for failure in reversed(failed[-_KEPT:]):
        if failure.signature != failed[-1].signature:
            break
        same += 1
    return {
        "window_s": rule["window_s"],
        "budgets": counts,
        "same": {"count": same, "tries": rule["tries"], "then": rule["on_loop"]},
    }


_RULE = LoopRule()
_DEFAULT: dict[str, Any] = {
    "tries": _RULE.tries,
    "on_loop": _RULE.on_loop,
    "budgets": dict(_RULE.budgets),
    "window_s": _RULE.window_s,
}


def _line(event: dict[str, Any], level: Level) -> dict[str, Any]:
    return {
        "time": event.get("time"),
        "generation": event.get("generation"),
        "level": level,
        "line": describe(event),
    }


def _hang(event: dict[str, Any], folder: str) -> dict[str, Any]:
    dumps = str(event.get("dumps") or "")
    names = event.get("names") or [str(node)[:12] for node in event.get("nodes") or ()]
    return {
        **_line(event, "failing"),
        "step": event.get("step"),
        "ranks": list(event.get("suspects") or ()),
        "nodes": list(names),
        "where": dict(event.get("where") or {}),
        "dumps": f"{folder}/{dumps}" if dumps else "",
    }
