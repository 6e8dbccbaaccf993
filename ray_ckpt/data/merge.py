"""Rows of one stream, from the blocks of its sources to the order of the mixture."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_ckpt.data.mixture import MixedOrder

Arrays = dict[str, npt.NDArray[Any]]


class Rows:
    """A queue of rows, of blocks as they came."""

    def __init__(self) -> None:
        self._blocks: deque[Arrays] = deque()
        self.held = 0

    def push(self, arrays: Arrays, count: int) -> None:
        """Appends a block of ``count`` rows."""
        self._blocks.append(arrays)
        self.held += count

    def take(self, count: int) -> Arrays:
        """Takes ``count`` rows, which must be there, from the front."""
        self.held -= count
        parts: list[Arrays] = []
        while count:
            block = self._blocks[0]
            length = len(next(iter(block.values())))
            if length > count:
                parts.append({name: values[:count] for name, values in block.items()})
                self._blocks[0] = {name: values[count:] for name, values in block.items()}
                break
            parts.append(self._blocks.popleft())
            count -= length
        return join(parts)


def join(parts: Sequence[Arrays]) -> Arrays:
    """One block after the other; columns that some do not have are left out."""
    if len(parts) == 1:
        return parts[0]
    names = set(parts[0]).intersection(*parts[1:])
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


class Merge:
    """Puts the rows of a stream's sources where the arrangement says, as soon as they are there.

    It looks at no position: whether the rows are the right ones is checked behind it, on what comes out.

    Args:
        order: of the mixture.
        stream: number.
        row: the first row to come out, counted in the stream since the run began.
    """

    def __init__(self, order: MixedOrder, stream: int, row: int) -> None:
        self._order, self._stream, self._row = order, stream, row
        self._queues = [Rows() for _ in order.parts]

    def push(self, source: int, arrays: Arrays, count: int) -> None:
        """Takes the next rows of a source."""
        self._queues[source].push(arrays, count)

    def pull(self) -> Iterator[Arrays]:
        """The next rows of the stream, as many as can come out: at most one block."""
        sources = self._coming()
        if not len(sources):
            return
        self._row += len(sources)
        counts = np.bincount(sources, minlength=len(self._queues)).tolist()
        pairs = zip(self._queues, counts, strict=True)
        one_by_one = join([queue.take(count) for queue, count in pairs if count])
        at = np.empty(len(sources), dtype=np.int64)
        at[np.argsort(sources, kind="stable")] = np.arange(len(sources))
        yield {name: values[at] for name, values in one_by_one.items()}

    def _coming(self) -> npt.NDArray[np.int64]:
        """Sources of the next rows, up to the first whose source has no more."""
        order, weights = self._order, self._order.weights
        pairs = list(zip(self._queues, weights, strict=True))
        # Two blocks more than the scarcest source fills: it may be cut at both ends.
        blocks = min(queue.held // weight for queue, weight in pairs) + 2
        sources = order.sources_of(self._stream, self._row, self._row + blocks * order.block_rows)
        end = len(sources)
        for number, (queue, _) in enumerate(pairs):
            places = np.flatnonzero(sources[:end] == number)
            if len(places) > queue.held:
                end = int(places[queue.held])
        return sources[:end]
