"""The holders on a run's nodes, from its tracker's side: found, asked what they have, replaced when they hang."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ray_ckpt.errors import HolderGoneError, RayCkptError
from ray_ckpt.tiers.fleet import Fleet, inventories
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.drops import Drops
from ray_ckpt.tracker.health import Health
from ray_ckpt.tracker.hooks import Hooks
from ray_ckpt.tracker.transfers import Transfer

logger = logging.getLogger(__name__)

_REVIVALS = 3  # of holders, in one restore


class Holders:
    """Holders of one run.

    Args:
        fleet: who starts and calls them.
        book: what they have.
        drops: what they are to delete.
        hooks: the tracker.
        evidence: names of refused checkpoints that are to stay for now.
        on_back: told that a node has a holder again.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        book: CopyBook,
        drops: Drops,
        hooks: Hooks,
        evidence: Callable[[], Iterable[str]],
        on_back: Callable[[], None],
    ) -> None:
        self._fleet, self._book, self._drops, self._hooks = fleet, book, drops, hooks
        self._evidence, self._on_back = evidence, on_back
        self._health = Health(fleet)
        # Node with a new holder to the call that tells what it has.
        self._greeted: dict[str, Any] = {}
        self._late: dict[str, Any] = {}  # node to a commit that it has not answered
        self._nodes: tuple[str, ...] = ()
        self._also: tuple[str, ...] = ()
        self._handed_out: dict[str, str] = {}  # node to the holder that workers were told of
        self._revivals = 0
        self._silent: set[str] = (
            set()
        )  # nodes that did not tell what they have, when they were asked last

    # ---- who there is ---------------------------------------------------------------------------

    def begin(self, nodes: Sequence[str], also: Sequence[str]) -> None:
        """A new attempt (see :meth:`ray_ckpt.tracker.tierdesk.TierDesk.begin`)."""
        self._greeted.clear()
        self._nodes = tuple(dict.fromkeys(node for node in nodes if node))
        self._also, self._revivals = tuple(also), 0
        for node in self._silent:
            self._fleet.renew(
                node
            )  # a whole group stands still for this: nobody is waited for twice
        self._gather()

    def _gather(self) -> None:
        self._fleet.gather(self._nodes, self._also)
        self._handed_out = self._fleet.names()
        self.refresh()

    def refresh(self) -> None:
        """Asks the holders what they have: a node may be gone."""
        found = inventories(self._fleet)
        self._silent = self._fleet.names().keys() - found.keys()
        for problem in self._book.take(found):
            self._hooks.record("alert", name="tiers", problem=problem)

    @property
    def expected(self) -> set[str]:
        """Nodes that have a holder, or are to have one again."""
        return {*self._nodes, *self._fleet.names()}

    def revive(self, name: str) -> bool:
        """Whether a checkpoint can be had after all: some holder is another one now.

        What a dead holder held is there still. Nobody trains meanwhile, so this waits for another holder.
        """
        if self._revivals >= _REVIVALS:
            return False
        self._revivals += 1
        before = self._handed_out
        try:
            self._gather()
        except RayCkptError:
            logger.exception("not every node has a holder")
        return self._handed_out != before and self._book.complete(name)

    # ---- calls ----------------------------------------------------------------------------------

    def call(self, node: str, method: str, **kwargs: Any) -> Any:
        """Begins a call of the present attempt."""
        return self._fleet.post(node, method, generation=self._hooks.generation(), **kwargs)

    def post(self, node: str, method: str, **kwargs: Any) -> None:
        """Calls a holder whose answer nobody waits for."""
        try:
            self.call(node, method, **kwargs)
        except RayCkptError as error:
            logger.warning("node %s: %s", node, error)

    def late(self, node: str, ticket: Any, now_s: float) -> None:
        """Notes a call that was waited for in vain."""
        self._late[node] = ticket
        self._health.hurry(node, now_s)

    def ask(self, node: str) -> None:
        """Asks one holder what it has; the answer is taken later."""
        try:
            self._greeted[node] = self._fleet.post(node, "inventory")
        except RayCkptError as error:
            self.lost(node, error)

    def sweep(self, node: str) -> None:
        """Has a node clear away what attempts before this one never committed."""
        self.post(node, "sweep", keep=(*self._book.names(), *self._evidence()))

    # ---- those that are gone --------------------------------------------------------------------

    def lost(self, node: str, error: RayCkptError | None = None, called: str | None = None) -> None:
        """Another holder takes the place of one that is gone.

        Args:
            node: of it.
            error: what a call of it ended with.
            called: name of the holder that was called, where others may have seen to it meanwhile.
        """
        if called is not None and self._fleet.names().get(node) != called:
            return
        if error is None or isinstance(error, HolderGoneError):
            self._health.forget(node)
            self._drops.leave(node)
            self._fleet.renew(node)

    def mend(self, transfers: Collection[Transfer], now_s: float) -> None:
        """Sees to it that nodes with workers have holders that answer; one that is new is asked what it has.

        Args:
            transfers: that holders work on.
            now_s: monotonic seconds.
        """
        self._late = {node: ticket for node, ticket in self._late.items() if not self._told(ticket)}
        owing = [each.owing for each in transfers]
        for node in self._health.look(self._drops.owing.union(self._late, *owing), now_s):
            self._hooks.record(
                "alert",
                name="tiers",
                problem=f"the holder on node {node} does not answer: another one is started",
            )
            self._late.pop(node, None)
            self._drops.leave(node)
            for transfer in transfers:
                transfer.leave(node)
        for node in {node for each in transfers for node in each.gone}:
            self.lost(node)
        for transfer in transfers:
            transfer.gone.clear()
        for node in self._fleet.mend(self._nodes):
            self._health.forget(node)
            self.ask(node)
        for node, ticket in list(self._greeted.items()):
            self._greet(node, ticket)
        self._drops.advance(self.expected)

    def _greet(self, node: str, ticket: Any) -> None:
        try:
            done, found = self._fleet.take(ticket, 0)
        except RayCkptError as error:
            del self._greeted[node]
            self.lost(node, error)
            return
        if done:
            del self._greeted[node]
            self._book.welcome(node, found)
            self.sweep(node)
            self._drops.hurry(node)
            self._on_back()

    def _told(self, ticket: Any) -> bool:
        """Whether a call has ended, however."""
        try:
            done, _ = self._fleet.take(ticket, 0)
        except RayCkptError:
            done = True
        return done
