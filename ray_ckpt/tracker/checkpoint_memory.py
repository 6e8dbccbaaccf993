"""What the tracker remembers of a run's checkpoints: where each of them is, and what is known of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from ray_ckpt.checkpoint.names import parse_checkpoint_name

# A change of storage should move the interval within a few saves; one odd save should not.
RECENT_SAVES = 3
# The tier of events that name none: for long there was no other.
DURABLE: Final = "durable"


@dataclass(kw_only=True)
class CheckpointMemory:
    """Checkpoints of a run so far; the part of :class:`ray_ckpt.tracker.memory.RunMemory` that is about them.

    Attributes:
        verified: checkpoints whose bytes in the durable tier were all read and compared after their commit.
        read_at: checkpoint to when that was last tried, seconds since the epoch.
        pins: checkpoint to its pins, as far as the journal tells.
        drills: checkpoint to the time of its newest drill that the journal tells of.
        durable_commits: how many checkpoints were committed in the durable tier.
        tiers: checkpoint to the tiers that have it, as far as the journal tells, and since when.
        tier_steps: tier to the step of the newest checkpoint that got there.
        quarantined: checkpoints that were found bad in the durable tier.
        to_keep: checkpoint to why it is to be pinned, once it is in the durable tier.
        transfers_s: tier to how long the last few copies to it took, seconds.
        replicas_s: how long the last few copies to the memory of other nodes took, seconds.
    """

    verified: set[str] = field(default_factory=set)
    read_at: dict[str, float] = field(default_factory=dict)
    pins: dict[str, set[str]] = field(default_factory=dict)
    drills: dict[str, float] = field(default_factory=dict)
    durable_commits: int = 0
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    tier_steps: dict[str, int] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    to_keep: dict[str, list[str]] = field(default_factory=dict)
    transfers_s: dict[str, deque[float]] = field(default_factory=dict)
    replicas_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_SAVES))

    @property
    def last_read_s(self) -> dict[str, float]:
        """Checkpoint in the durable tier to when its bytes were last read, or written, seconds since the epoch."""
        return {
            name: max(tiers[DURABLE], self.read_at.get(name, 0.0))
            for name, tiers in self.tiers.items()
            if DURABLE in tiers
        }

    @property
    def durable_step(self) -> int | None:
        """Step of the newest checkpoint that got to the durable tier."""
        return self.tier_steps.get(DURABLE)

    def _arrived(self, event: dict[str, Any]) -> None:
        tier, name = str(event.get("tier", DURABLE)), str(event["name"])
        self.tiers.setdefault(name, {})[tier] = float(event["time"])
        self.tier_steps[tier] = int(event["step"])
        self.durable_commits += tier == DURABLE

    def _on_replicated(self, event: dict[str, Any]) -> None:
        if event["copies"] > 1:
            self.replicas_s.append(float(event["seconds"]))

    def _on_promote(self, event: dict[str, Any]) -> None:
        self._arrived(event)
        times_s = self.transfers_s.setdefault(str(event["tier"]), deque(maxlen=RECENT_SAVES))
        times_s.append(float(event["seconds"]))

    def _on_quarantine(self, event: dict[str, Any]) -> None:
        self.verified.discard(str(event["name"]))
        self.tiers.get(str(event["name"]), {}).pop(DURABLE, None)
        self.quarantined.add(str(event["name"]))
        self._step_back()

    def _step_back(self) -> None:
        """The durable tier has lost a checkpoint that was promised: the next one is due all the sooner."""
        there = (
            key
            for name, tiers in self.tiers.items()
            if DURABLE in tiers and (key := parse_checkpoint_name(name))
        )
        newest = max((step for step, _ in there), default=None)
        if newest is None:
            self.tier_steps.pop(DURABLE, None)
        elif self.tier_steps.get(DURABLE, newest) > newest:
            self.tier_steps[DURABLE] = newest

    def _on_delete(self, event: dict[str, Any]) -> None:
        tier, name = str(event.get("tier", DURABLE)), str(event["name"])
        tiers = self.tiers.get(name, {})
        tiers.pop(tier, None)
        if not tiers:
            self.tiers.pop(name, None)
        if tier != DURABLE:
            return
        self.read_at.pop(name, None)
        self.verified.discard(str(event["name"]))
        self.pins.pop(str(event["name"]), None)
        self.quarantined.discard(name)
        self.drills.pop(str(event["name"]), None)

    def _on_drill(self, event: dict[str, Any]) -> None:
        name = str(event["name"])
        self.drills[name] = max(float(event["drilled_at"]), self.drills.get(name, 0.0))
        if event.get("faults"):
            # Somebody else's finding, who may have bad memory: before older ones go it is read again here.
            self.verified.discard(name)

    def _on_keep(self, event: dict[str, Any]) -> None:
        reasons = self.to_keep.setdefault(str(event["name"]), [])
        if event["reason"] not in reasons:
            reasons.append(str(event["reason"]))

    def _on_pin(self, event: dict[str, Any]) -> None:
        left = [r for r in self.to_keep.pop(str(event["name"]), []) if r != event["reason"]]
        if left:
            self.to_keep[str(event["name"])] = left
        pins = self.pins.setdefault(str(event["name"]), set())
        pins.add(f"{event['reason']} ({event['author']})")

    def _on_unpin(self, event: dict[str, Any]) -> None:
        pins = self.pins.get(str(event["name"]), set())
        pins.discard(f"{event['reason']} ({event['author']})")
        if not pins:
            self.pins.pop(str(event["name"]), None)

    def _on_copies(self, event: dict[str, Any]) -> None:
        """What the nodes hold at the beginning of an attempt: what was there before may be gone."""
        time_s, found = float(event["time"]), dict(event["tiers"])
        for name in {*self.tiers, *found}:
            tiers = self.tiers.setdefault(name, {})
            for tier in tiers.keys() - {DURABLE, *found.get(name, ())}:
                del tiers[tier]
            for tier in found.get(name, ()):
                tiers.setdefault(tier, time_s)
            if not tiers:
                del self.tiers[name]
