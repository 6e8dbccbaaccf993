"""Copies on their way to slower tiers, and beside the first copy: one checkpoint at a time in each tier.

Each tier has its own queue of one: a slow or broken tier delays itself alone, and when it is free again the newest
checkpoint that is due goes there, not every one that it missed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.holder import Report, Target
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tiers.stack import NodeTier, Stack
from ray_ckpt.tracker.aside import Aside
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.copy_state import CopyState
from ray_ckpt.tracker.holders import Holders
from ray_ckpt.tracker.hooks import Hooks
from ray_ckpt.tracker.transfers import Transfer, places_of, replicas

logger = logging.getLogger(__name__)


class Copying:
    """Copies of one run that are under way.

    Args:
        stack: the tiers.
        fleet: who calls the holders, which copy.
        book: what they have.
        state: what is known of it.
        holders: those of the present attempt.
        hooks: the tracker.
        aside: where the durable tier is waited for.
    """

    def __init__(
        self,
        *,
        stack: Stack,
        fleet: Fleet,
        book: CopyBook,
        state: CopyState,
        holders: Holders,
        hooks: Hooks,
        aside: Aside,
    ) -> None:
        self._stack, self._fleet, self._book, self._state = stack, fleet, book, state
        self._holders, self._hooks, self._aside = holders, hooks, aside
        self._first: NodeTier = stack.node_tiers[0]
        self._transfers: dict[Target, Transfer] = {}
        self._told_few = False  # that there are fewer nodes than copies are wanted

    @property
    def transfers(self) -> Collection[Transfer]:
        """All that are under way."""
        return self._transfers.values()

    def begin(self) -> None:
        """A new attempt, perhaps on other nodes."""
        self._told_few = False

    def look(self) -> None:
        """Nodes may be gone, or new: finds out which checkpoints have the replicas that they are to have."""
        self._state.settled = {name for name in self._book.names() if self._has_replicas(name)}

    def advance(self, target: Target, now_s: float) -> None:
        """Takes what holders did for a tier, and begins what is due there."""
        if (transfer := self._transfers.get(target)) is not None:
            self._poll(target, transfer, now_s)
        if target not in self._transfers and (name := self._due(target)):
            self._begin(target, name, now_s)

    def problem(self, target: Target) -> str:
        """What is in the way of the copy that is under way; empty when nothing is."""
        transfer = self._transfers.get(target)
        return transfer.problem if transfer else ""

    def bad_copies(self, name: str, bad: Sequence[tuple[Place, str]]) -> None:
        """Copies that were found not to be what was written: nobody takes them again."""
        manifest = self._book.known(name)
        entries = {entry.path: entry for entry in manifest.files} if manifest else {}
        for place, path in bad:
            if manifest is None or (entry := entries.get(path)) is None:
                continue  # a late word on what no node has any more
            self._book.remove(place, name, path)
            self._state.bad.setdefault((place.tier, name), set()).add((place.node, path))
            # Its own holder looks again: the way to the reader may be to blame, and then it stays.
            self._holders.post(place.node, "has", tier=place.tier, name=name, entry=entry)
            self._state.settled.discard(name)  # one copy less than there are to be
            self._hooks.record(
                "bad_copy",
                name=name,
                step=manifest.step,
                tier=place.tier,
                node=place.node,
                path=path,
            )

    def _due(self, target: Target) -> str | None:
        """The checkpoint that is to go to a tier next."""
        entries = [entry for entry in self._state.entries() if not self._hooks.is_left(entry)]
        for entry in entries:
            name = entry.folder.name
            if name in self._state.forced and not self._is_in(target, name):
                return name
        last, every = self._hooks.last_step(target), self._hooks.every_steps(target)
        for entry in entries:
            if self._is_in(target, entry.folder.name):
                return None  # nothing newer is due
            if target == self._first or last is None or entry.step - last >= every:
                return entry.folder.name
        return None

    def _is_in(self, target: Target, name: str) -> bool:
        if (target, name) in self._state.given_up:
            return True  # the next one is tried
        if target == "durable":
            return self._hooks.is_durable(name) or self._hooks.is_barred(name)
        if target == self._first:
            return name in self._state.settled and (target, name) in self._state.verified
        return self._book.complete(name, target)

    def _begin(self, target: Target, name: str, now_s: float) -> None:
        manifest = self._book.manifest(name)
        checks: set[str] = set()
        if target == self._first:
            wanted = self._wanted_replicas(manifest)
            places = self._book.copies(name, self._first).values()
            if (self._first, name) not in self._state.verified:
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

    def _wanted_replicas(
        self, manifest: Manifest, avoid: AbstractSet[tuple[str, str]] = frozenset()
    ) -> dict[str, set[str]]:
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
            avoid=avoid,
        )

    def _has_replicas(self, name: str) -> bool:
        copies = self._book.copies(name, self._first).values()
        wanted = 1 + (self._stack.replicas if self._first == "memory" else 0)
        return min(map(len, copies), default=0) >= wanted

    def _poll(self, target: Target, transfer: Transfer, now_s: float) -> None:
        if transfer.sealing:
            self._sealed(transfer, now_s)
            return
        for node, report in transfer.poll(self._fleet, now_s):
            self._take(target, transfer, node, report)
        if target == self._first and not transfer.checks:
            self._state.verified[self._first, transfer.name] = now_s
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
                # A node may be gone, or have no room.
                transfer.wanted = self._wanted_replicas(transfer.manifest, transfer.avoid)
                for node in transfer.checks - self._holders.expected:
                    transfer.checks.discard(node)
                    self._book.forget_node(node)  # nobody can say that what it has is good
            transfer.start(self._fleet, self._book, now_s, self._hooks.generation())

    def _pause(self, target: Target, transfer: Transfer, now_s: float) -> None:
        transfer.pause(now_s, self._stack.pause_s)
        # What must get there is tried for as long as the run lives.
        if transfer.tries >= self._stack.tries and transfer.name not in self._state.forced:
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
            self._state.settled.add(transfer.name)
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
            self._state.verified[target, transfer.name] = now_s
        self._state.forced -= {transfer.name} if target == "durable" else set()
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
        self._state.given_up.add((target, transfer.name))
        self._hooks.record(
            "promote_failed",
            name=transfer.name,
            step=transfer.manifest.step,
            tier=target,
            tries=transfer.tries,
            error=transfer.problem,
        )
