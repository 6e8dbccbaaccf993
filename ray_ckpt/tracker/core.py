"""The one authority of a run: generations, save steps, commits, what to restore.

Plain Python: no Ray, no torch, time passed in. The actor around it (:mod:`ray_ckpt.tracker.actor`) serves
one call at a time, so nothing here needs a lock. Whatever changes the future of the run is in the journal
before it is answered.

Every call of a worker carries its generation. A call of an older generation is refused: a worker that was
cut off and comes back cannot log a step, commit, or move anything.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    CheckpointEntry,
    Manifest,
    checkpoint_name,
    list_checkpoints,
    parse_checkpoint_name,
    usable,
    write_manifest,
    write_quarantine,
)
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import ManifestError, RestoreError, StaleGenerationError, StorageError
from ray_ckpt.tracker.journal import (
    JOURNAL_NAME,
    STEPS_NAME,
    JsonLines,
    LineQueue,
    NotSyncedError,
    newest_lines,
    read_lines,
)
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.pace import RECENT_STEPS, Pace
from ray_ckpt.tracker.records import (
    Attempt,
    Directive,
    RestorePlan,
    RunFacts,
    TrackerOptions,
    Verdict,
)
from ray_ckpt.tracker.shelf import (
    discard,
    incomplete,
    key_problem,
    manifest_in,
    new_manifest,
    restore_plan,
    why_not,
)

__all__ = [
    "Attempt",
    "Directive",
    "RestorePlan",
    "RunFacts",
    "TrackerCore",
    "TrackerOptions",
    "Verdict",
]

logger = logging.getLogger(__name__)


class TrackerCore:
    """State and decisions of one run.

    Args:
        facts: what stays the same for the run.
        options: how to decide.
        clock: seconds since the epoch.
        on_event: told every event after it is in the journal.
    """

    def __init__(
        self,
        facts: RunFacts,
        options: TrackerOptions,
        *,
        clock: Callable[[], float] = time.time,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        self._facts, self._options = facts, options
        self._clock, self._on_event = clock, on_event
        self._dir = Path(facts.run_dir)
        self.memory = RunMemory()
        for event in read_lines(self._dir / JOURNAL_NAME):
            self.memory.apply(event)
        self._journal = LineQueue(JsonLines(self._dir / JOURNAL_NAME, sync=True))
        self._steps = LineQueue(JsonLines(self._dir / STEPS_NAME, sync=False))
        # Where the run stands: the last step executed, less what is counted as lost.
        self._last_step = self.memory.kept_step
        self._last_generation, recent = newest_lines(self._dir / STEPS_NAME, RECENT_STEPS)
        if self.memory.attempt_open and self._last_generation == self.memory.generation:
            self._last_step = max(self._last_step, int(recent[-1]["step"]))
        self._last_record: dict[str, Any] = {}
        self._unreadable: dict[str, str] = {}  # what storage would not give this attempt, and why
        self._pace = Pace(options, self.memory, [float(line["step_time_s"]) for line in recent])

    # ---- attempts -------------------------------------------------------------------------------

    def begin_attempt(self, world_size: int, nodes: list[str]) -> Attempt:
        """Gives a new worker group its generation, its restore plan and its first directive.

        Raises:
            RestoreError: there are checkpoints and none can be used.
        """
        if problem := key_problem(self._dir):
            raise RestoreError(problem)  # before anything is on record: it is no fault of the run
        if self.memory.attempt_open:
            # Nobody said how the last one ended: its driver died, or its whole cluster.
            self.interruption(kind="lost", cause="the job ended without a word")
        self._unreadable.clear()
        # Before the attempt is on record: a run without a usable checkpoint must not start from zero.
        entry = self._newest_usable()
        generation = 1 + self._highest_generation()
        self._record(
            "attempt_started",
            generation=generation,
            world_size=world_size,
            nodes=nodes,
            pid=os.getpid(),
            host=platform.node(),
            must=True,  # a generation that is not on record could be given out twice
        )
        self._pace.begin_attempt()
        self._decide()
        return Attempt(
            generation=generation,
            plan=self._plan(entry),
            directive=self._directive(),
            signed=signature.active() is not None,
        )

    def restored(
        self, generation: int, step: int, seconds: float, source: str, reason: str
    ) -> None:
        """Notes where an attempt begins; ``source`` is a checkpoint's folder, empty for none."""
        self._check(generation)
        # Less than was kept when the last attempt ended, if a checkpoint turned out to be bad since
        # then; more, if one came back. Only a count that lost its beginning would fall below 0.
        lost_steps_more = max(-self.memory.lost_steps, self._last_step - step)
        self._record(
            "restored",
            step=step,
            seconds=seconds,
            source=source,
            reason=reason,
            verified=source or None,  # every byte was read and compared on the way in
            lost_steps_more=lost_steps_more,
        )
        self._last_step = step

    def reject(self, generation: int, name: str, faults: list[Fault]) -> RestorePlan | None:
        """Quarantines a checkpoint that failed verification and offers the next older one.

        Raises:
            RestoreError: it was the last one.
        """
        self._check(generation)
        if parse_checkpoint_name(name) is None:  # it becomes a path
            raise RestoreError(f"{name!r} is no checkpoint's name. Nothing was changed.")
        reason = f"{faults[0].path}: {faults[0].fault}"
        findings = [{"path": fault.path, "fault": fault.fault} for fault in faults]
        if all(fault.unreadable for fault in faults):
            # Storage failed, which says nothing about the bytes: skipped now, not condemned.
            self._unreadable[name] = reason
            self._record("skipped", name=name, reason=reason, faults=findings)
        else:
            self._quarantine(name, reason, findings)
        return self._plan(self._newest_usable())

    def interruption(self, kind: str, cause: str, *, group: str = "", **more: Any) -> Verdict:
        """Notes that the attempt ended, or that a worker group ended before its attempt began.

        Args:
            kind: such as "worker_error"; those in :data:`ray_ckpt.tracker.memory.PLANNED` are no failures.
            cause: in words.
            group: a name of the worker group that no other group of the run has. The end of a group is
                counted once, however often it is told: the call may come again when its answer was lost.
            more: fields for the journal.

        Returns:
            Whether the run goes on.
        """
        if not group or group != self.memory.last_group:
            step, kept = self._last_step, self._kept_step()
            lost_steps = max(0, step - kept)
            self._record(
                "interruption",
                kind=kind,
                cause=cause,
                step=step,
                lost_steps=lost_steps,
                exposure_s=self.memory.exposure_s,
                group=group,
                **more,
            )
            self._last_step = step - lost_steps
            self._decide()
        fruitless = self.memory.fruitless
        if fruitless >= self._options.max_fruitless:
            return Verdict(
                go_on=False,
                reason=f"{fruitless} attempts in a row ended before a new step or checkpoint, the last "
                f"{self.memory.last_end}",
            )
        return Verdict(go_on=True, reason="restart from the newest checkpoint")

    def finished(self, generation: int, step: int) -> None:
        """Notes that the run is complete."""
        self._check(generation)
        self._record("finished", step=step, exposure_s=self.memory.exposure_s)
        self._last_step = step

    # ---- steps and saves ------------------------------------------------------------------------

    def steps(self, generation: int, records: list[dict[str, Any]]) -> Directive:
        """Writes the lines of executed steps and answers with the present directive."""
        self._check(generation)
        # The generation that counts is the one that was checked.
        self._write_steps([{**record, "generation": generation} for record in records])
        for record in records:
            self.memory.exposure_s += float(record["step_time_s"])
            # A step after the attempt's end was told stands on what that end kept.
            is_open = self.memory.attempt_open
            self._last_step = int(record["step"]) if is_open else self._last_step + 1
            self._last_record = record
        if self._pace.steps([float(record["step_time_s"]) for record in records]):
            self._decide()
        return self._directive()

    def commit(self, generation: int, save: dict[str, Any]) -> bool:
        """Makes a written checkpoint usable, or says in the journal why not.

        Args:
            generation: of the writer.
            save: ``step, samples, tokens, world_size, files [{path, bytes, checksum}], stall_s,
                upload_s, metrics, guard, error, bitwise_comparable``.

        Returns:
            Whether the checkpoint is committed.

        Raises:
            StaleGenerationError: the writer belongs to an attempt that is over.
        """
        self._check(generation)
        step = int(save["step"])
        folder = self._dir / CHECKPOINTS_DIR / checkpoint_name(step, generation)
        manifest, problem = self._place(folder, generation, save)
        if manifest is None:
            self._record("save_failed", step=step, name=folder.name, error=problem)
            discard(folder)
            return False
        if folder.name in self.memory.committed:
            return True  # the same call again: the answer to the first was lost
        self._record(
            "commit",
            step=step,
            name=folder.name,
            bytes=manifest.total_bytes,
            files=len(manifest.files),
            world_size=manifest.world_size,
            sample_offset=manifest.sample_offset,
            stall_s=float(save["stall_s"]),
            upload_s=float(save["upload_s"]),
            exposure_s=self.memory.exposure_s,
        )
        self._decide()
        return True

    def _place(
        self, folder: Path, generation: int, save: dict[str, Any]
    ) -> tuple[Manifest | None, str]:
        """The manifest of a checkpoint, put in place if it is not there yet; or None and why not."""
        try:
            # First of all: a commit that is in place is never undone, whatever a late or repeated call says.
            manifest = manifest_in(folder)
            if manifest is not None:
                return manifest, ""
            problem = save["error"] or incomplete(folder, save["files"])
            if problem:
                return None, str(problem)
            manifest = new_manifest(self._facts, generation, save, committed_at=self._clock())
            write_manifest(folder, manifest)
            return manifest, ""
        except (ManifestError, StorageError, OSError, ValueError) as error:
            return None, str(error)
        except (TypeError, LookupError) as error:
            return None, f"the report of the save cannot be understood ({error!r})"

    def request_save(self, reason: str, hold_s: float = 0.0) -> int:
        """Asks the workers for a save at their next step; returns the number of the request.

        Args:
            reason: why, in words.
            hold_s: how long the workers wait after the save, seconds: whoever asked is about to end the attempt,
                and a step made in between would be lost.
        """
        number = self.memory.save_requests + 1
        self._record("save_requested", reason=reason, number=number, hold_s=hold_s)
        return number

    # ---- looking --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        memory = self.memory
        return {
            "run": self._facts.run,
            "attempt_open": memory.attempt_open,
            "generation": memory.generation,
            "world_size": memory.world_size,
            "step": self._last_step,
            "last": self._last_record,
            "step_time_s": self._pace.step_time_s,
            "commits": memory.commits,
            "failed_saves": memory.failed_saves,
            "last_commit_step": memory.last_commit_step,
            "last_commit_time": memory.last_commit_time,
            "interruptions": dict(memory.interruptions),
            "lost_steps": memory.lost_steps,
            "first_time": memory.first_time,
            "finished_step": memory.finished_step,
            "mtbf_s": self._pace.belief(memory).mtbf_s,
            "decision": asdict(self._pace.decision),
        }

    # ---- inside ---------------------------------------------------------------------------------

    def _check(self, generation: int) -> None:
        now = self.memory.generation
        if generation == now > 0:
            return
        known = f"attempt {now} has taken its place" if now else "no attempt has begun yet"
        raise StaleGenerationError(
            f"this worker belongs to attempt {generation} of run {self._facts.run!r}, which is over: "
            f"{known}. Nothing was changed."
        )

    def _highest_generation(self) -> int:
        """The highest generation that left a trace: a journal may be lost, and its generations not."""
        folders = (entry.generation for entry in list_checkpoints(self._dir))
        return max(self.memory.generation, self._last_generation, *folders)

    def _kept_step(self) -> int:
        """Where a new attempt would begin."""
        try:
            entry = next(iter(usable(list_checkpoints(self._dir))), None)
        except StorageError:
            logger.exception("what is kept cannot be told now; the next restore will tell")
            return self._last_step
        return entry.step if entry else 0

    def _record(self, event: str, *, must: bool = False, **fields: Any) -> None:
        """Writes an event to the journal and takes it into memory.

        A full disk must not stop training, nor undo a commit that is in place: a line that cannot be
        written waits for the next one, unless it ``must`` be on record before it counts.
        """
        generation = fields.pop("generation", self.memory.generation)
        line = {"time": self._clock(), "generation": generation, "event": event, **fields}
        self._journal.add(line)
        problem: StorageError | None = None
        try:
            self._journal.flush()
        except NotSyncedError as error:
            problem = error
            logger.exception("the journal may not outlive a power cut")
        except StorageError as error:
            problem = error
            if must:
                self._journal.take_back()
                raise
            logger.exception("the journal lags behind by %d lines", len(self._journal))
        self.memory.apply(line)
        try:
            self._on_event(line)
        except Exception:
            # Whoever looks on must not undo what is on record.
            logger.exception("the event %r could not be told", event)
        if must and problem is not None:
            raise problem

    def _write_steps(self, lines: list[dict[str, Any]]) -> None:
        self._steps.add(*lines)
        try:
            self._steps.flush()
        except StorageError:
            logger.exception("steps.jsonl lags behind by %d lines", len(self._steps))

    def _newest_usable(self) -> CheckpointEntry | None:
        entries = list_checkpoints(self._dir)
        for entry in entries:
            damaged = entry.manifest is None and entry.committed and not entry.unreadable
            if damaged and entry.quarantined is None:
                # Somebody once promised this checkpoint; that it cannot be used must be seen.
                self._quarantine(entry.folder.name, f"manifest: {entry.fault}", [])
        good = [entry for entry in usable(entries) if entry.folder.name not in self._unreadable]
        # The journal counts too: manifests that are all gone do not make a new run.
        if not good and (self.memory.commits or any(entry.committed for entry in entries)):
            reasons = [f"{e.folder.name}: {why_not(e, self._unreadable)}" for e in entries[:3]]
            raise RestoreError(
                f"run {self._facts.run!r} has committed checkpoints, and none below "
                f"{self._dir / CHECKPOINTS_DIR} can be used ({'; '.join(reasons) or 'the folder is empty'}). "
                "Such a run never starts from zero by itself: see `ray-ckpt ls`, bring a good copy back, or "
                "choose another --run name."
            )
        return good[0] if good else None

    def _quarantine(self, name: str, reason: str, findings: list[dict[str, Any]]) -> None:
        folder = self._dir / CHECKPOINTS_DIR / name
        write_quarantine(folder, reason, time_s=self._clock(), findings=findings)
        self._record("quarantine", name=name, reason=reason, faults=findings)

    def _plan(self, entry: CheckpointEntry | None) -> RestorePlan | None:
        if entry is None:
            return None
        return restore_plan(entry, list_checkpoints(self._dir), self._unreadable)

    def _decide(self) -> None:
        decision = self._pace.decide(self.memory)
        if decision is not None and self.memory.generation:
            self._record("decision", **asdict(decision))

    def _directive(self) -> Directive:
        decision = self._pace.decision
        return Directive(
            every_steps=decision.every_steps,
            reason=decision.reason,
            save_request=self.memory.save_requests,
            hold_s=self.memory.hold_s,
            last_commit_step=self.memory.last_commit_step,
            failed_in_a_row=self.memory.failed_in_a_row,
        )
