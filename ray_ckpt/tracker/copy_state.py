"""What is known of the copies on the nodes, beside which there are: whether they are proved, wanted, or given up."""

from __future__ import annotations

from ray_ckpt.checkpoint.listing import CheckpointEntry
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
        passed: those that the nodes did not give back to the present attempt.
    """

    def __init__(self, book: CopyBook) -> None:
        self._book = book
        self.verified: dict[tuple[NodeTier, str], float] = {}
        self.settled: set[str] = set()
        self.forced: set[str] = set()
        self.given_up: set[tuple[Target, str]] = set()
        self.passed: set[str] = set()

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
        self.given_up = {(target, name) for target, name in self.given_up if name in names}
        self.verified = {key: at_s for key, at_s in self.verified.items() if key[1] in names}
