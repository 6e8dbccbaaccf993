"""Why each checkpoint of a listing is kept, by the rules that the run has on record."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ray_ckpt.checkpoint.drilled import Drilled
from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.tiers.retention import plan
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stack import TIER_NAMES
from ray_ckpt.tiers.stock import Stock
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.view.chronicle import CheckpointLine
from ray_ckpt.view.told import Facts, facts_of


def recorded_rules(memory: RunMemory) -> Rules:
    """The rules that a run has on record; without any, or with some that nobody can read, nothing is deleted."""
    try:
        return Rules.from_json(memory.retention or {})
    except ValueError:
        return Rules()


class Keeping:
    """What the rules on record say of the checkpoints of a listing.

    Args:
        memory: what the run's journal tells.
        stock: its checkpoints, newest first.
        lines: checkpoint to what the journal tells of it.
    """

    def __init__(
        self, memory: RunMemory, stock: Stock, lines: Mapping[str, CheckpointLine]
    ) -> None:
        self._lines = lines
        rules = recorded_rules(memory)
        verdicts = plan(stock.records, rules.policies(), quarantined=rules.quarantined)
        self._verdicts = {verdict.name: verdict for verdict in verdicts}
        self._pins, self._drills, self._memory = stock.pins, stock.drills, memory
        # Of pins that cannot be read the record says more than the pins do.
        self._pinned = {record.name: record.pinned for record in stock.records}
        self._pinned |= {orphan.name: orphan.pinned for orphan in stock.orphans}

    def of(self, name: str) -> dict[str, Any]:
        """Fields for scripts; `kept` is None for what was never committed, empty for what will go."""
        verdict = self._verdicts.get(name)
        return {
            "pinned": bool(self._pinned.get(name)),
            "pins": [asdict(pin) for pin in self._pins.get(name, ())],
            "kept": None if verdict is None else list(verdict.reasons) if verdict.keep else [],
        }

    def drill(self, name: str) -> Drilled | None:
        """The newest drill of a checkpoint."""
        drills = self._drills.get(name, ())
        return drills[-1] if drills else None

    @property
    def has_tiers(self) -> bool:
        """Whether the run has tiers on its nodes."""
        return bool(self._memory.stack)

    def tiers(self, name: str, *, durable: bool) -> dict[str, float]:
        """Tiers that have a checkpoint, fastest first, and since when, seconds since the epoch.

        Those on the nodes are what the run's journal tells: the durable tier alone can be looked at from here.
        """
        known = self._memory.tiers.get(name, {})
        found: dict[str, float] = {tier: known[tier] for tier in TIER_NAMES if tier in known}
        if durable:
            return {**found, "durable": known.get("durable", 0.0)}
        return {tier: since_s for tier, since_s in found.items() if tier != "durable"}

    def facts(self, entry: Listed) -> Facts:
        """What is known of a checkpoint, also of one that only nodes have."""
        name = entry.folder.name
        tiers = self.tiers(name, durable=entry.manifest is not None)
        # Of what is committed nowhere any more the journal tells what was.
        line = self._lines.get(name) if tiers or entry.committed else None
        return facts_of(entry, line, tiers)

    def on_nodes_alone(self, names: Collection[str]) -> list[str]:
        """Checkpoints that only nodes have, newest first, when these are those in the durable tier."""
        found = [name for name in self._memory.tiers if self.tiers(name, durable=False)]
        return sorted(set(found) - set(names), key=lambda name: _key(name), reverse=True)

    def pinned(self, name: str) -> str:
        """What to add to the state of a checkpoint."""
        return "".join(f", pinned: {words}" for words in self._pinned.get(name, ())[:1])

    def fields(self, entry: Listed) -> list[tuple[str, str]]:
        """Lines for people."""
        name, read = entry.folder.name, self.facts(entry).read_back
        lines = [("pinned", words) for words in self._pinned.get(name, ())]
        verdict = self._verdicts.get(name)
        if verdict is not None:
            word = "kept" if verdict.keep else "will be deleted"
            lines.append((word, "; ".join(verdict.reasons)))
        if self.has_tiers:
            for tier, since_s in self.tiers(name, durable=verdict is not None).items():
                since = f"since {_moment(since_s)}" if since_s else "yes"
                proved = f", read back {_moment(read[tier])}" if tier in read else ""
                lines.append((f"in {tier}", since + proved))
        return lines


def _key(name: str) -> tuple[int, int]:
    return parse_checkpoint_name(name) or (-1, -1)


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().isoformat(" ", "seconds")
