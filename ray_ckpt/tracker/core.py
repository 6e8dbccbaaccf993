"""The one authority of a run: generations, save steps, commits, what to restore.

Plain Python: no Ray, no torch, time passed in. The actor around it (:mod:`ray_ckpt.tracker.actor`) serves
one call at a time, so nothing here needs a lock. Whatever changes the future of the run is in the journal
before it is answered.

Every call of a worker carries its generation. A call of an older generation is refused: a worker that was
cut off and comes back cannot log a step, commit, or move anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ray_ckpt.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST_NAME,
    CheckpointEntry,
    FileEntry,
    Manifest,
    checkpoint_name,
    list_checkpoints,
    usable,
    write_manifest,
    write_quarantine,
)
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import ManifestError, RestoreError, StaleGenerationError, StorageError
from ray_ckpt.policy.decision import Decision, IntervalLimits, Measured, decide
from ray_ckpt.policy.failures import FailureBelief
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME, JsonLines, read_lines
from ray_ckpt.tracker.memory import RunMemory

logger = logging.getLogger(__name__)

# Steps whose times give the median step time.
_RECENT_STEPS = 50
_FEW_STEPS = 3
# A decision is written down when it moves by more than this share.
_WORTH_TELLING = 0.02


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What every manifest of a run repeats.

    Attributes:
        run: name of the run.
        run_dir: its folder.
        config_fingerprint: of the options that decide the course of training.
        data_fingerprint: of the data.
        parallel: "ddp" or "fsdp".
        versions: of the libraries.
    """

    run: str
    run_dir: str
    config_fingerprint: str
    data_fingerprint: str
    parallel: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """How the tracker decides.

    Attributes:
        limits: bounds of the interval.
        prior_mtbf_s: mean time between failures before any was seen, seconds.
        prior_weight: failures that the prior is worth.
        max_fruitless: attempts in a row without a new step before the run is stopped.
    """

    limits: IntervalLimits
    prior_mtbf_s: float
    prior_weight: float = 1.0
    max_fruitless: int = 3


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """The one checkpoint that all ranks of an attempt restore.

    Attributes:
        name: its folder's name.
        manifest: its manifest.
        reason: why this one, in words.
    """

    name: str
    manifest: Manifest
    reason: str


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a new worker group is told.

    Attributes:
        generation: of this attempt.
        plan: what to restore; None starts from the beginning.
        directive: how often to save.
    """

    generation: int
    plan: RestorePlan | None
    directive: Directive


@dataclass(frozen=True, kw_only=True)
class Directive:
    """What rank 0 goes by until the next one.

    Attributes:
        every_steps: steps between saves.
        reason: why.
        save_request: number of the latest request for a save at the next step; grows.
        last_commit_step: step of the newest commit, None before the first.
        failed_in_a_row: failed saves since the last commit.
    """

    every_steps: int
    reason: str
    save_request: int
    last_commit_step: int | None
    failed_in_a_row: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the run goes on after an interruption.

    Attributes:
        go_on: whether another attempt is worth it.
        reason: why.
    """

    go_on: bool
    reason: str


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
        self._journal = JsonLines(self._dir / JOURNAL_NAME, sync=True)
        self._steps = JsonLines(self._dir / STEPS_NAME, sync=False)
        self._last_step = _last_executed_step(self._dir / STEPS_NAME)
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last_record: dict[str, Any] = {}
        self._unwritten: deque[dict[str, Any]] = deque()
        self._unwritten_steps: deque[dict[str, Any]] = deque()
        self._unreadable: set[str] = set()  # checkpoints that storage would not give, this attempt
        self._save_request = 0
        self._decision: Decision | None = None
        self._decide()

    # ---- attempts -------------------------------------------------------------------------------

    def begin_attempt(self, world_size: int, nodes: list[str]) -> Attempt:
        """Gives a new worker group its generation, its restore plan and its first directive.

        Raises:
            RestoreError: there are checkpoints and none can be used.
        """
        if self.memory.attempt_open:
            # Nobody said how the last one ended: its driver died, or its whole cluster.
            self.interruption(kind="lost", cause="the job ended without a word")
        self._unreadable.clear()
        # Before the attempt is on record: a run without a usable checkpoint must not start from zero.
        entry = self._newest_usable()
        generation = self.memory.generation + 1
        self._record(
            "attempt_started",
            generation=generation,
            world_size=world_size,
            nodes=nodes,
            pid=os.getpid(),
            host=platform.node(),
            must=True,  # a generation that is not on record could be given out twice
        )
        self._step_times.clear()
        self._decide()
        return Attempt(generation=generation, plan=self._plan(entry), directive=self._directive())

    def restored(
        self, generation: int, step: int, seconds: float, source: str, reason: str
    ) -> None:
        """Notes where an attempt begins; ``source`` is a checkpoint's folder, empty for none."""
        self._check(generation)
        self._last_step = step
        self._record(
            "restored",
            step=step,
            seconds=seconds,
            source=source,
            reason=reason,
            verified=source or None,  # every byte was read and compared on the way in
        )

    def reject(self, generation: int, name: str, faults: list[Fault]) -> RestorePlan | None:
        """Quarantines a checkpoint that failed verification and offers the next older one.

        Raises:
            RestoreError: it was the last one.
        """
        self._check(generation)
        reason = f"{faults[0].path}: {faults[0].fault}"
        findings = [{"path": fault.path, "fault": fault.fault} for fault in faults]
        if all(fault.unreadable for fault in faults):
            # Storage failed, which says nothing about the bytes: skipped now, not condemned.
            self._unreadable.add(name)
            self._record("skipped", name=name, reason=reason, faults=findings)
        else:
            folder = self._dir / CHECKPOINTS_DIR / name
            write_quarantine(folder, reason, time_s=self._clock(), findings=findings)
            self._record("quarantine", name=name, reason=reason, faults=findings)
        return self._plan(self._newest_usable())

    def interruption(self, kind: str, cause: str, **more: Any) -> Verdict:
        """Notes that the attempt ended, and says whether the run goes on."""
        step = self._last_step
        entry = next(iter(usable(list_checkpoints(self._dir))), None)
        kept = entry.step if entry else 0
        self._record(
            "interruption",
            kind=kind,
            cause=cause,
            step=step,
            lost_steps=max(0, step - kept),
            exposure_s=self.memory.exposure_s,
            **more,
        )
        self._decide()
        if self.memory.fruitless >= self._options.max_fruitless:
            return Verdict(
                go_on=False,
                reason=f"{self.memory.fruitless} attempts in a row ended before a new step, the last "
                f"at step {step}: {cause}",
            )
        return Verdict(go_on=True, reason="restart from the newest checkpoint")

    def finished(self, generation: int, step: int) -> None:
        """Notes that the run is complete."""
        self._check(generation)
        self._record("finished", step=step, exposure_s=self.memory.exposure_s)

    # ---- steps and saves ------------------------------------------------------------------------

    def steps(self, generation: int, records: list[dict[str, Any]]) -> Directive:
        """Writes the lines of executed steps and answers with the present directive."""
        self._check(generation)
        self._write_steps(records)
        for record in records:
            self._step_times.append(float(record["step_time_s"]))
            self.memory.exposure_s += float(record["step_time_s"])
            self._last_step = int(record["step"])
            self._last_record = record
        if self._decision is None or self._decision.interval_s is None:
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
        if self.memory.last_commit_name == folder.name:
            return (
                True  # the same call again: its first answer was lost with a restart of the actor
            )
        problem = save["error"] or _incomplete(folder, save["files"])
        if not problem:
            try:
                manifest = self._manifest(generation, save)
                write_manifest(folder, manifest)
            except (ManifestError, StorageError, OSError, ValueError) as error:
                problem = str(error)
        if problem:
            self._record("save_failed", step=step, name=folder.name, error=problem)
            _discard(folder)
            return False
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

    def request_save(self, reason: str) -> int:
        """Asks the workers for a save at their next step; returns the number of the request."""
        self._save_request += 1
        self._record("save_requested", reason=reason, number=self._save_request)
        return self._save_request

    # ---- looking --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        memory, decision = self.memory, self._decision
        return {
            "run": self._facts.run,
            "generation": memory.generation,
            "world_size": memory.world_size,
            "step": self._last_step,
            "last": self._last_record,
            "step_time_s": self._step_time(),
            "commits": memory.commits,
            "failed_saves": memory.failed_saves,
            "last_commit_step": memory.last_commit_step,
            "last_commit_time": memory.last_commit_time,
            "interruptions": dict(memory.interruptions),
            "lost_steps": memory.lost_steps,
            "first_time": memory.first_time,
            "finished_step": memory.finished_step,
            "mtbf_s": self._belief().mtbf_s,
            "decision": None if decision is None else asdict(decision),
        }

    # ---- inside ---------------------------------------------------------------------------------

    def _check(self, generation: int) -> None:
        if generation != self.memory.generation:
            raise StaleGenerationError(
                f"this worker belongs to attempt {generation} of run {self._facts.run!r}, which is over: "
                f"attempt {self.memory.generation} has taken its place. Nothing was changed."
            )

    def _record(self, event: str, *, must: bool = False, **fields: Any) -> None:
        """Writes an event to the journal and takes it into memory.

        A full disk must not stop training, nor undo a commit that is in place: a line that cannot be
        written waits for the next one, unless it ``must`` be on record before it counts.
        """
        generation = fields.pop("generation", self.memory.generation)
        line = {"time": self._clock(), "generation": generation, "event": event, **fields}
        self._unwritten.append(line)
        try:
            while self._unwritten:
                self._journal.append(self._unwritten[0])
                self._unwritten.popleft()
        except StorageError:
            if must:
                self._unwritten.pop()
                raise
            logger.exception("the journal lags behind by %d lines", len(self._unwritten))
        self.memory.apply(line)
        self._on_event(line)

    def _write_steps(self, records: list[dict[str, Any]]) -> None:
        self._unwritten_steps.extend(records)
        try:
            while self._unwritten_steps:
                self._steps.append(self._unwritten_steps[0])
                self._unwritten_steps.popleft()
        except StorageError:
            logger.exception("steps.jsonl lags behind by %d lines", len(self._unwritten_steps))

    def _newest_usable(self) -> CheckpointEntry | None:
        entries = list_checkpoints(self._dir)
        good = [entry for entry in usable(entries) if entry.folder.name not in self._unreadable]
        for entry in entries:
            damaged = entry.manifest is None and entry.committed and not entry.unreadable
            if damaged and entry.quarantined is None:
                # Somebody once promised this checkpoint; that it cannot be used must be seen.
                reason = f"manifest: {entry.fault}"
                write_quarantine(entry.folder, reason, time_s=self._clock())
                self._record("quarantine", name=entry.folder.name, reason=reason, faults=[])
        # The journal counts too: manifests that are all gone do not make a new run.
        if not good and (self.memory.commits or any(entry.committed for entry in entries)):
            found = "; ".join(f"{e.folder.name}: {e.quarantined or e.fault}" for e in entries[:3])
            raise RestoreError(
                f"run {self._facts.run!r} has committed checkpoints, and none below "
                f"{self._dir / CHECKPOINTS_DIR} can be used ({found or 'the folder is empty'}). Such a run "
                "never starts from zero by itself: see `ray-ckpt ls`, bring a good copy back, or choose "
                "another --run name."
            )
        return good[0] if good else None

    def _plan(self, entry: CheckpointEntry | None) -> RestorePlan | None:
        if entry is None or entry.manifest is None:
            return None
        newer = [e for e in list_checkpoints(self._dir) if e.step > entry.step]
        reason = "newest committed checkpoint"
        if newer:
            e = newer[0]
            why = e.quarantined or e.fault or "not usable"
            more = f" and {len(newer) - 1} more" if len(newer) > 1 else ""
            reason += f"; newer {e.folder.name}{more} not used: {why}"
        return RestorePlan(name=entry.folder.name, manifest=entry.manifest, reason=reason)

    def _manifest(self, generation: int, save: dict[str, Any]) -> Manifest:
        return Manifest(
            run=self._facts.run,
            step=int(save["step"]),
            sample_offset=int(save["samples"]),
            tokens=int(save["tokens"]),
            world_size=int(save["world_size"]),
            generation=generation,
            committed_at=self._clock(),
            files=tuple(FileEntry(**entry) for entry in save["files"]),
            parallel=self._facts.parallel,
            guard=save["guard"],
            metrics=save["metrics"],
            config_fingerprint=self._facts.config_fingerprint,
            data_fingerprint=self._facts.data_fingerprint,
            versions=self._facts.versions,
            bitwise_comparable=bool(save["bitwise_comparable"]),
        )

    def _step_time(self) -> float | None:
        # The first step of an attempt waits for the data to start; alone it would mislead.
        return median(self._step_times) if len(self._step_times) >= _FEW_STEPS else None

    def _belief(self) -> FailureBelief:
        return FailureBelief(
            prior_mtbf_s=self._options.prior_mtbf_s,
            prior_weight=self._options.prior_weight,
            failures=self.memory.failures,
            exposure_s=self.memory.exposure_s,
        )

    def _decide(self) -> None:
        measured = Measured(
            step_s=self._step_time(),
            stall_s=self.memory.stall_s,
            upload_s=self.memory.upload_s,
            world_size=max(1, self.memory.world_size),
        )
        new, old = decide(measured, self._belief(), self._options.limits), self._decision
        self._decision = new
        moved = (
            old is None
            or new.formula != old.formula
            or abs(new.every_steps - old.every_steps) > _WORTH_TELLING * old.every_steps
        )
        if moved and self.memory.generation:
            self._record("decision", **asdict(new))

    def _directive(self) -> Directive:
        assert self._decision is not None
        return Directive(
            every_steps=self._decision.every_steps,
            reason=self._decision.reason,
            save_request=self._save_request,
            last_commit_step=self.memory.last_commit_step,
            failed_in_a_row=self.memory.failed_in_a_row,
        )


def _incomplete(folder: Path, files: list[dict[str, Any]]) -> str | None:
    """Why a list of files is not all there; None when it is."""
    names = {entry["path"] for entry in files}
    if ".metadata" not in names:
        return "the metadata of the checkpoint was not written"
    for entry in files:
        try:
            size = (folder / entry["path"]).stat().st_size
        except OSError as error:
            return f"{folder / entry['path']} is not there ({error.strerror})"
        if size != entry["bytes"]:
            return f"{folder / entry['path']} has {size} bytes, {entry['bytes']} were written"
    return None


def _discard(folder: Path) -> None:
    """Removes what a failed save left; its space may be what the next try needs.

    The manifest goes first: a folder without it is nothing, whatever else is left in it.
    """
    with contextlib.suppress(OSError):
        (folder / MANIFEST_NAME).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _last_executed_step(path: Path) -> int:
    last = 0
    for record in read_lines(path):
        last = int(record.get("step", last))
    return last
