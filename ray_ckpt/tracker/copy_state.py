"""What is known of the copies on the nodes, beside which there are: whether they are proved, wanted, or given up."""

from __future__ import annotations

import math
from typing import Any

from ray_ckpt.checkpoint.listing import CheckpointEntry
from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.tiers.holder import Target
from ray_ckpt.tiers.stack import NodeTier
from ray_ckpt.tracker.copies import CopyBook


class CopyState:
    """State of the checkpoints in a book.

    Args:
        book: which copies there are.

    Attributes:
        verified: tier and checkpoint to when every byte of it there was last read and compared, monotonic seconds.
        settled: checkpoints with as many copies in the first tier as there are to be.
        forced: those that go to every tier, whatever the intervals say.
        given_up: tier and checkpoint that does not go there any more.
        unproved: those that were committed under this tracker, and never read back since.
        passed: those that the nodes did not give back to the present attempt.
        asked_s: since when somebody wants to know that all copies are as they were written, monotonic seconds.
        bad: tier and checkpoint to the nodes and files that were found bad since then.
        unread: tier and checkpoint to why not all of it could be read since then.
    """

    def __init__(self, book: CopyBook) -> None:
        self._book = book
        self.verified: dict[tuple[NodeTier, str], float] = {}
        self.settled: set[str] = set()
        self.forced: set[str] = set()
        self.given_up: set[tuple[Target, str]] = set()
        self.unproved: set[str] = set()
        self.passed: set[str] = set()
        self.asked_s = -math.inf
        self.bad: dict[tuple[NodeTier, str], set[tuple[str, str]]] = {}
        self.unread: dict[tuple[NodeTier, str], str] = {}

    def begin(self) -> None:
        """A new attempt: what did not work is tried again."""
        self.passed.clear()
        self.given_up.clear()

    def try_again(self) -> None:
        """A node has a holder again, and may have been what was in the way."""
        self.given_up.clear()

    def entries(self) -> list[CheckpointEntry]:
        """Checkpoints that the nodes can give back whole, newest first."""
        return [entry for entry in self._book.entries() if entry.folder.name not in self.passed]

    def forget(self) -> None:
        """What is said of checkpoints that no node has any more says nothing."""
        names = set(self._book.names())
        self.forced &= names
        self.settled &= names
        self.unproved -= {name for _, name in self.verified}
        self.unproved &= names
        self.given_up = {(target, name) for target, name in self.given_up if name in names}
        self.verified = {key: at_s for key, at_s in self.verified.items() if key[1] in names}

    def ask(self, now_s: float) -> None:
        """All that the nodes hold is to be read again."""
        self.asked_s = now_s
        self.bad.clear()
        self.unread.clear()

    def read_back(self, tiers: tuple[NodeTier, ...]) -> list[dict[str, Any]]:
        """What came of it so far: ``step, generation, tier, done, ok, faults [{path, fault}], nodes``.

        What is not ``done`` has not been read yet. A fault says on which node, and whether other copies are there.
        """
        rows = []
        for tier in tiers:
            names = {
                name for name in self._book.names() if any(self._book.copies(name, tier).values())
            }
            for name in sorted({*names, *(name for where, name in self.bad if where == tier)}):
                key, at = parse_checkpoint_name(name), (tier, name)
                assert key is not None, name
                left = (
                    "others are whole"
                    if self._book.complete(name)
                    else "NO whole copy is left on the nodes"
                )
                faults = [
                    {
                        "path": path,
                        "fault": f"the copy on node {node} is not what was written; {left}",
                    }
                    for node, path in sorted(self.bad.get(at, ()))
                ]
                if why := self.unread.get(at):
                    faults.append({"path": "", "fault": f"could not be read: {why}"})
                places = self._book.copies(name, tier).values()
                rows.append(
                    {
                        "step": key[0],
                        "generation": key[1],
                        "tier": tier,
                        "done": name not in names
                        or self.verified.get(at, -math.inf) >= self.asked_s,
                        "ok": not faults,
                        "faults": faults,
                        "nodes": sorted({place.node for each in places for place in each}),
                    }
                )
        return rows
