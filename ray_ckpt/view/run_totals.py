"""Totals of a run, and its newest copies: a fold over its journal, old lines and new ones alike."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.checkpoint.quarantine import GUARD
from ray_ckpt.tracker.checkpoint_memory import DURABLE
from ray_ckpt.view.metric_names import COPIES, METRICS, Key

Event = Mapping[str, Any]

_MALFORMED = (AttributeError, KeyError, TypeError, ValueError)  # what a line can be


class RunTotals:
    """What happened to a run, counted; and what of it the newest event alone says."""

    def __init__(self) -> None:
        self.copies = NewestCopies()
        self.tier_steps: dict[str, int] = {}  # as decided, for slower tiers
        self.last_drill_ok: bool | None = None
        self.sample_offset: int | None = None
        self._drilled_at = 0.0
        self._found: dict[Key, float] = {
            (name, value): 0.0
            for name, metric in METRICS.items()
            if metric.kind == "total"
            for value in (metric.values if metric.label else ("",))
        }

    def values(self) -> dict[Key, float]:
        """Every total."""
        return dict(self._found)

    def apply(self, event: Event) -> None:
        """Takes one event; one that says less than it should counts as far as it goes."""
        with contextlib.suppress(*_MALFORMED):
            self.copies.apply(event)
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            with contextlib.suppress(*_MALFORMED):
                handler(event)

    def _add(self, name: str, value: str = "", amount: float = 1.0) -> None:
        self._found[name, value] = self._found.get((name, value), 0.0) + amount

    def _on_commit(self, event: Event) -> None:
        self._arrived(event)
        self.sample_offset = int(event["sample_offset"])

    def _on_promote(self, event: Event) -> None:
        self._arrived(event)

    def _arrived(self, event: Event) -> None:
        tier = str(event.get("tier", DURABLE))
        self._add("ckpt_commits_total", tier)
        self._add("ckpt_bytes_total", tier, float(event["bytes"]))

    def _on_replicated(self, event: Event) -> None:
        self._add("ckpt_bytes_total", str(event["tier"]), float(event["bytes"]))

    def _on_save_failed(self, event: Event) -> None:
        self._add("ckpt_failures_total", "save")

    def _on_promote_failed(self, event: Event) -> None:
        self._add("ckpt_failures_total", "promote")

    def _on_bad_copy(self, event: Event) -> None:
        self._add("ckpt_failures_total", "copy")

    def _on_skipped(self, event: Event) -> None:
        self._add("ckpt_failures_total", "restore")

    def _on_delete_failed(self, event: Event) -> None:
        self._add("ckpt_failures_total", "delete")

    def _on_interruption(self, event: Event) -> None:
        self._add("ckpt_interruptions_total", str(event["kind"]))
        self._add("ckpt_lost_steps_total", amount=int(event["lost_steps"]))

    def _on_restored(self, event: Event) -> None:
        source = "none"
        if event["source"]:
            # Of what came from copies on the nodes, nothing was verified in the durable tier.
            source = DURABLE if event.get("verified") else "nodes"
        self._add("ckpt_restores_total", source)
        self._add("ckpt_lost_steps_total", amount=int(event.get("lost_steps_more", 0)))

    def _on_quarantine(self, event: Event) -> None:
        by_guard = event.get("by") == GUARD
        self._add("ckpt_quarantined_total", "guard" if by_guard else "damaged")
        if by_guard:
            self._add("ckpt_guard_findings_total", amount=max(1, len(event.get("findings", ()))))

    def _on_trouble(self, event: Event) -> None:
        self._add("ckpt_nonfinite_total", str(event["action"]))

    def _on_drill(self, event: Event) -> None:
        self._add("ckpt_drills_total", "ok" if event["ok"] else "failed")
        # Drills of several checkpoints may be told in any order.
        if float(event["drilled_at"]) >= self._drilled_at:
            self._drilled_at, self.last_drill_ok = float(event["drilled_at"]), bool(event["ok"])

    def _on_delete(self, event: Event) -> None:
        self._add("ckpt_deletes_total", str(event.get("tier", DURABLE)))

    def _on_alert(self, event: Event) -> None:
        self._add("ckpt_alerts_total")

    def _on_tier_decision(self, event: Event) -> None:
        self.tier_steps = {str(tier): int(steps) for tier, steps in event["every_steps"].items()}


class NewestCopies:
    """The newest checkpoint in the durable tier, and in any, that is there and on the course of the run."""

    def __init__(self) -> None:
        self._saved_at: dict[str, float] = {}
        self._tiers: dict[str, set[str]] = {}
        # A run that deletes nothing has very many: the newest is looked for only when it went.
        self._newest: dict[str, str | None] = dict.fromkeys(COPIES)

    def newest(self, tier: str) -> tuple[int, float] | None:
        """Its step, and when its state was saved, seconds since the epoch; None when there is none.

        Args:
            tier: "durable" or "any".
        """
        name = self._newest[tier]
        return None if name is None else (_order(name)[0], self._saved_at[name])

    def apply(self, event: Event) -> None:
        """Takes one event."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def _on_commit(self, event: Event) -> None:
        self._arrived(str(event["name"]), str(event.get("tier", DURABLE)), float(event["time"]))

    _on_promote = _on_commit

    def _arrived(self, name: str, tier: str, time_s: float) -> None:
        order = _order(name)
        # A copy is as old as its state, whenever it got there.
        self._saved_at.setdefault(name, time_s)
        self._tiers.setdefault(name, set()).add(tier)
        for kind in COPIES:
            before = self._newest[kind]
            if kind in (tier, "any") and (before is None or order > _order(before)):
                self._newest[kind] = name

    def _on_delete(self, event: Event) -> None:
        self._leave(str(event["name"]), str(event.get("tier", DURABLE)))

    def _on_quarantine(self, event: Event) -> None:
        self._leave(str(event["name"]), DURABLE)

    def _on_copies(self, event: Event) -> None:
        """What the nodes hold at the beginning of an attempt: what was there before may be gone."""
        found: Mapping[str, list[str]] = event["tiers"]
        for name in [*self._tiers]:
            for tier in self._tiers[name] - {DURABLE, *found.get(name, ())}:
                self._leave(name, tier)
        for name, tiers in found.items():
            for tier in tiers:
                self._arrived(name, tier, float(event["time"]))

    def _on_trouble(self, event: Event) -> None:
        """After a rollback the course beyond it is left: no attempt begins there any more."""
        if event["action"] in ("rollback", "rollback-and-skip"):
            for name in [name for name in self._tiers if _order(name)[0] > int(event["to_step"])]:
                for tier in [*self._tiers[name]]:
                    self._leave(name, tier)

    def _on_finished(self, event: Event) -> None:
        for name in [*self._tiers]:
            self._leave(name, "memory")

    def _leave(self, name: str, tier: str) -> None:
        tiers = self._tiers.get(name)
        if tiers is None or tier not in tiers:
            return
        tiers.discard(tier)
        if not tiers:
            del self._tiers[name]
        for kind in COPIES:
            if self._newest[kind] == name and not (tiers if kind == "any" else kind in tiers):
                there = (n for n, held in self._tiers.items() if kind == "any" or kind in held)
                self._newest[kind] = max(there, key=_order, default=None)
        if not tiers:
            del self._saved_at[name]


def _order(name: str) -> tuple[int, int]:
    key = parse_checkpoint_name(name)
    if key is None:
        raise ValueError(name)
    return key
