"""The table of checkpoints: what the journal tells and what lies on storage, in one row a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ray_ckpt.checkpoint.listing import NO_MANIFEST
from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.tiers.retention import Record, Verdict, plan
from ray_ckpt.tiers.stack import TIER_NAMES
from ray_ckpt.tracker.checkpoint_memory import DURABLE
from ray_ckpt.tracker.rollback import passed
from ray_ckpt.view.chronicle import CheckpointLine, Chronicle
from ray_ckpt.view.keeping import recorded_rules
from ray_ckpt.view.shelf_look import Seen, ShelfLook

SHOWS = ("all", "usable", "pinned", "trouble")
_JUDGED = ("committed", "quarantined", "damaged", "unreadable")
TROUBLE = frozenset({"quarantined", "damaged", "missing", "unreadable"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint: its name, state, and where the two sources of it are.

    Attributes:
        key: step and generation.
        name: of its folder.
        state: "committed", "on nodes", "quarantined", "damaged", "unreadable", "missing", "being written" or
            "not committed".
        line: what the journal tells.
        seen: what lies on storage.
    """

    key: tuple[int, int]
    name: str
    state: str
    line: CheckpointLine | None
    seen: Seen | None


class ShelfRows:
    """All checkpoints of a run at one moment, newest first.

    Args:
        chronicle: what its journal tells.
        look: what lies in its folder; None for a run whose durable tier is not a folder that can be looked at.
    """

    def __init__(self, chronicle: Chronicle, look: ShelfLook | None) -> None:
        self._memory, gone = chronicle.memory, chronicle.gone
        self._copied = chronicle.copied
        self._writing = self._memory.generation if self._memory.attempt_open else -1
        seen: Mapping[str, Seen] = look.entries if look is not None else {}
        entries = []
        for name in {*chronicle.checkpoints, *(seen.keys() - gone.keys())}:
            line, found = chronicle.checkpoints.get(name), seen.get(name)
            key = (line.step, line.generation) if line else parse_checkpoint_name(name)
            if key is not None and (state := self._state(name, key[1], line, found, look)):
                entries.append(Entry(key, name, state, line, found))
        entries.sort(key=lambda entry: entry.key, reverse=True)
        self.entries = entries
        if any(entry.state == "missing" for entry in entries):
            # A tracker that was killed may have deleted what it had no time to tell: what no rule keeps is not missed.
            wanted = self._plan(*_JUDGED, "missing")
            self.entries = [e for e in entries if e.state != "missing" or wanted[e.name].keep]

    def _state(
        self,
        name: str,
        generation: int,
        line: CheckpointLine | None,
        seen: Seen | None,
        look: ShelfLook | None,
    ) -> str:
        """In one word; empty for what is gone, or not known to be there."""
        tiers = self._memory.tiers.get(name, {})
        if (line and line.quarantined is not None) or (seen and seen.quarantined is not None):
            return "quarantined"
        if seen is not None and seen.usable:
            return "committed"
        if seen is not None and seen.committed:
            return "unreadable" if seen.unreadable else "damaged"
        if DURABLE in tiers:
            # The journal is ahead of a listing; that a checkpoint is gone is said when it stays away.
            return "missing" if look is not None and look.is_missing(name) else "committed"
        if tiers:
            return "on nodes"
        if seen is not None:
            return "being written" if generation == self._writing else "not committed"
        return ""

    @cached_property
    def _verdicts(self) -> dict[str, Verdict]:
        """What the rules of the run say of each; asked for only when the table is shown."""
        return self._plan(*_JUDGED)

    def _plan(self, *states: str) -> dict[str, Verdict]:
        rules, is_left = recorded_rules(self._memory), passed(self._memory.left)
        judged = [entry for entry in self.entries if entry.state in states]
        records = [self._record(entry, is_left) for entry in judged]
        verdicts = plan(records, rules.policies(), quarantined=rules.quarantined)
        return {verdict.name: verdict for verdict in verdicts}

    def _record(self, entry: Entry, is_left: Any) -> Record:
        line, seen = entry.line, entry.seen
        quarantined = (line and line.quarantined) or (seen and seen.quarantined) or None
        fault = seen.fault if seen is not None and not seen.usable else None
        record = Record(
            name=entry.name,
            step=entry.key[0],
            generation=entry.key[1],
            committed_at=_first(seen and seen.committed_at, line and line.committed_at, 0.0),
            metrics=(seen and seen.metrics) or {},
            pinned=tuple(sorted(self._memory.pins.get(entry.name, ()))),
            verified=entry.name in self._memory.verified,
            quarantined=quarantined,
            refused=fault == NO_MANIFEST,
            in_use="",
            fault=fault,
        )
        why = is_left(record) if self._memory.left and entry.state == "committed" else None
        return replace(record, quarantined=why) if why else record

    def tiers(self, entry: Entry) -> dict[str, float]:
        """Tiers that have it, fastest first, and since when, seconds since the epoch; 0 when that is not known."""
        known = self._memory.tiers.get(entry.name, {})
        fast = [tier for tier in TIER_NAMES if tier in known and tier != DURABLE]
        found: dict[str, float] = {tier: known[tier] for tier in fast}
        if entry.state == "committed":
            found[DURABLE] = known.get(DURABLE) or (entry.seen and entry.seen.committed_at) or 0.0
        return found

    def saved_at(self, entry: Entry) -> float | None:
        """When it was committed first, in whatever tier: a copy is as old as what is in it."""
        line, seen = entry.line, entry.seen
        times = (line and line.committed_at, seen and seen.committed_at)
        return min((time_s for time_s in times if time_s), default=None)

    def newest_durable(self) -> Entry | None:
        """The newest checkpoint that is committed in the durable tier and may be restored."""
        is_left = passed(self._memory.left)
        for entry in self.entries:
            if entry.state == "committed" and not is_left(_Key(*entry.key)):
                return entry
        return None

    def select(self, show: str) -> list[Entry]:
        """Those of one kind (see :data:`SHOWS`), newest first."""
        if show == "usable":
            return [entry for entry in self.entries if entry.state in ("committed", "on nodes")]
        if show == "pinned":
            return [entry for entry in self.entries if self._memory.pins.get(entry.name)]
        if show == "trouble":
            return [
                entry for entry in self.entries if entry.state in TROUBLE or _drill_failed(entry)
            ]
        return self.entries

    def row(self, entry: Entry) -> dict[str, Any]:
        """One row, as plain values."""
        line, seen = entry.line, entry.seen
        verdict = self._verdicts.get(entry.name)
        quarantined = (line and line.quarantined) or (seen and seen.quarantined) or None
        fault = seen.fault if seen is not None and seen.committed and not seen.usable else None
        if entry.state == "missing":
            fault = "committed, by the journal, and its folder is gone"
        metrics = (seen and seen.metrics) or {}
        return {
            "name": entry.name,
            "step": entry.key[0],
            "generation": entry.key[1],
            "state": entry.state,
            "fault": quarantined or fault,
            "guard": _guard(entry),
            "committed_at": self.saved_at(entry),
            "tiers": self.tiers(entry),
            "copies": self._copied.get(entry.name),
            "verified_at": line and line.verified_at,
            "pins": sorted(self._memory.pins.get(entry.name, ())),
            "kept": None if verdict is None else list(verdict.reasons) if verdict.keep else [],
            "bytes": _first(seen and seen.bytes, line and line.bytes),
            "files": _first(seen and seen.files, line and line.files),
            "world_size": _first(seen and seen.world_size, line and line.world_size),
            "sample_offset": _first(seen and seen.sample_offset, line and line.sample_offset),
            "stall_s": line and line.stall_s,
            "upload_s": line and line.upload_s,
            "loss": _first(metrics.get("loss"), line and line.loss),
            "segment": seen and seen.segment,
            "drilled": _drilled(entry),
        }

    def counts(self) -> dict[str, Any]:
        """How many there are, of each state, and their bytes."""
        return {**self._counts, "states": {**self._counts["states"]}}

    @cached_property
    def _counts(self) -> dict[str, Any]:
        states: dict[str, int] = {}
        size = 0
        for entry in self.entries:
            states[entry.state] = states.get(entry.state, 0) + 1
            if entry.state in ("committed", "on nodes"):
                size += _first(entry.seen and entry.seen.bytes, entry.line and entry.line.bytes, 0)
        return {"total": len(self.entries), "states": states, "bytes": size}


@dataclass(frozen=True, slots=True)
class _Key:
    step: int
    generation: int


def _first(*values: Any) -> Any:
    for value in values:  # thousands of rows go through here: a generator takes twice as long
        if value is not None:
            return value
    return None


def _guard(entry: Entry) -> str | None:
    if entry.line is not None and entry.line.refused:
        return "refused"
    return "passed" if entry.state in ("committed", "on nodes") else None


def _drill_failed(entry: Entry) -> bool:
    return bool(entry.line and entry.line.drilled and not entry.line.drilled.get("ok"))


def _drilled(entry: Entry) -> dict[str, Any] | None:
    drill = entry.line and entry.line.drilled
    if not drill:
        return None
    problems = drill.get("problems") or [""]
    return {
        "time": drill.get("drilled_at", drill.get("time")),
        "ok": bool(drill.get("ok")),
        "seconds": drill.get("seconds"),
        "problem": "" if drill.get("ok") else str(problems[0]),
    }
