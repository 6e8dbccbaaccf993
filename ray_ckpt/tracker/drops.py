"""What nodes are to delete: asked for until it is done, and never later than what is written there next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from ray_ckpt.errors import RayCkptError
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.stack import NodeTier

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0  # before a drop that failed is asked for again
_TRIES = 20  # then it is left until the next attempt looks at what there is

Key = tuple[str, NodeTier, str]  # node, tier, checkpoint


class Drops:
    """Drops that have not ended.

    Args:
        fleet: the holders.
        generation: of the present attempt.
        clock: monotonic seconds.
    """

    def __init__(
        self, fleet: Fleet, generation: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._fleet, self._generation, self._clock = fleet, generation, clock
        self._tickets: dict[Key, tuple[Any, int]] = {}  # call, and tries before it
        self._waiting: dict[
            Key, tuple[int, float]
        ] = {}  # tries so far, and when the next one is due

    @property
    def owing(self) -> set[str]:
        """Nodes that have not answered."""
        return {node for node, _, _ in self._tickets}

    def start(self, node: str, tier: NodeTier, name: str) -> None:
        """Asks a node to drop a checkpoint."""
        key = (node, tier, name)
        if key not in self._tickets:  # else it is about to be done
            self._waiting.pop(key, None)
            self._start(key, 0)

    def advance(self, nodes: Collection[str]) -> None:
        """Takes the answers that are there, and asks again what is due.

        Args:
            nodes: that have a holder, or will have one again.
        """
        for key in list(self._tickets):
            self._take(key)
        now_s = self._clock()
        for key, (tries, due_s) in list(self._waiting.items()):
            if key[0] not in nodes:
                del self._waiting[key]  # its memory is gone with it
            elif now_s >= due_s:
                del self._waiting[key]
                self._start(key, tries)

    def leave(self, node: str) -> None:
        """Waits no longer for a holder that hangs, or is gone: the next one is asked."""
        for key, (_, tries) in list(self._tickets.items()):
            if key[0] == node:
                del self._tickets[key]
                self._waiting[key] = tries, self._clock() + _PAUSE_S

    def hurry(self, node: str) -> None:
        """A node has a holder again: what waits for it waits no longer."""
        for key, (tries, _) in self._waiting.items():
            if key[0] == node:
                self._waiting[key] = tries, self._clock()

    def calls(self, name: str) -> list[Any]:
        """The calls that drop a checkpoint, for whoever has to wait for them."""
        return [ticket for key, (ticket, _) in self._tickets.items() if key[2] == name]

    def in_the_way(self, name: str) -> str:
        """What is in the way of a checkpoint that comes again, in words, or nothing; does not wait.

        A drop that ran after the next commit of the same name would take that away.
        """
        for key in [key for key in self._tickets if key[2] == name]:
            self._take(key)
        left = [key for key in (*self._tickets, *self._waiting) if key[2] == name]
        if not left:
            return ""
        return f"node {left[0][0]} still has to delete what is left of an earlier save of {name}"

    def clear(self) -> None:
        """A new attempt: what is there is looked at anew."""
        self._tickets.clear()
        self._waiting.clear()

    def _start(self, key: Key, tries: int) -> None:
        node, tier, name = key
        try:
            ticket = self._fleet.post(
                node, "drop", tier=tier, name=name, generation=self._generation()
            )
        except RayCkptError as error:
            self._again(key, tries, error)
        else:
            self._tickets[key] = ticket, tries

    def _take(self, key: Key) -> None:
        ticket, tries = self._tickets[key]
        try:
            done, _ = self._fleet.take(ticket, 0)
        except RayCkptError as error:
            del self._tickets[key]
            self._again(key, tries, error)
            return
        if done:
            del self._tickets[key]

    def _again(self, key: Key, tries: int, error: Exception) -> None:
        node, tier, name = key
        if tries + 1 < _TRIES:
            self._waiting[key] = tries + 1, self._clock() + _PAUSE_S
        logger.warning("node %s: %s is not dropped from %s: %s", node, name, tier, error)
