"""The tracker's side of the tiers on the nodes: commits there, copies to slower tiers, what is kept, what is left.

Nothing here waits for a copy. Holders copy (:mod:`ray_ckpt.tiers.holder`); :meth:`TierDesk.advance` takes what they
answer, begins what is due and tries again what failed. A commit waits for its nodes, all at once and for a short time,
and lets the tracker's other calls in meanwhile: a holder that hangs delays the saves, and nothing else.

The parts: :mod:`ray_ckpt.tracker.holders` (who is there), :mod:`ray_ckpt.tracker.copying` (what is under way),
:mod:`ray_ckpt.tracker.node_keeper` (what stays, and is read again), :mod:`ray_ckpt.tracker.evidence` (what was
refused).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.errors import RayCkptError, StaleGenerationError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.fleet import QUICK_S, Fleet, answers
from ray_ckpt.tiers.holder import Source, Target
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tiers.stack import NodeTier, Stack
from ray_ckpt.tracker.aside import Aside, Inline
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.copy_state import CopyState
from ray_ckpt.tracker.copying import Copying
from ray_ckpt.tracker.drops import Drops
from ray_ckpt.tracker.evidence import Evidence
from ray_ckpt.tracker.holders import Holders
from ray_ckpt.tracker.hooks import Hooks
from ray_ckpt.tracker.node_keeper import NodeKeeper

logger = logging.getLogger(__name__)

MOST_FAULTS = 20  # of a reading that go on record; how many there were is told beside them


class TierDesk:
    """Copies of one run on its nodes.

    Args:
        stack: the tiers.
        fleet: the holders.
        book: what they have.
        hooks: the tracker.
        clock: monotonic seconds.
        aside: where the durable tier is waited for; by default here.
        waiting: entered while nodes are waited for; others may change everything meanwhile.
    """

    def __init__(
        self,
        *,
        stack: Stack,
        fleet: Fleet,
        book: CopyBook,
        hooks: Hooks,
        clock: Callable[[], float] = time.monotonic,
        aside: Aside | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._stack, self._fleet, self._book, self._hooks = stack, fleet, book, hooks
        self._clock, self._waiting, self._reads_back = clock, waiting, False
        self._first: NodeTier = stack.node_tiers[0]
        self._state = CopyState(book)
        self._drops = Drops(fleet, hooks.generation, lambda: self._clock())
        self._holders = Holders(
            fleet=fleet,
            book=book,
            drops=self._drops,
            hooks=hooks,
            evidence=lambda: self._evidence.names(),
            on_back=self._state.try_again,
        )
        self._evidence = Evidence(
            fleet=fleet, holders=self._holders, drops=self._drops, first=self._first
        )
        self._copying = Copying(
            stack=stack,
            fleet=fleet,
            book=book,
            state=self._state,
            holders=self._holders,
            hooks=hooks,
            aside=aside or Inline(),
        )
        self._keeper = NodeKeeper(
            stack=stack,
            fleet=fleet,
            book=book,
            state=self._state,
            copying=self._copying,
            drops=self._drops,
            hooks=hooks,
        )

    # ---- attempts -------------------------------------------------------------------------------

    def begin(self, nodes: Sequence[str], also: Sequence[str] = ()) -> None:
        """A new attempt, with workers on these nodes: finds their holders, and what all holders have.

        Args:
            nodes: with workers.
            also: nodes that may have copies.

        Raises:
            ConfigError: a folder of a tier cannot be used on some node.
        """
        self._state.begin()
        self._drops.clear()
        self._keeper.begin()
        self._copying.begin()
        self._holders.begin(nodes, also)
        self._copying.look()

    def sweep(self) -> None:
        """Puts on record what the nodes hold, and clears away what attempts before this one never committed."""
        tiers = self._stack.node_tiers
        held = {
            name: [tier for tier in tiers if self._book.complete(name, tier)]
            for name in self._book.names()
        }
        self._hooks.record("copies", tiers={name: where for name, where in held.items() if where})
        for node in self._fleet.names():
            self._holders.sweep(node)

    def refresh(self) -> None:
        """Asks the holders what they have: a node may be gone."""
        self._holders.refresh()

    @property
    def newest_generation(self) -> int:
        """The newest attempt that a node has heard of; its calls are not refused."""
        return self._book.generation

    def holders(self) -> dict[str, str]:
        """Node to the name of its holder."""
        return self._fleet.names()

    # ---- restore --------------------------------------------------------------------------------

    def entries(self) -> list[Listed]:
        """Checkpoints that the nodes can give back whole, newest first."""
        return [*self._state.entries()]

    def sources(self, name: str) -> dict[str, tuple[Source, ...]]:
        """Where an attempt takes a checkpoint's files from; empty: from the durable folder."""
        if name in self._state.passed:
            return {}
        return self._book.sources(name, durable=self._hooks.is_durable(name))

    def restoring(self, name: str) -> None:
        """Protects the checkpoint that an attempt restores; an empty name is the end of that."""
        self._keeper.restoring(name)
        for node in () if name else self._fleet.names():
            self._holders.ask(node)  # what workers asked for is there now too

    def bad_copies(self, name: str, bad: Sequence[tuple[Place, str]]) -> None:
        """Copies that were found not to be what was written: nobody takes them again."""
        self._copying.bad_copies(name, bad)

    def revive(self, name: str) -> bool:
        """Whether a checkpoint that was not given back can be had after all: a holder had died, or hung.

        What a dead holder held is there still. Nobody trains meanwhile, so this waits for another holder.
        """
        return name not in self._state.passed and self._holders.revive(name)

    def pass_over(self, name: str) -> None:
        """The copies on the nodes did not give a checkpoint back: this attempt does not ask them again."""
        self._state.passed.add(name)

    # ---- saves ----------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, places: Mapping[str, Sequence[str]]) -> str | None:
        """Commits what the workers wrote on their nodes.

        Args:
            manifest: of the checkpoint.
            places: node to the files that its workers wrote.

        Returns:
            Why not, in words; None when every node has its part, and the manifest beside it.

        Raises:
            StaleGenerationError: another attempt began meanwhile, and what the nodes have is its business.
        """
        named = {path for paths in places.values() for path in paths}
        if absent := [entry.path for entry in manifest.files if entry.path not in named]:
            return f"nobody says on which node {absent[0]} is"
        if ".metadata" not in named:
            return "the metadata of the checkpoint was not written"
        deadline = time.monotonic() + QUICK_S
        if drops := self._drops.calls(manifest.name):
            self._wait(dict(enumerate(drops)), deadline, manifest)
        if problem := self._drops.in_the_way(manifest.name):
            return problem
        fault_point("desk.commit")
        problems, tickets, called = [], {}, self._fleet.names()
        for node, paths in places.items():
            try:
                tickets[node] = self._holders.call(
                    node, "commit", tier=self._first, manifest=manifest, paths=tuple(paths)
                )
            except RayCkptError as error:
                problems.append(str(error))
        found = self._wait(tickets, deadline, manifest)
        for node, ticket in tickets.items():
            problem = found.get(node, f"it did not answer within {QUICK_S:g} s")
            if isinstance(problem, RayCkptError):
                self._holders.lost(node, problem, called.get(node))
            elif node not in found:
                self._holders.late(node, ticket, self._clock())
            if problem:
                problems.append(f"node {node}: {problem}")
        fault_point("desk.committed")
        if problems:
            return "; ".join(problems[:3])
        for node, paths in places.items():
            self._book.add(Place(self._first, node), manifest, paths)
        self._state.unproved.add(manifest.name)
        return None

    def _wait(
        self, tickets: Mapping[Any, Any], deadline: float, manifest: Manifest
    ) -> dict[Any, Any]:
        """What became of calls for a commit; the tracker's other calls are served meanwhile."""
        with self._waiting():
            found = answers(self._fleet, tickets, max(0.0, deadline - time.monotonic()))
        if (now := self._hooks.generation()) != manifest.generation:
            raise StaleGenerationError(
                f"attempt {now} began while {manifest.name} was to be committed. Nothing was changed."
            )
        return found

    def discard(self, name: str) -> None:
        """Removes what a failed save left on the nodes."""
        self._book.remove_all(self._first, name)
        for node in self._holders.expected:
            self._drops.start(node, self._first, name)

    def known(self, name: str) -> Manifest | None:
        """The manifest with which nodes have committed parts of a checkpoint, None when none has."""
        return self._book.known(name)

    def outlives(self, name: str, gone: Set[str]) -> bool:
        """Whether copies on other nodes than these give a checkpoint back whole."""
        return self._book.outlives(name, gone)

    def set_aside(self, manifest: Manifest, places: Mapping[str, Sequence[str]]) -> None:
        """Copies what must not be committed to where it is kept as evidence; then it goes from the nodes."""
        self._evidence.take(manifest, places, self._clock())

    def force(self, name: str) -> None:
        """A checkpoint goes to every tier, whatever the intervals say."""
        self._state.forced.add(name)

    # ---- copies ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Takes on record what holders did, and begins what is due; neither waits nor raises."""
        now_s = self._clock()
        self._try(self._holders.mend, self._copying.transfers, now_s)
        # Each by itself: what fails in one must not delay the others.
        for target in self._stack.use:  # the most urgent first
            self._try(self._copying.advance, target, now_s)
        self._try(self._evidence.clear, now_s)
        self._try(self._keeper.retain)
        self._try(self._keeper.scrub, now_s)
        self._try(self._tell_read_back)

    def ask_read_back(self) -> None:
        """Has the nodes read all that they hold, one checkpoint in one tier after the other."""
        self._state.ask(self._clock())
        self._reads_back = True

    def read_back(self) -> list[dict[str, Any]]:
        """What came of it so far (:meth:`ray_ckpt.tracker.copy_state.CopyState.read_back`)."""
        return self._state.read_back(self._stack.node_tiers)

    def problem(self, target: Target) -> str:
        """What is in the way of the copy that is under way; empty when nothing is."""
        return self._copying.problem(target)

    def close(self, *, drop_memory: bool) -> None:
        """Ends the holders, and what is in memory when nobody needs it any more."""
        self._fleet.close(drop_memory=drop_memory, generation=self._hooks.generation())

    # ---- inside ---------------------------------------------------------------------------------

    def _tell_read_back(self) -> None:
        """Puts on record what came of a wish to have all copies read, once all of them are."""
        if not self._reads_back:
            return
        rows = self.read_back()
        if not all(row["done"] for row in rows):
            return
        self._reads_back = False
        faults = [
            {
                "name": checkpoint_name(row["step"], row["generation"]),
                "tier": row["tier"],
                **fault,
            }
            for row in rows
            for fault in row["faults"]
        ]
        self._hooks.record(
            "read_back",
            copies=len(rows),
            nodes=sorted({node for row in rows for node in row["nodes"]}),
            faults=faults[:MOST_FAULTS],
            num_faults=len(faults),
        )

    def _try(self, part: Callable[..., None], *arguments: Any) -> None:
        try:
            part(*arguments)
        except Exception:
            logger.exception("the tiers could not be looked after; it is tried again")
