"""Whose turn it is: calls of a tracker are served one at a time, and what only waits lets the others in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class Turn:
    """A lock that its owner takes as often as it likes, and gives up for as long as it waits for somebody else.

    Whoever gave it up finds the world changed: what it knew of it has to be looked at again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # of the owner, who alone reads and writes it

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        self._lock.release()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Lets others have their turn while the block runs; it must touch nothing that they could change."""
        depth = self._depth
        for _ in range(depth):
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            for _ in range(depth):
                self.__enter__()
