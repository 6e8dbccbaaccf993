"""The one authority of a run: generations, save steps, commits, what to restore.

Plain Python: no Ray, no torch, time passed in. The actor around it (:mod:`ray_ckpt.tracker.actor`) serves
one call at a time, so nothing here needs a lock; only a commit that waits for nodes lets others in
(:mod:`ray_ckpt.tracker.turn`), and looks again at what it knew. Whatever changes the future of the run is
in the journal before it is answered.

This is the front that calls come to; each is checked, and goes to whose it is:

- who may call, and whether another tracker has taken over: :mod:`ray_ckpt.tracker.fence`;
- what is on record, and what it adds up to: :mod:`ray_ckpt.tracker.recorder`, :mod:`ray_ckpt.tracker.memory`;
- how an attempt begins and ends: :mod:`ray_ckpt.tracker.attempts`; whether another one is worth it:
  :mod:`ray_ckpt.tracker.verdict`;
- what is done about failures that come again: :mod:`ray_ckpt.tracker.loops`;
- which checkpoint it restores: :mod:`ray_ckpt.tracker.restores`; the segment it trains in:
  :mod:`ray_ckpt.tracker.segments`;
- the steps that workers tell: :mod:`ray_ckpt.tracker.standing`; their pace: :mod:`ray_ckpt.tracker.pace`;
- what workers and driver are told to do: :mod:`ray_ckpt.tracker.steering`; when they leave a node that will be taken
  away: :mod:`ray_ckpt.tracker.departures`; when there are to be more of them: :mod:`ray_ckpt.tracker.resizes`;
- which nodes are slow: :mod:`ray_ckpt.tracker.stragglers`;
- what becomes of a save: :mod:`ray_ckpt.tracker.saves`; of a state that is not finite:
  :mod:`ray_ckpt.tracker.sanity`;
- where checkpoints are: :mod:`ray_ckpt.tracker.places`; how long they stay: :mod:`ray_ckpt.tracker.keeper`;
- what people see: :mod:`ray_ckpt.tracker.status`, and the edges of :mod:`ray_ckpt.tracker.actor`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.clocks import Instant
from ray_ckpt.policy.resize import Resizing
from ray_ckpt.segment import Segment
from ray_ckpt.skips import Skip
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.housekeeping import ReadBack, read_back
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tracker.aside import Aside, Thread
from ray_ckpt.tracker.attempts import Attempts
from ray_ckpt.tracker.departures import Departures, Drain
from ray_ckpt.tracker.house import house_of
from ray_ckpt.tracker.keeper import Keeper
from ray_ckpt.tracker.loops import Loops
from ray_ckpt.tracker.on_nodes import OnNodes
from ray_ckpt.tracker.pace import Pace
from ray_ckpt.tracker.places import InFolder, Places
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import (
    Attempt,
    Directive,
    RestorePlan,
    RunFacts,
    TrackerOptions,
    Verdict,
)
from ray_ckpt.tracker.resizes import Resizes
from ray_ckpt.tracker.restores import Restores
from ray_ckpt.tracker.rollback import Remedy
from ray_ckpt.tracker.sanity import Sanity
from ray_ckpt.tracker.saves import Saves
from ray_ckpt.tracker.segments import SegmentBook
from ray_ckpt.tracker.standing import Standing
from ray_ckpt.tracker.status import status_of
from ray_ckpt.tracker.steering import Steering
from ray_ckpt.tracker.stragglers import Stragglers

__all__ = [
    "Attempt",
    "Directive",
    "RestorePlan",
    "RunFacts",
    "TrackerCore",
    "TrackerOptions",
    "Verdict",
]


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
        waiting: entered while a commit waits for nodes; whoever serves more than one call at a time may serve
            others meanwhile.
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
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._facts, self._options = facts, options
        self._dir = Path(facts.run_dir)
        self._record = Recorder(facts, clock=clock, monotonic=monotonic, on_event=on_event)
        self.memory, self._fence = self._record.memory, self._record.fence
        self._standing = Standing(self._dir, self.memory)
        self._segments = SegmentBook(facts, self._record)
        self._pace = Pace(options, self.memory, self._standing.begun_with_s)
        self._steering = Steering(options=options, pace=self._pace, record=self._record)
        self._house = house_of(options.stack, self._dir, read)
        self._keeper = Keeper(
            house=self._house,
            rules=options.retention,
            memory=self.memory,
            record=self._record,
            clock=clock,
            aside=aside,
            scrub_s=options.stack.scrub_s,
        )
        self._places = self._make_places(fleet, waits=aside is None, waiting=waiting)
        self._sanity = Sanity(
            entries=self._places.entries,
            rule=options.guard,
            memory=self.memory,
            record=self._record,
            keep=self._places.keep,
            quarantine=self._house.quarantine,
            clock=clock,
        )
        self._saves = Saves(
            facts=facts,
            first_tier=options.stack.use[0],
            record=self._record,
            standing=self._standing,
            steering=self._steering,
            segments=self._segments,
            sanity=self._sanity,
            places=self._places,
            keeper=self._keeper,
            stragglers=Stragglers(options.stragglers, self.memory, self._record),
            clock=clock,
        )
        loops = Loops(
            rule=options.loops,
            max_rollbacks=options.guard.max_rollbacks,
            memory=self.memory,
            record=self._record,
            on_course=self._sanity.on_course,
            keep=self._places.keep,
        )
        known: dict[str, Any] = {
            "options": options,
            "record": self._record,
            "standing": self._standing,
        }
        self._departures = Departures(**known, pace=self._pace, places=self._places, clock=clock)
        self._resizes = Resizes(**known, pace=self._pace, clock=clock, monotonic=monotonic)
        self._restores = Restores(
            facts=facts,
            record=self._record,
            places=self._places,
            keeper=self._keeper,
            loops=loops,
            remote=bool(options.stack.remote),
        )
        self._attempts = Attempts(
            run_dir=self._dir,
            options=options,
            record=self._record,
            standing=self._standing,
            steering=self._steering,
            restores=self._restores,
            loops=loops,
            sanity=self._sanity,
            places=self._places,
            keeper=self._keeper,
        )
        if self.memory.attempt_open:
            # The workers may live on, and save; holders end with the tracker that they belong to.
            self._places.take_up(self.memory.nodes)

    def _make_places(
        self,
        fleet: Fleet | None,
        *,
        waits: bool,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> Places:
        common: dict[str, Any] = {
            "run_dir": self._dir,
            "house": self._house,
            "memory": self.memory,
            "keeper": self._keeper,
            # Looked up late: saves, which make manifests, need the places first.
            "make_manifest": lambda generation, save: self._saves.manifest(generation, save),
        }
        if not self._options.stack.node_tiers:
            return InFolder(**common)
        assert fleet is not None, "tiers on the nodes need holders there"
        return OnNodes(
            **common,
            stack=self._options.stack,
            fleet=fleet,
            record=self._record,
            every_steps=self._pace.tier_every,
            on_durable=self._on_durable,
            seals=None if waits else Thread("seal"),
            waiting=waiting,
        )

    def _on_durable(self, name: str) -> None:
        """A checkpoint got to the durable tier by a copy."""
        self._steering.decide()

    def announce(self, submitted: Instant | None = None) -> None:
        """Notes that a tracker took up the run: a new job, or the same one after its tracker died.

        Args:
            submitted: when its job began; None for a moment ago.
        """
        self._record.announce(submitted)

    # ---- attempts -------------------------------------------------------------------------------

    def group_started(
        self,
        world_size: int,
        *,
        asked_ago_s: float,
        workers_ago_s: float,
        waited_s: float,
        spares: int = 0,
    ) -> None:
        """Notes that a worker group is up, whose attempt has not begun yet.

        Args:
            world_size: workers.
            asked_ago_s: seconds since this group was asked for.
            workers_ago_s: seconds since its workers were up, and their process group was not.
            waited_s: how long the cluster had no room before the group was asked for, groups that did not come up
                included, seconds.
            spares: workers in processes that had been kept ready.
        """
        self._record(
            "group_started",
            world_size=world_size,
            spares=spares,
            asked_ago_s=asked_ago_s,
            workers_ago_s=workers_ago_s,
            waited_s=waited_s,
        )

    def begin_attempt(self, world_size: int, nodes: list[str]) -> Attempt:
        """Gives a new worker group its generation, its restore plan and its first directive.

        Raises:
            RestoreError: there are checkpoints and none can be used.
        """
        attempt = self._attempts.begin(world_size, nodes)
        self._departures.begin_attempt()
        return attempt

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
        self._fence.check(generation)
        self._attempts.restored(
            step=step,
            seconds=seconds,
            source=source,
            reason=reason,
            worker_monotonic=worker_monotonic,
        )

    def bad_copies(self, generation: int, name: str, bad: list[tuple[Place, str]]) -> None:
        """Copies on nodes that were found not to be what was written; others were taken in their place."""
        self._fence.check(generation)
        self._restores.bad_copies(name, bad)

    def not_gathered(
        self, generation: int, name: str, problem: str, damaged: tuple[str, ...] = ()
    ) -> RestorePlan | None:
        """Holders did not give a checkpoint back (see :meth:`ray_ckpt.tracker.restores.Restores.not_gathered`)."""
        self._fence.check(generation)
        return self._restores.not_gathered(name, problem, damaged)

    def reject(self, generation: int, name: str, faults: list[Fault]) -> RestorePlan | None:
        """A checkpoint failed verification (see :meth:`ray_ckpt.tracker.restores.Restores.reject`)."""
        self._fence.check(generation)
        return self._restores.reject(name, faults)

    def segment_at(
        self,
        generation: int,
        step: int,
        samples: int,
        mark: dict[str, Any] | None,
        source: str,
    ) -> Segment:
        """The segment that an attempt trains in (see :meth:`ray_ckpt.tracker.segments.SegmentBook.enter`)."""
        self._fence.check(generation)
        return self._segments.enter(step, samples, mark, source)

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
        return self._attempts.interrupted(kind, cause, group=group, **more)

    def check(self, generation: int) -> None:
        """Lets a worker know whether its attempt is the present one.

        Raises:
            StaleGenerationError: it is over.
        """
        self._fence.check(generation)

    def hang(self, **found: Any) -> None:
        """Notes that a hang was found, before anybody is ended for it; it is the controller that calls.

        Args:
            found: fields for the journal, those of :class:`ray_ckpt.elastic.hangs.Hang`.
        """
        self._record("hang", **found)

    def suspected(self) -> dict[str, int]:
        """How many hangs each node was suspected of."""
        return dict(self.memory.suspected)

    def exclude(self, nodes: list[str], names: list[str], times: list[int]) -> None:
        """Notes which nodes get no workers from now on.

        Args:
            nodes: Ray's names of them; none when all may have workers again.
            names: the same for people.
            times: how often each was suspected.
        """
        self._record("excluded", nodes=nodes, names=names, times=times)

    def finished(self, generation: int, step: int) -> None:
        """Notes that the run is complete."""
        self._fence.check(generation)
        self._attempts.finished(step)

    # ---- steps and saves ------------------------------------------------------------------------

    def steps(self, generation: int, records: list[dict[str, Any]]) -> Directive:
        """Writes the lines of executed steps and answers with the present directive."""
        self._fence.check(generation)
        self._steering.stepped(self._standing.executed(generation, records))
        self.advance()
        return self._steering.directive()

    def advance(self) -> None:
        """Takes on record what was done aside, and begins what is due; neither waits nor raises."""
        if self._fence.stands():
            self._places.advance()
            self._departures.advance()

    def commit(self, generation: int, save: dict[str, Any]) -> bool:
        """Makes a written checkpoint usable, or says in the journal why not.

        Args:
            generation: of the writer.
            save: ``step, samples, tokens, world_size, files [{path, bytes, checksum}], stall_s,
                upload_s, metrics, guard, error, bitwise_comparable, skipped, validation``; and with tiers on the nodes
                ``places``, a node to the files that its workers wrote. ``paces``, of each rank its node and the mean
                time of its forward passes, seconds, may be left out.

        Returns:
            Whether the checkpoint is committed.

        Raises:
            StaleGenerationError: the writer belongs to an attempt that is over.
        """
        self._fence.check(generation)
        return self._saves.commit(generation, save)

    def durable(self, generation: int, step: int) -> str:
        """Whether a step is in the durable tier: empty when it is, else what is in the way, in words.

        Whoever asks wants it there: it is copied whatever the intervals say.
        """
        self._fence.check(generation)
        return self._places.durable(checkpoint_name(step, generation))

    def refusal(self, generation: int, step: int) -> dict[str, Any] | None:
        """Why the guard refused a save of the present attempt: ``reason`` and ``nonfinite``; None if it did not."""
        self._fence.check(generation)
        return self._sanity.refusal(checkpoint_name(step, generation))

    def trouble(self, generation: int, step: int, what: str, skips: tuple[Skip, ...]) -> Remedy:
        """Decides what a run does that is no longer finite; the attempt ends after it.

        Args:
            generation: of the attempt.
            step: first step that is known not to be finite.
            what: was not finite, in words.
            skips: holes in the order of the attempt.
        """
        self._fence.check(generation)
        return self._sanity.trouble(step, what, skips)

    def request_save(self, reason: str, hold_s: float = 0.0) -> int:
        """Asks the workers for a save at their next step; returns the number of the request.

        Args:
            reason: why, in words.
            hold_s: how long the workers wait after the save, seconds: whoever asked is about to end the attempt,
                and a step made in between would be lost.
        """
        return self._steering.request_save(reason, hold_s)

    def request_stop(self, reason: str) -> None:
        """Asks the driver to save at the end of a step and to end the job; the same command goes on later.

        Args:
            reason: who wants it, in words.
        """
        self._steering.request_stop(reason)

    # ---- planned ends and sizes -----------------------------------------------------------------

    def draining(self, drains: list[Drain]) -> None:
        """Takes all nodes of the cluster that will be taken away, as they are known now."""
        if self._fence.stands():
            self._departures.draining(drains)

    def terminated(self, generation: int, step: int, ranks: dict[int, str]) -> None:
        """Notes that processes of workers got SIGTERM: the attempt ends once its step is safe.

        Args:
            generation: of the attempt.
            step: that it is at.
            ranks: of them, and the node of each; empty names where there are no nodes.
        """
        self._fence.check(generation)
        self._departures.terminated(step, ranks)

    def obstacle(self, generation: int, step: int) -> str:
        """What is in the way of leaving (see :meth:`ray_ckpt.tracker.departures.Departures.obstacle`)."""
        self._fence.check(generation)
        return self._departures.obstacle(generation, step)

    def resize(self, possible: int, workers: int) -> Resizing:
        """Decides whether the run takes the workers that the cluster has room for.

        Args:
            possible: how many there could be in all.
            workers: how many there are.
        """
        return self._resizes.decide(possible, workers, leaves=self._departures.pending)

    # ---- keeping --------------------------------------------------------------------------------

    def pin(self, name: str, reason: str, author: str = "ray_ckpt") -> None:
        """Keeps a checkpoint whatever the rules of retention say (see :func:`ray_ckpt.tiers.pins.pin`)."""
        self._keeper.pin(name, reason, author)

    def unpin(self, name: str, reason: str | None = None) -> None:
        """Takes the pins of one reason away, or all (see :func:`ray_ckpt.tiers.pins.unpin`)."""
        self._keeper.unpin(name, reason)

    def ask_read_back(self) -> None:
        """Has the nodes read all copies that they hold, beside the training; :meth:`read_back` tells the outcome."""
        self._places.ask_read_back()
        self.advance()

    def read_back(self) -> list[dict[str, Any]]:
        """What came of it so far (see :meth:`ray_ckpt.tracker.copy_state.CopyState.read_back`)."""
        self.advance()
        return self._places.read_back()

    # ---- looking --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        return status_of(
            self._facts.run,
            self.memory,
            self._standing,
            self._pace,
            segment=self._segments.newest.number,
            tiers=self._options.stack.use,
        )
