"""The lives of a run's worker groups: how an attempt begins, where, and how it ends."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.trust import key_problem
from ray_ckpt.clocks import boot_name
from ray_ckpt.errors import RestoreError, StorageError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.address import without_keys
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME
from ray_ckpt.tracker.keeper import Keeper
from ray_ckpt.tracker.loops import Loops
from ray_ckpt.tracker.places import Places
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import Attempt, TrackerOptions, Verdict
from ray_ckpt.tracker.restores import Restores
from ray_ckpt.tracker.sanity import Sanity
from ray_ckpt.tracker.standing import Standing
from ray_ckpt.tracker.steering import Steering
from ray_ckpt.tracker.verdict import verdict

logger = logging.getLogger(__name__)

# Nobody trains any more when a run has finished: its last housekeeping may take this long, seconds.
SETTLE_S = 30.0
# How the end of an attempt may be told that is about to leave.
_ENDS_OF_LEAVING = frozenset({"worker_error", "node_loss", "lost"})


class Attempts:
    """Attempts of one run.

    Args:
        run_dir: the run's folder.
        options: how to decide.
        record: puts an event on record.
        standing: where the run stands.
        steering: what the workers are told.
        restores: what they restore.
        loops: what is done about failures that come again.
        sanity: which checkpoints are of the course that the run is on.
        places: where its checkpoints are.
        keeper: keeps them.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        options: TrackerOptions,
        record: Recorder,
        standing: Standing,
        steering: Steering,
        restores: Restores,
        loops: Loops,
        sanity: Sanity,
        places: Places,
        keeper: Keeper,
    ) -> None:
        self._dir, self._options = run_dir, options
        self._record, self._memory = record, record.memory
        self._standing, self._steering = standing, steering
        self._restores, self._sanity, self._loops = restores, sanity, loops
        self._places, self._keeper = places, keeper
        self._told_gaps: set[str] = set()

    def begin(self, world_size: int, nodes: list[str]) -> Attempt:
        """Gives a new worker group its generation, its restore plan and its first directive.

        Raises:
            RestoreError: there are checkpoints and none can be used.
        """
        if problem := key_problem(self._dir):
            raise RestoreError(problem)  # before anything is on record: it is no fault of the run
        self._record.fence.check_alone()
        self._places.begin(nodes)
        if self._memory.attempt_open:
            # Nobody said how the last one ended: its driver died, or its whole cluster.
            self.interrupted(kind="lost", cause="the job ended without a word")
        self._restores.begin()
        self._keeper.cancel()
        # Before the attempt is on record: a run without a usable checkpoint must not start from zero.
        entry = self._restores.newest_usable()
        generation = 1 + self._highest_generation()
        gaps = self._gaps(entry)
        fault_point("attempt.begin")
        self._record(
            "attempt_started",
            generation=generation,
            world_size=world_size,
            nodes=nodes,
            pid=os.getpid(),
            host=platform.node(),
            boot=boot_name(),
            plan=entry.folder.name if entry else "",
            must=True,  # a generation that is not on record could be given out twice
        )
        fault_point("attempt.begun")
        for name, problem in gaps.items():
            if name not in self._told_gaps:
                self._record("alert", name=name, problem=problem)
        self._told_gaps |= gaps.keys()
        self._keeper.begin()
        self._tell_tiers()
        self._loops.begin()
        self._steering.begin_attempt()
        self._places.began()
        return Attempt(
            generation=generation,
            plan=self._restores.plan(entry),
            directive=self._steering.directive(),
            skips=self._memory.skips,
            signed=signature.active() is not None,
            holders=self._places.holders(),
        )

    def _gaps(self, entry: Listed | None) -> dict[str, str]:
        """Files of the run's records that end before the checkpoint that it goes on from, and what that means."""
        found: dict[str, str] = {}
        if entry is None:
            return found
        if not self._memory.generation:
            found[JOURNAL_NAME] = (
                f"it tells of no attempt, and there is {entry.folder.name}: interruptions, failures and times before "
                "are not known, and the run goes on without them"
            )
        told = self._standing.newest_step
        if told < entry.step:
            found[STEPS_NAME] = (
                f"it ends at step {told}, and the run goes on from step {entry.step}: the lines of the steps between "
                "are missing"
            )
        return found

    def _highest_generation(self) -> int:
        """The highest generation that left a trace: a journal may be lost, and its generations not."""
        traces = self._places.newest_generation
        return max(self._memory.generation, self._standing.last_generation, traces)

    def _tell_tiers(self) -> None:
        """Puts the tiers on record, where the command line finds them."""
        stack = self._options.stack
        found: dict[str, Any] = {
            "use": list(stack.use),
            "remote": without_keys(stack.remote) if stack.remote else "",
            "replicas": stack.replicas,
        }
        if self._memory.stack != found and (self._memory.stack or stack.node_tiers):
            self._record("tiers", **found)

    def restored(
        self,
        *,
        step: int,
        seconds: float,
        source: str,
        reason: str,
        worker_monotonic: float | None,
    ) -> None:
        """Notes where an attempt begins (see :meth:`ray_ckpt.tracker.core.TrackerCore.restored`)."""
        # Less than was kept when the last attempt ended, if a checkpoint turned out to be bad since
        # then; more, if one came back. Only a count that lost its beginning would fall below 0.
        lost_steps_more = max(-self._memory.lost_steps, self._standing.step - step)
        self._record(
            "restored",
            step=step,
            seconds=seconds,
            source=source,
            reason=reason,
            worker_monotonic=worker_monotonic,
            # Every byte was read and compared on the way in; of copies on nodes, that says nothing of the durable ones.
            verified=None if self._places.on_nodes(source) else source or None,
            lost_steps_more=lost_steps_more,
        )
        self._places.restoring("")
        self._standing.step = step

    def interrupted(self, kind: str, cause: str, *, group: str = "", **more: Any) -> Verdict:
        """Notes that an attempt ended (see :meth:`ray_ckpt.tracker.core.TrackerCore.interruption`)."""
        trouble = self._memory.trouble
        if self._memory.finished_step is not None:
            # Somebody wanted the group to end while it made the last step: nothing was interrupted.
            return verdict(self._memory, self._options, trouble)
        if trouble is not None and kind in ("worker_error", "lost"):
            # The attempt ended because it said so before.
            kind, cause = "nonfinite", str(trouble["reason"])
        elif (leave := self._memory.leave) is not None and kind in _ENDS_OF_LEAVING:
            # Somebody announced it; how the last worker went makes no difference, what was saved does.
            told = "" if kind == "worker_error" and leave["saves"] else f" ({kind}: {cause})"
            kind, cause = str(leave["kind"]), str(leave["cause"]) + told
        if not group or group != self._memory.last_group:
            self._places.refresh()
            step, kept = self._standing.step, self._kept_step()
            lost_steps = max(0, step - kept)
            if copy := self._loops.against_copy(kind):
                more["restoring"] = copy
            self._record(
                "interruption",
                kind=kind,
                cause=cause,
                step=step,
                lost_steps=lost_steps,
                exposure_s=self._memory.exposure_s,
                group=group,
                **more,
            )
            self._standing.step = step - lost_steps
            self._loops.look(self._steering.step_time_s)
            self._steering.decide()
        return verdict(self._memory, self._options, trouble)

    def _kept_step(self) -> int:
        """Where a new attempt would begin."""
        try:
            entry = next(iter(self._sanity.on_course()), None)
        except StorageError:
            logger.exception("what is kept cannot be told now; the next restore will tell")
            return self._standing.step
        return entry.step if entry else 0

    def finished(self, step: int) -> None:
        """Notes that the run is complete."""
        self._standing.flush()  # lines that the disk refused before have no later ones to go with
        self._record("finished", step=step, exposure_s=self._memory.exposure_s)
        self._standing.step = step
        self._keeper.settle(SETTLE_S)
        self._places.close()
