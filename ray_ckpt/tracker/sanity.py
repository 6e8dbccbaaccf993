"""What a run does about states that are not sane: none is committed, each is kept to be looked at, and it goes back.

Decisions are pure (:mod:`ray_ckpt.checkpoint.guard`, :mod:`ray_ckpt.tracker.rollback`); here they are put on record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ray_ckpt.checkpoint.guard import GuardRule, is_nonfinite, judge, reason
from ray_ckpt.checkpoint.listing import Listed, usable
from ray_ckpt.checkpoint.quarantine import GUARD
from ray_ckpt.errors import ManifestError, StorageError, UnsaneStateError
from ray_ckpt.skips import Skip, skip_past
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.rollback import Remedy, choose, gives_up, left, remedy

logger = logging.getLogger(__name__)


class Sanity:
    """The guard's side of a run's tracker.

    Args:
        entries: lists all checkpoints of the run, newest first.
        rule: what may be committed, and what to do when the run is no longer finite.
        memory: of the run.
        record: puts an event on record.
        keep: keeps a checkpoint, for a reason; raises nothing.
        quarantine: labels a checkpoint as bad, by its name and a reason.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        entries: Callable[[], list[Listed]],
        rule: GuardRule,
        memory: RunMemory,
        record: Callable[..., None],
        keep: Callable[[str, str], None],
        quarantine: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        self._entries, self._rule, self._memory = entries, rule, memory
        self._record, self._keep, self._clock = record, keep, clock
        self._quarantine = quarantine

    def check(self, report: Mapping[str, Any]) -> None:
        """Lets a state pass, by what the guard saw in it.

        Raises:
            UnsaneStateError: it must not be committed.
        """
        findings = judge(report, [norm for _, norm in self._memory.norms], self._rule)
        if findings:
            more = int(report.get("more_findings", 0))
            raise UnsaneStateError(reason(findings, more), list(findings))

    def set_aside(self, name: str, save: Mapping[str, Any], error: UnsaneStateError) -> None:
        """Labels a refused checkpoint with its finding; the same call again changes nothing."""
        if name in self._memory.refusals:
            return
        found = save["guard"]
        facts = {
            "step": int(save["step"]),
            "samples": save["samples"],
            "loss": save["metrics"].get("loss"),
            "param_norm": found.get("param_norm"),
        }
        now_s = self._clock()
        try:
            self._quarantine(
                name, error.reason, time_s=now_s, findings=error.findings, by=GUARD, facts=facts
            )
        except (ManifestError, StorageError, OSError):
            # Without a manifest it is no checkpoint, with or without the note.
            logger.exception("%s: what the guard found could not be noted", name)
        self._record(
            "quarantine",
            name=name,
            by=GUARD,
            reason=error.reason,
            findings=error.findings,
            guard_s=found.get("seconds"),
            request=int(save.get("request", 0)),
            **facts,
        )

    def refusal(self, name: str) -> dict[str, Any] | None:
        """Why a save of the present attempt was refused: ``reason`` and ``nonfinite``; None if it was not."""
        event = self._memory.refusals.get(name)
        if event is None:
            return None
        return {"reason": event["reason"], "nonfinite": is_nonfinite(event["findings"])}

    def trouble(self, step: int, what: str, skips: tuple[Skip, ...]) -> Remedy:
        """Decides, once for an attempt, what a run does that is no longer finite.

        Args:
            step: first step that is known not to be finite.
            what: was not finite, in words.
            skips: holes in the order of the attempt.

        Raises:
            StorageError: the decision cannot be put on record, which the next attempt goes by.
        """
        memory, rule = self._memory, self._rule
        if memory.trouble is None:
            further_back = 0 if gives_up(rule, memory.rollbacks) else memory.rollbacks
            entry = choose(self.on_course(), step, further_back)
            to_step = entry.step if entry else 0
            found = remedy(rule, step=step, what=what, rollbacks=memory.rollbacks, to_step=to_step)
            skipping = found.action == "rollback-and-skip"
            after = skip_past(skips, to_step, step) if skipping else skips
            if entry and found.action != "stop":
                self._keep(entry.folder.name, f"the run went back to it from step {step}")
            self._record(
                "trouble",
                step=step,
                what=what,
                to=entry.folder.name if entry else "",
                to_step=to_step,
                skips=[asdict(skip) for skip in after],
                must=True,
                **asdict(found),
            )
        event = memory.trouble or {}
        return Remedy(action=event["action"], reason=event["reason"])

    def on_course(self) -> list[Listed]:
        """Usable checkpoints of the course that the run is on, newest first."""
        return [entry for entry in usable(self._entries()) if not left(entry, self._memory.left)]
