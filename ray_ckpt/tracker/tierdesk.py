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
from ray_ckpt.errors import HolderGoneError, RayCkptError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.fleet import QUICK_S, Fleet, inventories
from ray_ckpt.tiers.holder import Report, Source, Target
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tiers.scrub import next_to_scrub
from ray_ckpt.tiers.stack import NodeTier, Stack
from ray_ckpt.tracker.aside import Aside, Inline
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.drops import Drops
from ray_ckpt.tracker.health import Health
from ray_ckpt.tracker.transfers import Transfer, places_of, replicas

logger = logging.getLogger(__name__)

_REVIVALS = 3  # of holders, in one restore
_EVIDENCE_S = 3600.0  # then a refused checkpoint leaves the nodes, kept elsewhere or not


class _Recorder(Protocol):
    def __call__(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """What the desk needs of the tracker around it.

    Attributes:
        record: puts an event on record.
        generation: newest attempt.
        every_steps: a tier to how many steps are between its copies.
        last_step: a tier to the step of the newest checkpoint that got there, None before the first.
        is_durable: whether a checkpoint is in the durable tier.
        is_barred: whether a checkpoint's copy in the durable tier was found bad: it is not put there again.
        seal: commits a checkpoint, whose files are all there, in the durable tier; why not, in words, if it cannot.
        promoted: told when a checkpoint is in the durable tier, and that is on record.
        is_left: whether a checkpoint belongs to a course that the run has left.
    """

    record: _Recorder
    generation: Callable[[], int]
    every_steps: Callable[[Target], int]
    last_step: Callable[[Target], int | None]
    is_durable: Callable[[str], bool]
    is_barred: Callable[[str], bool]
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
        aside: where the durable tier is waited for; by default here.
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
    ) -> None:
        self._stack, self._fleet, self._book, self._hooks = stack, fleet, book, hooks
        self._clock, self._aside = clock, aside or Inline()
        self._health = Health(fleet)
        self._drops = Drops(fleet, hooks.generation, lambda: self._clock())
        self._greeted: dict[
            str, Any
        ] = {}  # node with a new holder to the call that tells what it has
        self._first: NodeTier = stack.node_tiers[0]
        self._transfers: dict[Target, Transfer] = {}
        self._forced: set[str] = set()
        self._passed: set[str] = set()
        # When every byte of a checkpoint in a tier was last read and compared.
        self._verified: dict[tuple[NodeTier, str], float] = {}
        self._scrub: Transfer | None = None
        self._settled: set[str] = set()  # as many copies in the first tier as there are to be
        self._given_up: set[tuple[Target, str]] = set()
        self._evidence: list[tuple[str, str, Any, float]] = []  # node, checkpoint, call, since when
        self._late: dict[str, Any] = {}  # node to a commit that it has not answered
        self._in_use, self._moved_on = "", False  # what the attempt restores, and whether it has
        self._nodes: tuple[str, ...] = ()
        self._told_few = False  # that there are fewer nodes than copies are wanted
        self._also: tuple[str, ...] = ()
        self._handed_out: dict[str, str] = {}  # node to the holder that workers were told of
        self._revivals = 0

    # ---- attempts -------------------------------------------------------------------------------

    def begin(self, nodes: Sequence[str], also: Sequence[str] = ()) -> None:
        """A new attempt, with workers on these nodes: finds their holders, and what all holders have.

        Args:
            nodes: with workers.
            also: nodes that may have copies.

        Raises:
            ConfigError: a folder of a tier cannot be used on some node.
        """
        self._passed.clear()
        self._given_up.clear()
        self._drops.clear()
        self._greeted.clear()
        self._in_use, self._moved_on = "", False
        self._nodes, self._told_few = tuple(dict.fromkeys(node for node in nodes if node)), False
        self._also, self._revivals = tuple(also), 0
        self._gather()
        # Nodes may be gone, or new.
        self._settled = {name for name in self._book.names() if self._has_replicas(name)}

    def _gather(self) -> None:
        self._fleet.gather(self._nodes, self._also)
        self._handed_out = self._fleet.names()
        self.refresh()

    def sweep(self) -> None:
        """Puts on record what the nodes hold, and clears away what attempts before this one never committed."""
        tiers = self._stack.node_tiers
        held = {
            name: [tier for tier in tiers if self._book.complete(name, tier)]
            for name in self._book.names()
        }
        self._hooks.record("copies", tiers={name: where for name, where in held.items() if where})
        for node in self._fleet.names():
            self._sweep(node)

    def refresh(self) -> None:
        """Asks the holders what they have: a node may be gone."""
        for problem in self._book.take(inventories(self._fleet)):
            self._hooks.record("alert", name="tiers", problem=problem)

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
        return [entry for entry in self._book.entries() if entry.folder.name not in self._passed]

    def sources(self, name: str) -> dict[str, tuple[Source, ...]]:
        """Where an attempt takes a checkpoint's files from; empty: from the durable folder."""
        if name in self._passed:
            return {}
        return self._book.sources(name, durable=self._hooks.is_durable(name))

    def restoring(self, name: str) -> None:
        """Protects the checkpoint that an attempt restores; an empty name is the end of that."""
        self._in_use, self._moved_on = name, not name
        for node in () if name else self._fleet.names():
            self._ask(node)  # what workers asked for is there now too

    def bad_copies(self, name: str, bad: Sequence[tuple[Place, str]]) -> None:
        """Copies that were found not to be what was written: nobody takes them again."""
        manifest = self._book.known(name)
        entries = {entry.path: entry for entry in manifest.files} if manifest else {}
        for place, path in bad:
            if manifest is None or (entry := entries.get(path)) is None:
                continue  # a late word on what no node has any more
            self._book.remove(place, name, path)
            # Its own holder looks again: the way to the reader may be to blame, and then it stays.
            self._post(place.node, "has", tier=place.tier, name=name, entry=entry)
            self._settled.discard(name)  # one copy less than there are to be
            self._hooks.record(
                "bad_copy",
                name=name,
                step=manifest.step,
                tier=place.tier,
                node=place.node,
                path=path,
            )

    def revive(self, name: str) -> bool:
        """Whether a checkpoint that was not given back can be had after all: a holder had died, or hung.

        What a dead holder held is there still. Nobody trains meanwhile, so this waits for another holder.
        """
        if name in self._passed or self._revivals >= _REVIVALS:
            return False
        self._revivals += 1
        before = self._handed_out
        try:
            self._gather()
        except RayCkptError:
            logger.exception("not every node has a holder")
        return self._handed_out != before and self._book.complete(name)

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
        if ".metadata" not in named:
            return "the metadata of the checkpoint was not written"
        deadline = self._clock() + QUICK_S
        if problem := self._drops.wait(manifest.name, QUICK_S):
            return problem
        fault_point("desk.commit")
        problems, tickets = [], {}
        for node, paths in places.items():
            try:
                tickets[node] = self._call(
                    node, "commit", tier=self._first, manifest=manifest, paths=tuple(paths)
                )
            except RayCkptError as error:
                problems.append(str(error))
        for node, ticket in tickets.items():
            try:
                done, problem = self._fleet.take(ticket, max(0.0, deadline - self._clock()))
            except RayCkptError as error:
                self._lost(node, error)
                done, problem = True, str(error)
            if not done:
                problem = f"it did not answer within {QUICK_S:g} s"
                self._late[node] = ticket
            if problem:
                problems.append(f"node {node}: {problem}")
        fault_point("desk.committed")
        if problems:
            return "; ".join(problems[:3])
        for node, paths in places.items():
            self._book.add(Place(self._first, node), manifest, paths)
        return None

    def discard(self, name: str) -> None:
        """Removes what a failed save left on the nodes."""
        self._book.remove_all(self._first, name)
        for node in {*self._nodes, *self._fleet.names()}:
            self._drops.start(node, self._first, name)

    def known(self, name: str) -> Manifest | None:
        """The manifest with which nodes have committed parts of a checkpoint, None when none has."""
        return self._book.known(name)

    def set_aside(self, manifest: Manifest, places: Mapping[str, Sequence[str]]) -> None:
        """Copies what must not be committed to where it is kept as evidence; then it goes from the nodes."""
        for node, paths in places.items():
            try:
                ticket = self._call(
                    node, "promote", manifest=manifest, paths=tuple(paths), target="durable"
                )
            except RayCkptError as error:
                logger.warning("%s is not kept whole: %s", manifest.name, error)
            else:
                self._evidence.append((node, manifest.name, ticket, self._clock()))

    def force(self, name: str) -> None:
        """A checkpoint goes to every tier, whatever the intervals say."""
        self._forced.add(name)

    # ---- copies ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Takes on record what holders did, and begins what is due; neither waits nor raises."""
        now_s = self._clock()
        self._try(self._mend, now_s)
        # Each by itself: what fails in one must not delay the others.
        for target in self._targets():
            self._try(self._advance, target, now_s)
        self._try(self._clear_evidence, now_s)
        self._try(self._retain)
        self._try(self._scrub_next, now_s)

    def problem(self, target: Target) -> str:
        """What is in the way of the copy that is under way; empty when nothing is."""
        transfer = self._transfers.get(target)
        return transfer.problem if transfer else ""

    def close(self, *, drop_memory: bool) -> None:
        """Ends the holders, and what is in memory when nobody needs it any more."""
        self._fleet.close(drop_memory=drop_memory, generation=self._hooks.generation())

    # ---- inside ---------------------------------------------------------------------------------

    def _try(self, part: Callable[..., None], *arguments: Any) -> None:
        try:
            part(*arguments)
        except Exception:
            logger.exception("the tiers could not be looked after; it is tried again")

    def _advance(self, target: Target, now_s: float) -> None:
        if (transfer := self._transfers.get(target)) is not None:
            self._poll(target, transfer, now_s)
        if target not in self._transfers and (name := self._due(target)):
            self._begin(target, name, now_s)

    def _mend(self, now_s: float) -> None:
        """Sees to it that nodes with workers have holders that answer; one that is new is asked what it has."""
        self._late = {node: ticket for node, ticket in self._late.items() if not self._told(ticket)}
        owing = [each.owing for each in self._transfers.values()]
        for node in self._health.look(self._drops.owing.union(self._late, *owing), now_s):
            self._hooks.record(
                "alert",
                name="tiers",
                problem=f"the holder on node {node} does not answer: another one is started",
            )
            self._late.pop(node, None)
            self._drops.leave(node)
            for transfer in self._transfers.values():
                transfer.leave(node)
        for node in {node for each in self._transfers.values() for node in each.gone}:
            self._lost(node)
        for transfer in self._transfers.values():
            transfer.gone.clear()
        for node in self._fleet.mend(self._nodes):
            self._health.forget(node)
            self._ask(node)
        for node, ticket in list(self._greeted.items()):
            self._greet(node, ticket)
        self._drops.advance({*self._nodes, *self._fleet.names()})

    def _ask(self, node: str) -> None:
        try:
            self._greeted[node] = self._fleet.post(node, "inventory")
        except RayCkptError as error:
            self._lost(node, error)

    def _greet(self, node: str, ticket: Any) -> None:
        try:
            done, found = self._fleet.take(ticket, 0)
        except RayCkptError as error:
            del self._greeted[node]
            self._lost(node, error)
            return
        if done:
            del self._greeted[node]
            self._book.welcome(node, found)
            self._sweep(node)
            self._drops.hurry(node)
            self._given_up.clear()  # it may have been this node that was in the way

    def _told(self, ticket: Any) -> bool:
        """Whether a call has ended, however."""
        try:
            done, _ = self._fleet.take(ticket, 0)
        except RayCkptError:
            done = True
        return done

    def _lost(self, node: str, error: RayCkptError | None = None) -> None:
        """Another holder takes the place of one that is gone."""
        if error is None or isinstance(error, HolderGoneError):
            self._health.forget(node)
            self._drops.leave(node)
            self._fleet.renew(node)

    def _sweep(self, node: str) -> None:
        keep = (*self._book.names(), *(name for _, name, _, _ in self._evidence))
        self._post(node, "sweep", keep=keep)

    def _clear_evidence(self, now_s: float) -> None:
        left = []
        for node, name, ticket, since_s in self._evidence:
            try:
                done, report = self._fleet.take(ticket, 0)
                for problem in (report.problems if done else {}).values():
                    logger.warning("%s is not kept whole: %s", name, problem)
            except RayCkptError as error:
                logger.warning("%s is not kept whole: %s", name, error)
                done = True
            if not done and now_s - since_s > _EVIDENCE_S:
                logger.warning("%s is not kept whole: node %s does not get done", name, node)
                done = True
            if done:
                self._drops.start(node, self._first, name)
            else:
                left.append((node, name, ticket, since_s))
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
            return self._hooks.is_durable(name) or self._hooks.is_barred(name)
        if target == self._first:
            return name in self._settled and (target, name) in self._verified
        return self._book.complete(name, target)

    def _begin(self, target: Target, name: str, now_s: float) -> None:
        manifest = self._book.manifest(name)
        checks: set[str] = set()
        if target == self._first:
            wanted = self._wanted_replicas(manifest)
            places = self._book.copies(name, self._first).values()
            if (self._first, name) not in self._verified:
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
        transfer.start(self._fleet, self._book, now_s, self._hooks.generation())

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
        if transfer.sealing:
            self._sealed(transfer, now_s)
            return
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
                for node in transfer.checks - {*self._nodes, *self._fleet.names()}:
                    transfer.checks.discard(node)
                    self._book.forget_node(node)  # nobody can say that what it has is good
            transfer.start(self._fleet, self._book, now_s, self._hooks.generation())

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
        if target == "durable" and not transfer.sealing:
            if not self._aside.busy:
                transfer.sealing = True
                self._aside.start(lambda: self._hooks.seal(manifest) or "")
                self._sealed(transfer, now_s)
            return
        fault_point("desk.arrived")
        del self._transfers[target]
        seconds = now_s - transfer.began_s
        if target == self._first:
            self._settled.add(transfer.name)
            places = self._book.copies(transfer.name, self._first).values()
            copies = min(map(len, places), default=0)
            wanted = 1 + (self._stack.replicas if target == "memory" else 0)
            first, self._told_few = not self._told_few, self._told_few or copies < wanted
            self._hooks.record(
                "replicated",
                name=transfer.name,
                step=manifest.step,
                tier=target,
                copies=copies,
                wanted=wanted,
                first=first,
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

    def _sealed(self, transfer: Transfer, now_s: float) -> None:
        """Takes what came of the commit in the durable tier, which may take long."""
        outcome = self._aside.take()
        if outcome is None:
            return
        if outcome:
            transfer.sealing, transfer.problem = False, str(outcome)
            transfer.wanted = {"": {entry.path for entry in transfer.manifest.files}}
            self._pause("durable", transfer, now_s)
        else:
            self._finish("durable", transfer, now_s)

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
        self._scrub.start(self._fleet, self._book, now_s, self._hooks.generation())

    def _retain(self) -> None:
        """Ends what a tier on the nodes need not keep any more."""
        self._forget()
        keeps = {"memory": self._stack.memory_keep, "local": self._stack.local_keep}
        busy = {transfer.name for transfer in self._transfers.values()} | {self._in_use}
        busy |= {self._scrub.name} if self._scrub is not None else set()
        busy |= self._forced  # they must get to the durable tier yet
        by_name = {entry.folder.name: entry for entry in self._book.entries()}
        for tier in self._stack.node_tiers:
            kept = held = 0
            for name in self._book.names():
                if not any(self._book.copies(name, tier).values()):
                    continue
                entry = by_name.get(name)
                good = entry is not None and not self._hooks.is_left(entry)
                # Only what is whole and read counts: an older one goes only after a newer one is proved.
                proved = good and self._is_proved(tier, name)
                enough = kept >= keeps[tier] or (kept and held >= keeps[tier] and not proved)
                if name not in busy and (enough or self._is_lost(name)):
                    self._drop(tier, name, _why(kept, keeps[tier], tier))
                else:
                    held += 1
                    kept += proved

    def _is_proved(self, tier: NodeTier, name: str) -> bool:
        """Whether a tier has a checkpoint whole and as it was written, and survives what it should."""
        if not self._book.complete(name, tier) or (tier, name) not in self._verified:
            return False
        # Where replicas could not be made, such as in a full memory, older ones go all the same: else it stays full.
        return tier != self._first or name in self._settled or (tier, name) in self._given_up

    def _is_lost(self, name: str) -> bool:
        """Whether what a checkpoint lacks will not come any more: the attempt went on from another one."""
        manifest = self._book.manifest(name)
        over = self._moved_on and manifest.generation < self._hooks.generation()
        return over and not self._book.complete(name) and not self._hooks.is_durable(name)

    def _has_replicas(self, name: str) -> bool:
        copies = self._book.copies(name, self._first).values()
        wanted = 1 + (self._stack.replicas if self._first == "memory" else 0)
        return min(map(len, copies), default=0) >= wanted

    def _forget(self) -> None:
        """What is said of checkpoints that no node has any more says nothing."""
        names = set(self._book.names())
        self._forced &= names
        self._settled &= names
        self._given_up = {(target, name) for target, name in self._given_up if name in names}
        self._verified = {key: at_s for key, at_s in self._verified.items() if key[1] in names}

    def _drop(self, tier: NodeTier, name: str, reason: str) -> None:
        fault_point("desk.drop")
        step = self._book.manifest(name).step
        for node in self._book.remove_all(tier, name):
            self._drops.start(node, tier, name)
        self._verified.pop((tier, name), None)
        self._hooks.record("delete", name=name, step=step, tier=tier, reason=reason)

    def _call(self, node: str, method: str, **kwargs: Any) -> Any:
        """Begins a call of the present attempt."""
        return self._fleet.post(node, method, generation=self._hooks.generation(), **kwargs)

    def _post(self, node: str, method: str, **kwargs: Any) -> None:
        """Calls a holder whose answer nobody waits for."""
        try:
            self._call(node, method, **kwargs)
        except RayCkptError as error:
            logger.warning("node %s: %s", node, error)


def _why(kept: int, keep: int, tier: NodeTier) -> str:
    """Why a checkpoint need not stay in a tier, in words."""
    if not kept:
        return f"parts of it are lost, and the run went on without it: what is left in {tier} is of no use"
    if kept >= keep:
        return f"{keep} newer ones are in {tier}"
    return f"it was not read back in {tier}, and a newer one was"
