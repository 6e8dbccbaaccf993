"""All holders of a run, as its tracker reaches them; :mod:`ray_ckpt.tiers.ray_fleet` has them as actors."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ray_ckpt.errors import RayCkptError
from ray_ckpt.tiers.holder import Inventory

logger = logging.getLogger(__name__)

QUICK_S = 20.0  # for what reads no files


class Fleet(Protocol):
    """Calls methods of :class:`ray_ckpt.tiers.holder.Holder` on nodes."""

    def gather(self, nodes: Sequence[str], also: Sequence[str] = ()) -> None:
        """Sees to it that there are holders on these nodes, and forgets those of nodes that are gone.

        On others, that only may have copies, they are started too, and hardly waited for.
        One that cannot be started is told in the log, and is tried again by :meth:`mend`.

        Raises:
            ConfigError: a folder of a tier cannot be used on some node; the other holders are there.
        """
        ...

    def mend(self, nodes: Sequence[str]) -> list[str]:
        """Starts holders on those of these nodes that live and have none; does not wait for them.

        Returns:
            Nodes that have got one since the last call.
        """
        ...

    def renew(self, node: str) -> None:
        """Ends a holder that is gone or hangs, so that :meth:`mend` starts another one."""
        ...

    def names(self) -> dict[str, str]:
        """Node to what workers find its holder by."""
        ...

    def domains(self, label: str) -> dict[str, str]:
        """Node to its value of a label, for those that have it."""
        ...

    def post(self, node: str, method: str, **kwargs: Any) -> Any:
        """Calls without waiting; returns a ticket."""
        ...

    def take(self, ticket: Any, timeout_s: float) -> tuple[bool, Any]:
        """``(done, answer)`` of a call; ``(False, None)`` when it is not done within the time.

        Raises:
            HolderGoneError: the holder or its node is gone.
            RayCkptError: what the call raised.
        """
        ...

    def close(self, *, drop_memory: bool, generation: int) -> None:
        """Ends all holders; and what is in memory, when nobody needs it any more."""
        ...


def answers(
    fleet: Fleet, tickets: Mapping[str, Any], timeout_s: float
) -> dict[str, Any | RayCkptError]:
    """What became of calls, one a node, that were begun together; waits for all of them at once.

    Args:
        fleet: the holders.
        tickets: node to its call.
        timeout_s: for all of them together.

    Returns:
        Node to its answer, or to the error that it ended with; nodes that did not answer in time are left out.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[str, Any | RayCkptError] = {}
    for node, ticket in tickets.items():
        try:
            done, answer = fleet.take(ticket, max(0.0, deadline - time.monotonic()))
        except RayCkptError as error:
            found[node] = error
            continue
        if done:
            found[node] = answer
    return found


def inventories(fleet: Fleet, timeout_s: float = QUICK_S) -> dict[str, Inventory]:
    """What each node has; nodes that do not answer in time are left out."""
    tickets = {}
    for node in fleet.names():
        try:
            tickets[node] = fleet.post(node, "inventory")
        except RayCkptError as error:
            logger.warning("the copies on node %s cannot be counted on: %s", node, error)
    found = answers(fleet, tickets, timeout_s)
    for node in tickets:
        if node not in found:
            logger.warning("node %s does not tell what it has", node)
        elif isinstance(found[node], RayCkptError):
            logger.warning("the copies on node %s cannot be counted on: %s", node, found[node])
    return {node: each for node, each in found.items() if isinstance(each, Inventory)}
