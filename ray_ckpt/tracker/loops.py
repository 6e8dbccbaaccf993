"""What a run does about failures that come again: it stops with the whole story, goes further back, or leaves out.

Decisions are pure (:mod:`ray_ckpt.policy.loops`); the way back is the one of a run that is not finite
(:mod:`ray_ckpt.tracker.rollback`), with the same limit on how often. Here they are put on record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.errors import StorageError
from ray_ckpt.policy.loops import LoopRule, loops, over_budget, story
from ray_ckpt.skips import Skip, skip_past
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.records import BUNDLE_S
from ray_ckpt.tracker.rollback import choose

logger = logging.getLogger(__name__)

MOST_SLACK_STEPS = 3


class Loops:
    """Crash loops of one run.

    Args:
        rule: the options.
        max_rollbacks: in a row; then the run stops.
        memory: of the run.
        record: puts an event on record.
        on_course: usable checkpoints of the course that the run is on, newest first.
        keep: keeps a checkpoint, for a reason; raises nothing.
    """

    def __init__(
        self,
        *,
        rule: LoopRule,
        max_rollbacks: int,
        memory: RunMemory,
        record: Callable[..., None],
        on_course: Callable[[], list[Listed]],
        keep: Callable[[str, str], None],
    ) -> None:
        self._rule, self._max_rollbacks = rule, max_rollbacks
        self._memory, self._record = memory, record
        self._on_course, self._keep = on_course, keep

    def begin(self) -> None:
        """Puts the limits on record, where people look how many failures are left."""
        rule = self._rule
        found = {
            "tries": rule.tries,
            "on_loop": rule.on_loop,
            "budgets": dict(rule.budgets),
            "window_s": rule.window_s,
        }
        if self._memory.limits != found and (self._memory.limits or rule != LoopRule()):
            self._record("limits", **found)

    def look(self, step_time_s: float | None) -> None:
        """Looks at the failures so far, once after each; puts on record what is done about a loop.

        Args:
            step_time_s: time of a step, seconds; None while it is not known.

        """
        try:
            self._look(step_time_s)
        except StorageError:
            # Nobody would go by a decision that is not on record: the next failure decides again.
            logger.exception("what to do about failures that come again cannot be decided now")

    def _look(self, step_time_s: float | None) -> None:
        failures, rule = list(self._memory.failed), self._rule
        # Rank 0 tells its steps in bundles: the last one of a worker that dies is lost. Where steps are so quick that
        # this is many of them, failures of different steps would look the same.
        late = math.ceil(BUNDLE_S / step_time_s) if step_time_s else 0
        if loops(failures, rule, min(MOST_SLACK_STEPS, late)):
            last = [failure for failure in failures if not failure.restoring][-rule.tries :]
            head = (
                f"the same failure came {rule.tries} times in a row after step {last[-1].finished_steps} "
                f"(--elastic.same-failure-tries {rule.tries}):\n{story(last)}"
            )
            step = max(failure.finished_steps for failure in last)
            # Where no worker could be asked, the batch that breaks may be as much later as its step was not told.
            self._decide(step if any(failure.at_step for failure in last) else step + late, head)
        elif problem := over_budget(failures, rule):
            self._tell(
                "stop", f"{problem}; the last ones:\n{story(failures[-3:])}", failures[-1].step
            )

    def against_copy(self, kind: str) -> str:
        """The checkpoint that a failure counts against, for it came while that was restored; empty for the run.

        Args:
            kind: of the failure.
        """
        name = self._memory.plan
        if kind not in ("worker_error", "hang") or not self._memory.attempt_open or not name:
            return ""
        tired = self._memory.restore_failures
        try:
            others = [entry.folder.name for entry in self._on_course()]
        except StorageError:
            return ""  # what else there is cannot be told now
        # The last one is never given up: if nothing else is left, the run is.
        return name if any(o != name and tired[o] < self._rule.tries for o in others) else ""

    def tired(self, names: list[str]) -> dict[str, str]:
        """Checkpoints whose restore failed too often: name to why they are passed over.

        Args:
            names: of those that could be restored.
        """
        counts = self._memory.restore_failures
        found = {
            name: f"{counts[name]} attempts failed while they restored it"
            for name in names
            if counts[name] >= self._rule.tries
        }
        return found if len(found) < len(names) else {}

    def _decide(self, step: int, head: str) -> None:
        memory, rule = self._memory, self._rule
        option = f"--elastic.on-crash-loop {rule.on_loop}"
        if rule.on_loop == "stop":
            hint = "Mend the reason, or start again with --elastic.on-crash-loop rollback or skip"
            self._tell("stop", f"{head}\n{hint}", step)
            return
        if memory.rollbacks >= self._max_rollbacks:
            times = f"after {memory.rollbacks} times back in a row"
            limit = f"--guard.max-rollbacks {self._max_rollbacks}"
            self._tell("stop", f"{head}\nIt comes back {times} ({option}, {limit})", step)
            return
        skipping, entries, bad_step = rule.on_loop == "skip", self._on_course(), step + 1
        entry = choose(entries, bad_step, memory.rollbacks + (not skipping))
        newest = choose(entries, bad_step, 0)
        if not skipping and (entry is None or entry is newest):
            self._tell("stop", f"{head}\nThere is no checkpoint further back ({option})", step)
            return
        to_step = entry.step if entry else 0
        skips = skip_past(memory.skips, to_step, bad_step) if skipping else memory.skips
        what = f", without the global batches since then up to step {bad_step}" if skipping else ""
        if entry:
            self._keep(entry.folder.name, f"the run went back to it from step {step}")
        name = entry.folder.name if entry else ""
        reason = f"{head}\nback to step {to_step}{what} ({option})"
        self._tell(rule.on_loop, reason, step, to=name, to_step=to_step, skips=skips)

    def _tell(
        self,
        action: str,
        reason: str,
        step: int,
        *,
        to: str = "",
        to_step: int = 0,
        skips: tuple[Skip, ...] = (),
    ) -> None:
        more: dict[str, Any] = {}
        if action != "stop":
            more = {"to": to, "to_step": to_step, "skips": [asdict(skip) for skip in skips]}
        self._record("crash_loop", action=action, reason=reason, step=step, must=True, **more)
