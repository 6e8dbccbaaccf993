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
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.names import checkpoint_name, parse_checkpoint_name
from ray_ckpt.checkpoint.trust import key_problem
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.clocks import Instant, boot_name
from ray_ckpt.errors import (
    ManifestError,
    RestoreError,
    StaleGenerationError,
    StorageError,
    UnsaneStateError,
)
from ray_ckpt.fault_points import fault_point
from ray_ckpt.policy.decision import steps_to_next
from ray_ckpt.segment import Segment
from ray_ckpt.skips import Skip
from ray_ckpt.tiers.address import without_keys
from ray_ckpt.tiers.durable import remote_of
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.housekeeping import ReadBack, read_back
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tracker.aside import Aside, Thread
from ray_ckpt.tracker.copies import CopyBook, described
from ray_ckpt.tracker.house import FolderHouse, House, RemoteHouse
from ray_ckpt.tracker.journal import (
    JOURNAL_NAME,
    STEPS_NAME,
    JsonLines,
    LineQueue,
    NotSyncedError,
    last_generation,
    newest_lines,
    read_lines,
)
from ray_ckpt.tracker.keeper import Keeper
from ray_ckpt.tracker.memory import DURABLE, RunMemory
from ray_ckpt.tracker.pace import RECENT_STEPS, Pace
from ray_ckpt.tracker.places import InFolder, OnNodes, Places
from ray_ckpt.tracker.records import (
    Attempt,
    Directive,
    RestorePlan,
    RunFacts,
    TrackerOptions,
    Verdict,
)
from ray_ckpt.tracker.rollback import Remedy, left, passed_over
from ray_ckpt.tracker.sanity import Sanity
from ray_ckpt.tracker.segments import SegmentBook
from ray_ckpt.tracker.shelf import new_manifest, newest_usable, restore_plan
from ray_ckpt.tracker.tierdesk import Hooks, TierDesk

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

# Nobody trains any more when a run has finished: its last housekeeping may take this long, seconds.
SETTLE_S = 30.0


