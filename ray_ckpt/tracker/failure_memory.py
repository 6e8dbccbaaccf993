"""What the tracker remembers of a run's failures: which came lately, what was done, which checkpoint they came with."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from ray_ckpt.policy.loops import Failure

# More than anybody's budget of failures within hours.
RECENT_FAILURES = 1000


@dataclass(kw_only=True)
class FailureMemory:
    """Failures of a run so far; the part of :class:`ray_ckpt.tracker.memory.RunMemory` that is about them.

    Attributes:
        failed: the last failures since somebody last looked at the run, oldest first.
        loop: the event that says what is done about failures that come again, None while another attempt is simply
            made.
        plan: checkpoint that the newest attempt is restoring, as far as the journal tells; empty when it has.
        restore_failures: checkpoint to how many attempts failed while they restored it.
        suspected: node to how many hangs it was suspected of.
        excluded: nodes that get no workers.
        stragglers: nodes that are slower than the others, and how many times, as was told last.
        limits: how often failures may come, on record: ``tries``, ``on_loop``, ``budgets``, ``window_s``; None for
            the rule that has no options.
    """

    failed: deque[Failure] = field(default_factory=lambda: deque(maxlen=RECENT_FAILURES))
    loop: dict[str, Any] | None = None
    plan: str = ""
    restore_failures: Counter[str] = field(default_factory=Counter)
    suspected: Counter[str] = field(default_factory=Counter)
    excluded: tuple[str, ...] = ()
    stragglers: dict[str, float] = field(default_factory=dict)
    limits: dict[str, Any] | None = None

    def _failed(self, event: dict[str, Any], generation: int, exposure_s: float) -> None:
        """Takes an interruption that nobody planned."""
        if event.get("restoring"):
            self.restore_failures[str(event["restoring"])] += 1
        self.suspected.update(map(str, event.get("suspect_nodes", ())))
        self.failed.append(
            Failure(
                generation=generation,
                kind=str(event["kind"]),
                cause=str(event.get("cause", "")),
                step=int(event["step"]),
                exposure_s=exposure_s,
                nodes=tuple(map(str, event.get("suspect_names", ()))),
                files=str(event.get("dumps", "")),
                restoring=str(event.get("restoring", "")),
                at_step=int(event.get("at_step", 0)),
            )
        )

    def _was_restored(self, source: str) -> None:
        self.plan = ""
        self.restore_failures.pop(source, None)

    def _passed_over(self, name: str) -> None:
        """A checkpoint is not taken after all; which one is in its place is not told."""
        if name == self.plan:
            self.plan = ""

    def _on_excluded(self, event: dict[str, Any]) -> None:
        self.excluded = tuple(map(str, event["nodes"]))

    def _on_limits(self, event: dict[str, Any]) -> None:
        self.limits = {name: event[name] for name in ("tries", "on_loop", "budgets", "window_s")}

    def _on_straggler(self, event: dict[str, Any]) -> None:
        self.stragglers[str(event["node"])] = float(event["factor"])

    def _on_straggler_over(self, event: dict[str, Any]) -> None:
        self.stragglers.pop(str(event["node"]), None)
