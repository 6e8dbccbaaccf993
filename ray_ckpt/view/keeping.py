"""Why each checkpoint of a listing is kept, by the rules that the run has on record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ray_ckpt.tiers.retention import plan
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stock import Stock
from ray_ckpt.tracker.memory import RunMemory


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
    """

    def __init__(self, memory: RunMemory, stock: Stock) -> None:
        rules = recorded_rules(memory)
        verdicts = plan(stock.records, rules.policies(), quarantined=rules.quarantined)
        self._verdicts = {verdict.name: verdict for verdict in verdicts}
        self._pins = stock.pins
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

    def pinned(self, name: str) -> str:
        """What to add to the state of a checkpoint."""
        return "".join(f", pinned: {words}" for words in self._pinned.get(name, ())[:1])

    def fields(self, name: str) -> list[tuple[str, str]]:
        """Lines for people."""
        lines = [("pinned", words) for words in self._pinned.get(name, ())]
        verdict = self._verdicts.get(name)
        if verdict is not None:
            word = "kept" if verdict.keep else "will be deleted"
            lines.append((word, "; ".join(verdict.reasons)))
        return lines