class TrackerCore:
    """State and decisions of one run.

    Args:
        facts: what stays the same for the run.
        options: how to decide.
        clock: seconds since the epoch.
        monotonic: seconds of a clock that nobody sets.
        on_event: told every event after it is in the journal.
        aside: where housekeeping runs; by default where it is asked for.
        read: how a checkpoint is read back before older ones are deleted.
        fleet: who holds the copies on the nodes; needed when there are tiers on the nodes.
    """

    def __init__(
        self,
        facts: RunFacts,
        options: TrackerOptions,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        aside: Aside | None = None,
        read: ReadBack = read_back,
        fleet: Fleet | None = None,
    ) -> None:
        self._facts, self._options = facts, options
        self._clock, self._monotonic, self._on_event = clock, monotonic, on_event
        self._dir = Path(facts.run_dir)
        self.memory = RunMemory()
        self._events_read = 0
        for event in read_lines(self._dir / JOURNAL_NAME):
            self.memory.apply(event)
            self._events_read += 1
        self._journal = LineQueue(JsonLines(self._dir / JOURNAL_NAME, sync=True))
        self._steps = LineQueue(JsonLines(self._dir / STEPS_NAME, sync=False))
        # Where the run stands: the last step executed, less what is counted as lost.
        self._last_step = self.memory.kept_step
        self._last_generation, recent = newest_lines(self._dir / STEPS_NAME, RECENT_STEPS)
        if self.memory.attempt_open and self._last_generation == self.memory.generation:
            self._last_step = max(self._last_step, int(recent[-1]["step"]))
        self._last_record: dict[str, Any] = {}
        self._segments = SegmentBook(facts)
        self._replaced = False
        self._unreadable: dict[str, str] = {}  # what storage would not give this attempt, and why
        self._pace = Pace(options, self.memory, [float(line["step_time_s"]) for line in recent])
        remote = remote_of(options.stack, self._dir)
        self._house: House = (
            FolderHouse(self._dir, read) if remote is None else RemoteHouse(remote, self._dir)
        )
        self._keeper = Keeper(
            house=self._house,
            rules=options.retention,
            memory=self.memory,
            record=self._record,
            quarantine=self._quarantine,
            clock=clock,
            aside=aside,
            scrub_s=options.stack.scrub_s,
        )
        self._places = self._make_places(fleet, waits=aside is None)
        self._sanity = Sanity(
            entries=self._places.entries,
            rule=options.guard,
            memory=self.memory,
            record=self._record,
            keep=self._places.keep,
            quarantine=self._house.quarantine,
            clock=clock,
        )
        if self.memory.attempt_open:
            # The workers may live on, and save; holders end with the tracker that they belong to.
            self._places.take_up(self.memory.nodes)

    def _make_places(self, fleet: Fleet | None, waits: bool) -> Places:
        common: dict[str, Any] = {
            "house": self._house,
            "memory": self.memory,
            "keeper": self._keeper,
            "make_manifest": self._manifest,
        }
        stack = self._options.stack
        folder = None if stack.remote else InFolder(run_dir=self._dir, **common)
        if not stack.node_tiers:
            assert folder is not None
            return folder
        assert fleet is not None, "tiers on the nodes need holders there"

        def make_desk(places: OnNodes) -> TierDesk:
            hooks = Hooks(
                record=self._record,
                generation=lambda: self.memory.generation,
                every_steps=self._pace.tier_every,
                last_step=self.memory.tier_steps.get,
                is_durable=places.is_durable,
                is_barred=places.is_barred,
                seal=self._seal,
                promoted=places.promoted,
                is_left=lambda entry: left(entry, self.memory.left),
            )
            return TierDesk(
                stack=stack,
                fleet=fleet,
                book=CopyBook(self._dir),
                hooks=hooks,
                aside=None if waits else Thread("seal"),
            )

        return OnNodes(
            **common,
            folder=folder,
            record=self._record,
            aside=Thread("records"),
            make_desk=make_desk,
            on_durable=self._on_durable,
        )

    def announce(self, submitted: Instant | None = None) -> None:
        """Notes that a tracker took up the run: a new job, or the same one after its tracker died.

        Args:
            submitted: when its job began; None for a moment ago.
        """
        here = Instant(time=self._clock(), monotonic=self._monotonic(), boot=boot_name())
        self._record(
            "tracker_started",
            host=platform.node(),
            pid=os.getpid(),
            events_read=self._events_read,
            boot=here.boot,
            submitted_ago_s=(submitted or here).age_s(here),
        )

    # ---- attempts -------------------------------------------------------------------------------

    def group_started(
        self, world_size: int, *, asked_ago_s: float, workers_ago_s: float, waited_s: float
    ) -> None:
        """Notes that a worker group is up, whose attempt has not begun yet.

        Args:
            world_size: workers.
            asked_ago_s: seconds since this group was asked for.
            workers_ago_s: seconds since its workers were up, and their process group was not.
            waited_s: how long the cluster had no room before the group was asked for, groups that did not come up
                included, seconds.
        """
        self._record(
            "group_started",
            world_size=world_size,
            asked_ago_s=asked_ago_s,
            workers_ago_s=workers_ago_s,
            waited_s=waited_s,
        )

    def begin_attempt(self, world_size: int, nodes: list[str]) -> Attempt:
        """Gives a new worker group its generation, its restore plan and its first directive.

        Raises:
            RestoreError: there are checkpoints and none can be used.
        """
        if problem := key_problem(self._dir):
            raise RestoreError(problem)  # before anything is on record: it is no fault of the run
        self._check_alone()
        self._places.begin(nodes)
        if self.memory.attempt_open:
            # Nobody said how the last one ended: its driver died, or its whole cluster.
            self.interruption(kind="lost", cause="the job ended without a word")
        self._unreadable.clear()
        self._keeper.cancel()
        # Before the attempt is on record: a run without a usable checkpoint must not start from zero.
        entry = self._newest_usable()
        generation = 1 + self._highest_generation()
        fault_point("attempt.begin")
        self._record(
            "attempt_started",
            generation=generation,
            world_size=world_size,
            nodes=nodes,
            pid=os.getpid(),
            host=platform.node(),
            boot=boot_name(),
            must=True,  # a generation that is not on record could be given out twice
        )
        fault_point("attempt.begun")
        self._keeper.begin()
        self._tell_tiers()
        self._pace.begin_attempt()
        self._decide()
        self._places.began()
        return Attempt(
            generation=generation,
            plan=self._plan(entry),
            directive=self._directive(),
            skips=self.memory.skips,
            signed=signature.active() is not None,
            holders=self._places.holders(),
        )

    def _tell_tiers(self) -> None:
        """Puts the tiers on record, where the command line finds them."""
        stack = self._options.stack
        found: dict[str, Any] = {
            "use": list(stack.use),
            "remote": without_keys(stack.remote) if stack.remote else "",
            "replicas": stack.replicas,
        }
        if self.memory.stack != found and (self.memory.stack or stack.node_tiers):
            self._record("tiers", **found)

    def restored(
        self,
        generation: int,
        step: int,
        seconds: float,
        source: str,
        reason: str,
        worker_monotonic: float | None = None,
    ) -> None:
        """Notes where an attempt begins.

        Args:
            generation: of the attempt.
            step: where it begins.
            seconds: that it took to restore.
            source: a checkpoint's folder, empty for none.
            reason: why this one.
            worker_monotonic: rank 0's steady clock now, by which its step lines are placed in time.
        """
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
            worker_monotonic=worker_monotonic,
            # Every byte was read and compared on the way in; of copies on nodes, that says nothing of the durable ones.
            verified=None if self._places.on_nodes(source) else source or None,
            lost_steps_more=lost_steps_more,
        )
        self._places.restoring("")
        self._last_step = step

    def bad_copies(self, generation: int, name: str, bad: list[tuple[Place, str]]) -> None:
        """Copies on nodes that were found not to be what was written; others were taken in their place."""
        self._check(generation)
        assert isinstance(self._places, OnNodes)
        self._places.bad_copies(name, bad)

    def not_gathered(
        self, generation: int, name: str, problem: str, damaged: tuple[str, ...] = ()
    ) -> RestorePlan | None:
        """The holders did not give a checkpoint back: offers it from the durable folder, or an older one.

        When one of them had died, it is replaced, and the same is offered again.

        Args:
            generation: of the attempt.
            name: of the checkpoint.
            problem: what one of them said.
            damaged: files whose copy in the durable tier is not what was written.

        Raises:
            RestoreError: there is no other.
        """
        self._check(generation)
        assert isinstance(self._places, OnNodes)
        if not damaged and self._places.desk.revive(name):
            entry = next(e for e in self._places.entries() if e.folder.name == name)
            return self._plan(entry)
        self._places.desk.pass_over(name)
        if damaged:
            findings = [{"path": path, "fault": "not as written"} for path in damaged]
            self._quarantine(name, problem, findings)
        else:
            if self._options.stack.remote:
                self._unreadable[name] = problem  # the store was asked too
            self._record("skipped", name=name, reason=f"from the nodes: {problem}", faults=[])
        return self._plan(self._newest_usable())

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

    def segment_at(
        self,
        generation: int,
        step: int,
        samples: int,
        mark: dict[str, Any] | None,
        source: str,
    ) -> Segment:
        """The segment that an attempt trains in; where one starts, that is put on record first.

        Args:
            generation: of the attempt.
            step: where it begins.
            samples: its sample offset.
            mark: the segment in the manifest of the checkpoint it restored, None for no checkpoint.
            source: the checkpoint's name, empty for none.

        Raises:
            ConfigError: a change of options that nobody declared.
            RestoreError: a checkpoint that contradicts the run's record.
            StorageError: the start of a segment cannot be put on record.
        """
        self._check(generation)
        placement = self._segments.place(step, samples, mark, source)
        segment = placement.segment
        if placement.cause:
            fault_point("segment.start")
            # The journal first: without the line in run.json the next attempt does both again.
            self._record(
                "segment",
                number=segment.number,
                step=segment.start_step,
                sample_offset=segment.start_offset,
                reason=segment.reason,
                cause=placement.cause,
                source=source,
                changed={
                    k: {"old": old, "new": new} for k, (old, new) in placement.changed.items()
                },
                must=True,
            )
            fault_point("segment.recorded")
            self._segments.keep(placement)
        return segment

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
        trouble = self.memory.trouble
        if trouble is not None and kind in ("worker_error", "lost"):
            # The attempt ended because it said so before.
            kind, cause = "nonfinite", str(trouble["reason"])
        if not group or group != self.memory.last_group:
            self._places.refresh()
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
        if trouble is not None and trouble["action"] == "stop":
            return Verdict(go_on=False, reason=str(trouble["reason"]))
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
        self._write_steps([])  # lines that the disk refused before have no later ones to go with
        self._record("finished", step=step, exposure_s=self.memory.exposure_s)
        self._last_step = step
        self._keeper.settle(SETTLE_S)
        self._places.close()

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
        self.advance()
        return self._directive()

    def advance(self) -> None:
        """Takes on record what was done aside, and begins what is due; neither waits nor raises."""
        try:
            self._check_alone()
        except StaleGenerationError as error:
            if not self._replaced:
                logger.error("%s", error)
            self._replaced = True  # nobody calls who is told: what comes from here must not either
            return
        self._places.advance()

    def _seal(self, manifest: Manifest) -> str | None:
        """Commits a checkpoint in the durable tier; runs aside, and may have been frozen there."""
        fault_point("durable.seal")
        try:
            newest = last_generation(self._dir / JOURNAL_NAME)
        except StorageError as error:
            return str(error)
        if newest > self.memory.generation:
            return f"attempt {newest} of another tracker has begun"
        problem = self._house.seal(manifest)
        fault_point("durable.sealed")
        return problem

    def commit(self, generation: int, save: dict[str, Any]) -> bool:
        """Makes a written checkpoint usable, or says in the journal why not.

        Args:
            generation: of the writer.
            save: ``step, samples, tokens, world_size, files [{path, bytes, checksum}], stall_s,
                upload_s, metrics, guard, error, bitwise_comparable, skipped, validation``; and with tiers on the nodes
                ``places``, a node to the files that its workers wrote.

        Returns:
            Whether the checkpoint is committed.

        Raises:
            StaleGenerationError: the writer belongs to an attempt that is over.
        """
        self._check(generation)
        step = int(save["step"])
        name = checkpoint_name(step, generation)
        try:
            manifest, problem = self._put(name, generation, save)
        except UnsaneStateError as error:
            self._places.set_aside(name, self._unchecked_manifest(generation, save), save)
            self._sanity.set_aside(name, save, error)
            self._keeper.after_save()  # of these too only a few are kept
            return False
        if manifest is None and problem:
            self._record("save_failed", step=step, name=name, error=problem)
            self._places.discard(name)
            self._keeper.after_save()  # what may go may be what fills the disk
            return False
        if manifest is None or name in self.memory.committed:
            return True  # the same call again: the answer to the first was lost
        fault_point("commit.placed")
        # Before the commit is on record: a tracker that dies in between is asked again, and pins again.
        self._pin_first_of_segment(name)
        self._record(
            "commit",
            step=step,
            name=name,
            tier=DURABLE if save.get("direct") else self._options.stack.use[0],
            bytes=manifest.total_bytes,
            files=len(manifest.files),
            world_size=manifest.world_size,
            sample_offset=manifest.sample_offset,
            stall_s=float(save["stall_s"]),
            upload_s=float(save["upload_s"]),
            exposure_s=self.memory.exposure_s,
            param_norm=manifest.guard.get("param_norm"),
            guard_s=manifest.guard.get("seconds"),
            validation_loss=manifest.metrics.get("validation_loss"),
            validation_s=manifest.validation.get("seconds"),
        )
        fault_point("commit.told")
        self._pace.saved(self._last_step - step, float(save["upload_s"]))
        self._decide()
        self._places.committed(name)
        return True

    def durable(self, generation: int, step: int) -> str:
        """Whether a step is in the durable tier: empty when it is, else what is in the way, in words.

        Whoever asks wants it there: it is copied whatever the intervals say.
        """
        self._check(generation)
        return self._places.durable(checkpoint_name(step, generation))

    def _on_durable(self, name: str) -> None:
        """A checkpoint got to the durable tier by a copy."""
        self._decide()

    def _manifest(self, generation: int, save: Mapping[str, Any]) -> Manifest:
        self._sanity.check(save["guard"])
        return self._unchecked_manifest(generation, save)

    def _unchecked_manifest(self, generation: int, save: Mapping[str, Any]) -> Manifest:
        return new_manifest(
            self._facts,
            generation,
            save,
            committed_at=self._clock(),
            segment=self._segments.newest,
        )

    def _pin_first_of_segment(self, name: str) -> None:
        """Keeps the first checkpoint of a segment: the way back to what the segment began as."""
        segment = self._segments.newest
        if not segment.number or self.memory.first_of_segment not in ("", name):
            return
        self._places.keep(name, f"first checkpoint of segment {segment.number} ({segment.reason})")

    def _put(self, name: str, generation: int, save: dict[str, Any]) -> tuple[Manifest | None, str]:
        try:
            fault_point("commit.check")
            return self._places.put(name, generation, save)
        except (ManifestError, StorageError, OSError, ValueError) as error:
            return None, str(error)
        except (TypeError, LookupError) as error:
            return None, f"the report of the save cannot be understood ({error!r})"

    def refusal(self, generation: int, step: int) -> dict[str, Any] | None:
        """Why the guard refused a save of the present attempt: ``reason`` and ``nonfinite``; None if it did not."""
        self._check(generation)
        return self._sanity.refusal(checkpoint_name(step, generation))

    def trouble(self, generation: int, step: int, what: str, skips: tuple[Skip, ...]) -> Remedy:
        """Decides what a run does that is no longer finite; the attempt ends after it.

        Args:
            generation: of the attempt.
            step: first step that is known not to be finite.
            what: was not finite, in words.
            skips: holes in the order of the attempt.
        """
        self._check(generation)
        return self._sanity.trouble(step, what, skips)

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

    def request_stop(self, reason: str) -> None:
        """Asks the driver to save at the end of a step and to end the job; the same command goes on later.

        Args:
            reason: who wants it, in words.
        """
        self._record("stop_requested", reason=reason)

    # ---- keeping --------------------------------------------------------------------------------

    def pin(self, name: str, reason: str, author: str = "ray_ckpt") -> None:
        """Keeps a checkpoint whatever the rules of retention say; the same pin again changes nothing.

        Args:
            name: folder of the checkpoint.
            reason: one sentence.
            author: who wants it kept.

        Raises:
            ConfigError: there is no such checkpoint (any more), or no reason.
            StorageError: the disk refused.
        """
        self._keeper.pin(name, reason, author)

    def unpin(self, name: str, reason: str | None = None) -> None:
        """Takes the pins of one reason away, or all.

        Raises:
            ConfigError: there is no pin with this reason.
            StorageError: the disk refused.
        """
        self._keeper.unpin(name, reason)

    # ---- looking --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        memory = self.memory
        return {
            "run": self._facts.run,
            "attempt_open": memory.attempt_open,
            "stop_request": memory.stop_request,
            "generation": memory.generation,
            "segment": self._segments.newest.number,
            "world_size": memory.world_size,
            "nodes": list(memory.nodes),
            "step": self._last_step,
            "last": self._last_record,
            "step_time_s": self._pace.step_time_s,
            "commits": memory.commits,
            "failed_saves": memory.failed_saves,
            "refused": memory.refused,
            "saves_settled": memory.commits + memory.refused,
            "last_commit_step": memory.last_commit_step,
            "last_commit_time": memory.last_commit_time,
            "failed_in_a_row": memory.failed_in_a_row,
            "next_save_step": memory.last_save_step
            + steps_to_next(self._pace.decision.every_steps, memory.failed_in_a_row),
            "interruptions": dict(memory.interruptions),
            "lost_steps": memory.lost_steps,
            "first_time": memory.first_time,
            "finished_step": memory.finished_step,
            "mtbf_s": self._pace.belief(memory).mtbf_s,
            "decision": asdict(self._pace.decision),
            "tiers": {name: memory.tier_steps.get(name) for name in self._options.stack.use},
        }

    # ---- inside ---------------------------------------------------------------------------------

    def _check(self, generation: int) -> None:
        now = self.memory.generation
        if generation == now > 0:
            self._check_alone()
            return
        known = f"attempt {now} has taken its place" if now else "no attempt has begun yet"
        raise StaleGenerationError(
            f"this worker belongs to attempt {generation} of run {self._facts.run!r}, which is over: "
            f"{known}. Nothing was changed."
        )

    def _check_alone(self) -> None:
        """Refuses to go on beside another tracker.

        There is none while the lock on the run holds; but one that was frozen for long can lose it, where storage
        gives locks for a time only, and must find out before it changes anything.

        Raises:
            StaleGenerationError: another tracker has begun an attempt meanwhile.
        """
        if not self._journal.grew:
            return  # the usual case, and cheap: this is asked with every call
        try:
            newest = last_generation(self._dir / JOURNAL_NAME)
        except StorageError:
            logger.exception("whether another tracker has taken over cannot be told now")
            return
        if newest > self.memory.generation:
            raise StaleGenerationError(
                f"another tracker has taken over run {self._facts.run!r} and begun attempt {newest}; this one knows of "
                f"attempt {self.memory.generation} at most. Nothing was changed. Stop this job; the other one goes on."
            )

    def _highest_generation(self) -> int:
        """The highest generation that left a trace: a journal may be lost, and its generations not."""
        traces = self._places.newest_generation
        return max(self.memory.generation, self._last_generation, traces)

    def _kept_step(self) -> int:
        """Where a new attempt would begin."""
        try:
            entry = next(iter(self._sanity.on_course()), None)
        except StorageError:
            logger.exception("what is kept cannot be told now; the next restore will tell")
            return self._last_step
        return entry.step if entry else 0

    def _record(self, event: str, *, must: bool = False, **fields: Any) -> None:
        """Writes an event to the journal and takes it into memory.

        A full disk must not stop training, nor undo a commit that is in place: a line that cannot be
        written waits for the next one, unless it ``must`` be on record before it counts.
        """
        self._check_alone()  # a late line would be the newest of its kind to whoever reads them again
        generation = fields.pop("generation", self.memory.generation)
        stamp = {"time": self._clock(), "monotonic": self._monotonic()}
        line = {**stamp, "generation": generation, "event": event, **fields}
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

    def _newest_usable(self) -> Listed | None:
        entries = self._places.entries()
        for entry in entries:
            damaged = entry.manifest is None and entry.committed and not entry.unreadable
            if damaged and entry.quarantined is None:
                # Somebody once promised this checkpoint; that it cannot be used must be seen.
                self._quarantine(entry.folder.name, f"manifest: {entry.fault}", [])
        return newest_usable(
            self._facts.run,
            self._dir,
            entries,
            commits=self.memory.durable_commits,
            passed=self._passed(entries),
        )

    def _quarantine(self, name: str, reason: str, findings: list[dict[str, Any]]) -> None:
        self._keeper.cancel()  # what it was about to delete may be needed now
        fault_point("quarantine.write")
        self._house.quarantine(name, reason, time_s=self._clock(), findings=findings)
        fault_point("quarantine.written")
        self._record("quarantine", name=name, reason=reason, faults=findings)

    def _plan(self, entry: Listed | None) -> RestorePlan | None:
        if entry is None:
            return None
        self._places.restoring(entry.folder.name)
        entries = self._places.entries()
        plan = restore_plan(entry, entries, self._passed(entries))
        sources = self._places.sources(plan.name)
        where = f", from {described(sources)}" if sources else ""
        holders = self._places.holders() if sources else {}
        return replace(plan, reason=f"{plan.reason}{where}", sources=sources, holders=holders)

    def _passed(self, entries: list[Listed]) -> dict[str, str]:
        """Usable checkpoints that are passed over just now, and why."""
        return {**passed_over(entries, self.memory.left), **self._unreadable}

    def _decide(self) -> None:
        decision = self._pace.decide(self.memory)
        if decision is not None and self.memory.generation:
            self._record("decision", **asdict(decision))
        plan = self._pace.decide_tiers(self.memory)
        if plan is not None and self.memory.generation:
            use = self._options.stack.use[1:]
            reasons = [
                f"{name}: fixed, every {fixed} steps"
                if (fixed := self._options.tier_steps.get(name))
                else reason
                for name, reason in zip(use, plan.reasons[1:], strict=True)
            ]
            every = {name: self._pace.tier_every(name) for name in use}
            self._record("tier_decision", every_steps=every, reasons=reasons)

    def _directive(self) -> Directive:
        decision = self._pace.decision
        return Directive(
            every_steps=decision.every_steps,
            reason=decision.reason,
            save_request=self.memory.save_requests,
            hold_s=self.memory.hold_s,
            last_commit_step=self.memory.last_commit_step,
            failed_in_a_row=self.memory.failed_in_a_row,
            durable_step=self.memory.durable_step,
        )
