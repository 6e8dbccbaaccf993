"""What the guard refused, on the nodes: copied to where it is kept as evidence, and then it goes from there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.errors import RayCkptError
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.stack import NodeTier
from ray_ckpt.tracker.drops import Drops
from ray_ckpt.tracker.holders import Holders

logger = logging.getLogger(__name__)

_EVIDENCE_S = 3600.0  # then a refused checkpoint leaves the nodes, kept elsewhere or not


class Evidence:
    """Refused checkpoints of one run.

    Args:
        fleet: who answers.
        holders: who copy.
        drops: what the nodes are to delete.
        first: tier that workers write into.
    """

    def __init__(self, *, fleet: Fleet, holders: Holders, drops: Drops, first: NodeTier) -> None:
        self._fleet, self._holders, self._drops, self._first = fleet, holders, drops, first
        # Node, checkpoint, call, since when.
        self._waiting: list[tuple[str, str, Any, float]] = []

    def names(self) -> Iterator[str]:
        """Of the checkpoints that are on their way."""
        return (name for _, name, _, _ in self._waiting)

    def take(self, manifest: Manifest, places: Mapping[str, Sequence[str]], now_s: float) -> None:
        """Has what must not be committed copied to where it is kept.

        Args:
            manifest: of the checkpoint.
            places: node to the files that its workers wrote.
            now_s: monotonic seconds.
        """
        for node, paths in places.items():
            try:
                ticket = self._holders.call(
                    node, "promote", manifest=manifest, paths=tuple(paths), target="durable"
                )
            except RayCkptError as error:
                logger.warning("%s is not kept whole: %s", manifest.name, error)
            else:
                self._waiting.append((node, manifest.name, ticket, now_s))

    def clear(self, now_s: float) -> None:
        """Has the nodes delete what is kept by now."""
        left = []
        for node, name, ticket, since_s in self._waiting:
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
        self._waiting = left
