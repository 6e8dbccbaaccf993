"""The tracker's side of the tiers on the nodes: commits there, copies to slower tiers, what is kept, what is left.

Nothing here waits for a copy. Holders copy (:mod:`ray_ckpt.tiers.holder`); :meth:`TierDesk.advance` takes what they
answer, begins what is due and tries again what failed. Each tier has its own queue of one: a slow or broken tier delays
itself alone, and when it is free again the newest checkpoint that is due goes there, not every one that it missed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.errors import RayCkptError
from ray_ckpt.tiers.fleet import QUICK_S, Fleet, inventories
from ray_ckpt.tiers.holder import Report, Source, Target
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tiers.scrub import next_to_scrub
from ray_ckpt.tiers.stack import NodeTier, Stack
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.transfers import Transfer, places_of, replicas

logger = logging.getLogger(__name__)


class _Recorder(Protocol):
    def __call__(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """What the desk needs of the tracker around it.

    Attributes:
        record: puts an event on record.
        every_steps: a tier to how many steps are between its copies.
        last_step: a tier to the step of the newest checkpoint that got there, None before the first.
        is_durable: whether a checkpoint is in the durable tier.
        seal: commits a checkpoint, whose files are all there, in the durable tier; why not, in words, if it cannot.
        promoted: told when a checkpoint is in the durable tier, and that is on record.
        is_left: whether a checkpoint belongs to a course that the run has left.
    """

    record: _Recorder
    every_steps: Callable[[Target], int]
    last_step: Callable[[Target], int | None]
    is_durable: Callable[[str], bool]
    seal: Callable[[Manifest], str | None]
    promoted: Callable[[str], None]
    is_left: Callable[[Listed], bool]


class TierDesk:
    """Copies of one run on its nodes.

    Args:
        stack: the tiers.
        fleet: the holders.
        book: what they have.
        hooks: the tracker.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        stack: Stack,
        fleet: Fleet,
        book: CopyBook,
        hooks: Hooks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack, self._fleet, self._book, self._hooks = stack, fleet, book, hooks
        self._clock = clock
        self._first: NodeTier = stack.node_tiers[0]
        self._transfers: dict[Target, Transfer] = {}
        self._forced: set[str] = set()
        self._passed: set[str] = set()
        # When every byte of a checkpoint in a tier was last read and compared.
        self._verified: dict[tuple[NodeTier, str], float] = {}
        self._scrub: Transfer | None = None
        self._settled: set[str] = set()  # as many copies in the first tier as there are to be
        self._given_up: set[tuple[Target, str]] = set()
        self._evidence: list[tuple[str, str, Any]] = []  # node, checkpoint, call that copies it
        self._in_use = ""
        self._nodes: tuple[str, ...] = ()

    # ---- attempts -------------------------------------------------------------------------------

    def begin(self, nodes: Sequence[str]) -> None:
        """A new attempt, with workers on these nodes: finds their holders, and what all holders have.

        Raises:
            ConfigError: a folder of a tier cannot be used on some node.
        """
        self._passed.clear()
        self._given_up.clear()
        self._settled.clear()  # nodes may be gone, or new
        self._in_use = ""
        self._nodes = tuple(dict.fromkeys(node for node in nodes if node))
        self._fleet.gather(self._nodes)
        self.refresh()

    def sweep(self, generation: int) -> None:
        """Puts on record what the nodes hold, and clears away what attempts before this one never committed."""
        tiers = self._stack.node_tiers
        held = {
            name: [tier for tier in tiers if self._book.complete(name, tier)]
            for name in self._book.names()
        }
        self._hooks.record("copies", tiers={name: where for name, where in held.items() if where})
        for node in self._fleet.names():
            self._post(
                node, "sweep", keep=tuple(self._book.names()), older_than_generation=generation
            )

    def refresh(self) -> None:
        """Asks the holders what they have: a node may be gone."""
        for problem in self._book.take(inventories(self._fleet)):
            self._hooks.record("alert", name="tiers", problem=problem)

    def holders(self) -> dict[str, str]:
        """Node to the name of its holder."""
        return self._fleet.names()

    # ---- restore --------------------------------------------------------------------------------

    def entries(self) -> list[Listed]:
        """Checkpoints that the nodes can give back whole, newest first."""
        return [entry for entry in self._book.entries() if entry.folder.name not in self._passed]

    def sources(self, name: str) -> dict[str, tuple[Source, ...]]:
        """Where an attempt takes a checkpoint's files from; empty: from the durable folder."""
        if name in self._passed:
            return {}
        return self._book.sources(name, durable=self._hooks.is_durable(name))

    def restoring(self, name: str) -> None:
        """Protects the checkpoint that an attempt restores; an empty name is the end of that."""
        self._in_use = name

    def bad_copies(self, name: str, bad: Sequence[tuple[Place, str]]) -> None:
        """Copies that were found not to be what was written: nobody takes them again."""
        for place, path in bad:
            self._book.remove(place, name, path)
            # Its own holder looks again: the way to the reader may be to blame, and then it stays.
            manifest = self._book.manifest(name)
            entry = next(entry for entry in manifest.files if entry.path == path)
            self._post(place.node, "has", tier=place.tier, name=name, entry=entry)
            self._hooks.record(
                "bad_copy",
                name=name,
                step=manifest.step,
                tier=place.tier,
                node=place.node,
                path=path,
            )

    def pass_over(self, name: str) -> None:
        """The copies on the nodes did not give a checkpoint back: this attempt does not ask them again."""
        self._passed.add(name)

    # ---- saves ----------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, places: Mapping[str, Sequence[str]]) -> str | None:
        """Commits what the workers wrote on their nodes.

        Args:
            manifest: of the checkpoint.
            places: node to the files that its workers wrote.

        Returns:
            Why not, in words; None when every node has its part, and the manifest beside it.
        """
        named = {path for paths in places.values() for path in paths}
        if absent := [entry.path for entry in manifest.files if entry.path not in named]:
            return f"nobody says on which node {absent[0]} is"
        problems, tickets = [], {}
        for node, paths in places.items():
            try:
                tickets[node] = self._fleet.post(
                    node, "commit", tier=self._first, manifest=manifest, paths=tuple(paths)
                )
            except RayCkptError as error:
                problems.append(str(error))
        deadline = self._clock() + QUICK_S
        for node, ticket in tickets.items():
            try:
                done, problem = self._fleet.take(ticket, max(0.0, deadline - self._clock()))
            except RayCkptError as error:
                done, problem = True, str(error)
            if not done:
                problem = f"it did not answer within {QUICK_S:g} s"
            if problem:
                problems.append(f"node {node}: {problem}")
        if problems:
            self.discard(manifest.name)
            return "; ".join(problems[:3])
        for node, paths in places.items():
            self._book.add(Place(self._first, node), manifest, paths)
        return None

    def discard(self, name: str) -> None:
        """Removes what a failed save left on the nodes."""
        self._book.remove_all(self._first, name)
        for node in self._fleet.names():
            self._post(node, "drop", tier=self._first, name=name)

    def set_aside(self, manifest: Manifest, places: Mapping[str, Sequence[str]]) -> None:
        """Copies what must not be committed to where it is kept as evidence; then it goes from the nodes."""
        for node, paths in places.items():
            try:
                ticket = self._fleet.post(
                    node, "promote", manifest=manifest, paths=tuple(paths), target="durable"
                )
            except RayCkptError as error:
                logger.warning("%s is not kept whole: %s", manifest.name, error)
            else:
                self._evidence.append((node, manifest.name, ticket))

    def force(self, name: str) -> None:
        """A checkpoint goes to every tier, whatever the intervals say."""
        self._forced.add(name)

    # ---- copies ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Takes on record what holders did, and begins what is due; neither waits nor raises."""
        try:
            now_s = self._clock()
            for target, transfer in list(self._transfers.items()):
                self._poll(target, transfer, now_s)
            self._clear_evidence()
            for target in self._targets():
                if target not in self._transfers and (name := self._due(target)):
                    self._begin(target, name, now_s)
            self._retain()
            self._scrub_next(now_s)
        except Exception:
            logger.exception("the tiers could not be looked after; it is tried again")

    def settled(self, name: str) -> bool:
        """Whether a checkpoint is in the durable tier, or never will be by itself."""
        return self._hooks.is_durable(name) or name not in self._book.names()

    def problem(self, target: Target) -> str:
        """What is in the way of the copy that is under way; empty when nothing is."""
        transfer = self._transfers.get(target)
        return transfer.problem if transfer else ""

    def close(self, *, finished: bool) -> None:
        """Ends the holders."""
        self._fleet.close(drop_memory=finished)

    # ---- inside ---------------------------------------------------------------------------------

    def _clear_evidence(self) -> None:
        left = []
        for node, name, ticket in self._evidence:
            try:
                done, report = self._fleet.take(ticket, 0)
                for problem in (report.problems if done else {}).values():
                    logger.warning("%s is not kept whole: %s", name, problem)
            except RayCkptError as error:
                logger.warning("%s is not kept whole: %s", name, error)
                done = True
            if done:
                self._post(node, "drop", tier=self._first, name=name)
            else:
                left.append((node, name, ticket))
        self._evidence = left

    def _targets(self) -> tuple[Target, ...]:
        """Where copies go, the most urgent first; in the first tier they are read back, and go to other nodes."""
        return self._stack.use

    def _due(self, target: Target) -> str | None:
        """The checkpoint that is to go to a tier next."""
        entries = [entry for entry in self.entries() if not self._hooks.is_left(entry)]
        for entry in entries:
            name = entry.folder.name
            if name in self._forced and not self._is_in(target, name):
                return name
        last, every = self._hooks.last_step(target), self._hooks.every_steps(target)
        for entry in entries:
            if self._is_in(target, entry.folder.name):
                return None  # nothing newer is due
            if target == self._first or last is None or entry.step - last >= every:
                return entry.folder.name
        return None

    def _is_in(self, target: Target, name: str) -> bool:
        if (target, name) in self._given_up:
            return True  # the next one is tried
        if target == "durable":
            return self._hooks.is_durable(name)
        if target == self._first:
            return name in self._settled
        return self._book.complete(name, target)

    def _begin(self, target: Target, name: str, now_s: float) -> None:
        manifest = self._book.manifest(name)
        checks: set[str] = set()
        if target == self._first:
            wanted = self._wanted_replicas(manifest)
            places = self._book.copies(name, self._first).values()
            checks = {place.node for each in places for place in each}
        else:
            wanted = {"": {entry.path for entry in manifest.files}}
        transfer = Transfer(
            manifest=manifest,
            first=self._first,
            target=target,
            wanted=wanted,
            checks=checks,
            began_s=now_s,
        )
        self._transfers[target] = transfer
        transfer.start(self._fleet, self._book, now_s)

    def _wanted_replicas(self, manifest: Manifest) -> dict[str, set[str]]:
        if self._first != "memory":
            return {}
        domains = (
            self._fleet.domains(self._stack.failure_domain) if self._stack.failure_domain else {}
        )
        return replicas(
            manifest,
            self._book.copies(manifest.name, "memory"),
            self._book.nodes(self._fleet.names()),
            count=self._stack.replicas,
            domains=domains,
        )

    def _poll(self, target: Target, transfer: Transfer, now_s: float) -> None:
        for node, report in transfer.poll(self._fleet, now_s):
            self._take(target, transfer, node, report)
        if target == self._first and not transfer.checks:
            self._verified[self._first, transfer.name] = now_s
        if transfer.busy:
            return
        if transfer.done:
            self._finish(target, transfer, now_s)
        elif not self._book.complete(transfer.name):
            transfer.problem = transfer.problem or "the last copy of a file is gone"
            self._give_up(target, transfer)
        elif not transfer.not_before:
            self._pause(target, transfer, now_s)
        elif now_s >= transfer.not_before:
            transfer.not_before = 0.0
            if target == self._first:
                transfer.wanted = self._wanted_replicas(transfer.manifest)  # a node may be gone
                transfer.checks &= self._fleet.names().keys()
            transfer.start(self._fleet, self._book, now_s)

    def _pause(self, target: Target, transfer: Transfer, now_s: float) -> None:
        transfer.pause(now_s, self._stack.pause_s)
        # What must get there is tried for as long as the run lives.
        if transfer.tries >= self._stack.tries and transfer.name not in self._forced:
            self._give_up(target, transfer)

    def _take(self, target: Target, transfer: Transfer, node: str, report: Report) -> None:
        if place := places_of(report, target, node):
            self._book.add(place, transfer.manifest, report.done)
        if report.bad:
            self.bad_copies(transfer.name, report.bad)

    def _finish(self, target: Target, transfer: Transfer, now_s: float) -> None:
        manifest = transfer.manifest
        if target == "durable" and (problem := self._hooks.seal(manifest)):
            transfer.problem = problem
            transfer.wanted = {"": {entry.path for entry in manifest.files}}
            self._pause(target, transfer, now_s)
            return
        del self._transfers[target]
        seconds = now_s - transfer.began_s
        if target == self._first:
            self._settled.add(transfer.name)
            copies = self._book.copies(transfer.name, self._first).values()
            self._hooks.record(
                "replicated",
                name=transfer.name,
                step=manifest.step,
                tier=target,
                copies=min(map(len, copies), default=0),
                wanted=1 + (self._stack.replicas if target == "memory" else 0),
                bytes=transfer.bytes,
                seconds=seconds,
            )
            return
        if target == "local":
            self._verified[target, transfer.name] = now_s
        self._forced -= {transfer.name} if target == "durable" else set()
        self._hooks.record(
            "promote",
            name=transfer.name,
            step=manifest.step,
            tier=target,
            bytes=transfer.bytes,
            seconds=seconds,
            tries=transfer.tries + 1,
            **(
                {"verified": transfer.name} if target == "durable" else {}
            ),  # it was read back there
        )
        if target == "durable":
            self._hooks.promoted(transfer.name)

    def _give_up(self, target: Target, transfer: Transfer) -> None:
        del self._transfers[target]
        self._given_up.add((target, transfer.name))
        self._hooks.record(
            "promote_failed",
            name=transfer.name,
            step=transfer.manifest.step,
            tier=target,
            tries=transfer.tries,
            error=transfer.problem,
        )

    def _scrub_next(self, now_s: float) -> None:
        """Has the nodes read back what they have not read for long; one checkpoint in one tier at a time."""
        if self._scrub is not None:
            for _, report in self._scrub.poll(self._fleet, now_s):
                if report.bad:
                    self.bad_copies(self._scrub.name, report.bad)
                    self._settled.discard(self._scrub.name)  # it gets replicas again
            if self._scrub.busy:
                return
            # Also what could not be read: it is asked for again when its turn comes.
            self._verified[self._scrub.first, self._scrub.name] = now_s
            self._scrub = None
        held = set(self._book.names())
        known = {
            f"{tier} {name}": at_s for (tier, name), at_s in self._verified.items() if name in held
        }
        due = next_to_scrub(known, now_s=now_s, every_s=self._stack.scrub_s)
        if due is None:
            return
        tier = next(tier for tier in self._stack.node_tiers if due.startswith(f"{tier} "))
        manifest = self._book.manifest(due.removeprefix(f"{tier} "))
        places = self._book.copies(manifest.name, tier).values()
        self._scrub = Transfer(
            manifest=manifest,
            first=tier,
            target=tier,
            wanted={},
            checks={place.node for each in places for place in each},
            began_s=now_s,
        )
        self._scrub.start(self._fleet, self._book, now_s)

    def _retain(self) -> None:
        """Ends what a tier on the nodes need not keep any more."""
        keeps = {"memory": self._stack.memory_keep, "local": self._stack.local_keep}
        busy = {transfer.name for transfer in self._transfers.values()} | {self._in_use}
        busy |= {self._scrub.name} if self._scrub is not None else set()
        by_name = {entry.folder.name: entry for entry in self._book.entries()}
        for tier in self._stack.node_tiers:
            kept = 0
            for name in self._book.names():
                if not any(self._book.copies(name, tier).values()):
                    continue
                entry = by_name.get(name)
                left = entry is not None and self._hooks.is_left(entry)
                if kept < keeps[tier]:
                    # Only what is whole and read counts: an older one goes only after a newer one is proved.
                    whole = self._book.complete(name, tier) and (tier, name) in self._verified
                    kept += whole and not left
                elif name not in busy:
                    self._drop(tier, name, f"{keeps[tier]} newer ones are in {tier}")

    def _drop(self, tier: NodeTier, name: str, reason: str) -> None:
        step = self._book.manifest(name).step
        for node in self._book.remove_all(tier, name):
            self._post(node, "drop", tier=tier, name=name)
        self._verified.pop((tier, name), None)
        self._hooks.record("delete", name=name, step=step, tier=tier, reason=reason)

    def _post(self, node: str, method: str, **kwargs: Any) -> None:
        """Calls a holder whose answer nobody waits for."""
        try:
            self._fleet.post(node, method, **kwargs)
        except RayCkptError as error:
            logger.warning("node %s: %s", node, error)
