"""Housekeeping of the tiers on the nodes: which checkpoints stay there, and which are read back again.

A tier keeps its newest few that are proved: whole, read back, and copied as often as they are to be. Where copies come
in more slowly than saves, those that wait for it must not fill the memory: of what was never read back no more than
the same few newest stay, beside the one that is being copied. The oldest of them are given up, not the next save: the
newest is worth the most, and what is proved stays in any case.
"""

from __future__ import annotations

from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.scrub import next_to_scrub
from ray_ckpt.tiers.stack import NodeTier, Stack
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.copy_state import CopyState
from ray_ckpt.tracker.copying import Copying
from ray_ckpt.tracker.drops import Drops
from ray_ckpt.tracker.hooks import Hooks
from ray_ckpt.tracker.transfers import Transfer


class NodeKeeper:
    """Keeps the copies of one run on its nodes.

    Args:
        stack: the tiers.
        fleet: the holders.
        book: what they have.
        state: what is known of it.
        copying: what is under way.
        drops: what the nodes are to delete.
        hooks: the tracker.
    """

    def __init__(
        self,
        *,
        stack: Stack,
        fleet: Fleet,
        book: CopyBook,
        state: CopyState,
        copying: Copying,
        drops: Drops,
        hooks: Hooks,
    ) -> None:
        self._stack, self._fleet, self._book, self._state = stack, fleet, book, state
        self._copying, self._drops, self._hooks = copying, drops, hooks
        self._first: NodeTier = stack.node_tiers[0]
        self._scrub: Transfer | None = None
        self._in_use, self._moved_on = "", False  # what the attempt restores, and whether it has

    def begin(self) -> None:
        """A new attempt, which has not restored yet."""
        self._in_use, self._moved_on = "", False

    def restoring(self, name: str) -> None:
        """Protects the checkpoint that an attempt restores; an empty name is the end of that."""
        self._in_use, self._moved_on = name, not name

    # ---- what stays -----------------------------------------------------------------------------

    def retain(self) -> None:
        """Ends what a tier on the nodes need not keep any more."""
        self._state.forget()
        keeps = {"memory": self._stack.memory_keep, "local": self._stack.local_keep}
        busy = {transfer.name for transfer in self._copying.transfers} | {self._in_use}
        busy |= {self._scrub.name} if self._scrub is not None else set()
        busy |= self._state.forced  # they must get to the durable tier yet
        by_name = {entry.folder.name: entry for entry in self._book.entries()}
        for tier in self._stack.node_tiers:
            kept = held = whole = 0
            for name in self._book.names():
                if not any(self._book.copies(name, tier).values()):
                    continue
                entry = by_name.get(name)
                good = entry is not None and not self._hooks.is_left(entry)
                # Only what is whole and read counts: an older one goes only after a newer one is proved.
                proved = good and self._is_proved(tier, name)
                enough = kept >= keeps[tier] or (kept and held >= keeps[tier] and not proved)
                surplus = whole >= keeps[tier] and tier == self._first and self._is_unread(name)
                if name not in busy and (enough or surplus or self._is_lost(name)):
                    why = _surplus(keeps[tier], tier) if surplus and not kept else ""
                    self._drop(tier, name, why or _why(kept, keeps[tier], tier))
                else:
                    held += 1
                    kept += proved
                    whole += good

    def _is_proved(self, tier: NodeTier, name: str) -> bool:
        """Whether a tier has a checkpoint whole and as it was written, and survives what it should."""
        state = self._state
        if not self._book.complete(name, tier) or (tier, name) not in state.verified:
            return False
        # Where replicas could not be made, such as in a full memory, older ones go all the same: else it stays full.
        return tier != self._first or name in state.settled or (tier, name) in state.given_up

    def _is_unread(self, name: str) -> bool:
        """Whether nobody ever read a checkpoint back; of what an earlier tracker left that is not known."""
        return name in self._state.unproved and (self._first, name) not in self._state.verified

    def _is_lost(self, name: str) -> bool:
        """Whether what a checkpoint lacks will not come any more: the attempt went on from another one."""
        manifest = self._book.manifest(name)
        over = self._moved_on and manifest.generation < self._hooks.generation()
        return over and not self._book.complete(name) and not self._hooks.is_durable(name)

    def _drop(self, tier: NodeTier, name: str, reason: str) -> None:
        fault_point("desk.drop")
        step = self._book.manifest(name).step
        for node in self._book.remove_all(tier, name):
            self._drops.start(node, tier, name)
        self._state.verified.pop((tier, name), None)
        self._hooks.record("delete", name=name, step=step, tier=tier, reason=reason)

    # ---- what is read back again ----------------------------------------------------------------

    def scrub(self, now_s: float) -> None:
        """Has the nodes read back what they have not read for long; one checkpoint in one tier at a time."""
        if self._scrub is not None:
            for _, report in self._scrub.poll(self._fleet, now_s):
                if report.bad:
                    self._copying.bad_copies(self._scrub.name, report.bad)
                    self._state.settled.discard(self._scrub.name)  # it gets replicas again
            if self._scrub.busy:
                return
            # Also what could not be read: it is asked for again when its turn comes.
            at = self._scrub.first, self._scrub.name
            if self._scrub.checks - {node for node, _ in self._state.bad.get(at, ())}:
                self._state.unread[at] = self._scrub.problem
            self._state.verified[at] = now_s
            self._scrub = None
        held = set(self._book.names())
        known = {
            f"{tier} {name}": at_s
            for (tier, name), at_s in self._state.verified.items()
            if name in held
        }
        due = next_to_scrub(
            known, now_s=now_s, every_s=self._stack.scrub_s, asked_s=self._state.asked_s
        )
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


def _surplus(keep: int, tier: NodeTier) -> str:
    """Why a checkpoint that was not read back yet does not stay, in words."""
    return (
        f"{keep} newer ones came before it could be read back and copied, and {tier} is not to fill up: copies "
        "take longer than the saves are apart"
    )


def _why(kept: int, keep: int, tier: NodeTier) -> str:
    """Why a checkpoint need not stay in a tier, in words."""
    if not kept:
        return f"parts of it are lost, and the run went on without it: what is left in {tier} is of no use"
    if kept >= keep:
        return f"{keep} newer ones are in {tier}"
    return f"it was not read back in {tier}, and a newer one was"
