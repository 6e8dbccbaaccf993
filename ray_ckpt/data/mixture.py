"""The global order of several sources that are mixed by weight.

Every stream is mixed in itself. In each block of ``sum(weights)`` consecutive rows of a stream exactly
``weight`` rows come from each source, in an arrangement drawn from (seed, stream, block). Inside, a
source has an order of its own: a :class:`~ray_ckpt.data.order.GlobalOrder` of ``V`` streams over its rows
alone, of which stream ``j`` of the mixture reads stream ``j``. So

- the source of a position is arithmetic: the same for any world, after any interruption;
- a source that is used up begins its next epoch, whatever the others do: sources of different size wrap
  at different times, and each leaves out ``rows mod V`` rows of every epoch;
- a rank still reads nothing but the streams of its micro-batches.

The price: a rank holds one window for each of its streams *and sources*, and an arrangement is drawn for
every block, so small weights (7 and 3, not 700 and 300) mix more evenly and cost less.

A row of source ``i`` has the id ``(i << 48) + row``: sources do not share ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ray_ckpt.data.order import GlobalOrder, Int64s
from ray_ckpt.data.permute import draws, mix
from ray_ckpt.data.plan import check_batch
from ray_ckpt.errors import ConfigError

MAX_WEIGHTS = 10_000
"""Largest sum of weights: a block is as long, and one is arranged for every look-up."""

CELLS = 1 << 20
"""Rows arranged at a time: bounds the memory of a source of small weight."""

_ARRANGE, _PART = 5, 6  # the purposes of draws, as those in order.py and reader.py


@dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """The order of weighted sources for one (seed, global batch, micro-batch, window).

    Attributes:
        parts: the order of each source: ``V`` streams of micro-batches of one row.
        weights: rows of each source in a block; at least 1 each.
        global_batch: samples per optimizer step.
        micro_batch: samples per stream and step.
        seed: names the arrangements.
    """

    parts: tuple[GlobalOrder, ...]
    weights: tuple[int, ...]
    global_batch: int
    micro_batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_batch(self.global_batch, self.micro_batch)
        assert len(self.parts) == len(self.weights)
        assert all(part.num_streams == self.num_streams for part in self.parts)

    @property
    def num_streams(self) -> int:
        """V: streams, which is micro-batches of a global batch."""
        return self.global_batch // self.micro_batch

    @cached_property
    def block_rows(self) -> int:
        """Rows of a block, in which the proportions are exact."""
        return sum(self.weights)

    @cached_property
    def _items(self) -> Int64s:
        return np.repeat(np.arange(len(self.weights), dtype=np.int64), self.weights)

    def epoch_steps(self, source: int) -> float:
        """Steps in which a source is used up once."""
        rows = self.parts[source].stream_rows
        return rows * self.block_rows / self.weights[source] / self.micro_batch

    def without_caches(self) -> MixedOrder:
        """The same order, small enough to travel."""
        return replace(self, parts=tuple(part.without_caches() for part in self.parts))

    # ---- who comes when ------------------------------------------------------------------------

    def arrangement(self, stream: int, low: int, high: int) -> Int64s:
        """Sources of the rows of the blocks ``[low, high)`` of a stream: int64 [high - low, block_rows]."""
        rows = np.arange(low * self.block_rows, high * self.block_rows, dtype=np.uint64)
        order = draws(rows, mix(self.seed, stream, _ARRANGE)).reshape(-1, self.block_rows)
        found: Int64s = self._items[np.argsort(order, axis=1, kind="stable")]
        return found

    def sources_of(self, stream: int, low: int, high: int) -> Int64s:
        """Sources of the rows ``[low, high)`` of a stream, counted since the run began."""
        first = low // self.block_rows
        blocks = self.arrangement(stream, first, -(-high // self.block_rows))
        return blocks.ravel()[low - first * self.block_rows :][: high - low]

    def rows_before(self, stream: int, row: int) -> list[int]:
        """Rows of each source among the first ``row`` rows of a stream."""
        block, rest = divmod(row, self.block_rows)
        inside = self.sources_of(stream, row - rest, row)
        counts = np.bincount(inside, minlength=len(self.weights))
        return [block * w + n for w, n in zip(self.weights, counts.tolist(), strict=True)]

    def stream_places(self, stream: int, source: int, low: int, high: int) -> Int64s:
        """Rows of a stream (since the run began) that take the rows ``[low, high)`` of a source's stream."""
        weight = self.weights[source]
        first, last = low // weight, -(-high // weight)
        at_a_time = max(1, CELLS // self.block_rows)
        found = [np.empty(0, dtype=np.int64)]
        for block in range(first, last, at_a_time):
            sources = self.arrangement(stream, block, min(block + at_a_time, last))
            found.append(block * self.block_rows + np.flatnonzero(sources.ravel() == source))
        return np.concatenate(found)[low - first * weight :][: high - low]

    def source_at(self, position: int) -> tuple[int, int, int]:
        """(source, stream, row of the source's stream since the run began) at a global position."""
        step, in_batch = divmod(position, self.global_batch)
        stream, rest = divmod(in_batch, self.micro_batch)
        row = step * self.micro_batch + rest
        source = int(self.sources_of(stream, row, row + 1)[0])
        return source, stream, self.rows_before(stream, row)[source]

    def epoch_at(self, position: int) -> int:
        """Epoch, of its source, that the sample at a global position is of."""
        source, _, row = self.source_at(position)
        return row // self.parts[source].stream_rows

    def rows_at(self, positions: npt.ArrayLike) -> Int64s:
        """Row ids of global positions; see :meth:`GlobalOrder.rows_at`."""
        wanted = np.asarray(positions, dtype=np.int64)
        out = np.empty(wanted.shape, dtype=np.int64)
        for i, position in enumerate(wanted.ravel().tolist()):
            source, stream, row = self.source_at(position)
            part = self.parts[source]
            own = part.rows_at([row * part.global_batch + stream])
            out.flat[i] = row_ids(source, own)[0]
        return out


Order = GlobalOrder | MixedOrder

_SOURCE_BIT = 48


def row_ids(source: int, rows: Int64s) -> Int64s:
    """Row ids of a source as ids of the whole mixture."""
    return rows + (source << _SOURCE_BIT)


def split_ids(ids: Int64s) -> tuple[Int64s, Int64s]:
    """(source, row of the source) of row ids of a mixture."""
    return ids >> _SOURCE_BIT, ids & ((1 << _SOURCE_BIT) - 1)


def mixed_order(
    sizes: Sequence[Int64s],
    *,
    names: Sequence[str],
    weights: Sequence[int],
    global_batch: int,
    micro_batch: int,
    seed: int = 0,
    window_groups: int = 4,
) -> MixedOrder:
    """The order of a mixture.

    Args:
        sizes: of each source, the rows of every row group.
        names: of the sources, for what is said about them.
        weights: of the sources.
        global_batch: samples per optimizer step.
        micro_batch: samples per stream and step.
        seed: names the order; each source's own order has a seed drawn from it.
        window_groups: row groups of a source that are shuffled together.

    Raises:
        ConfigError: a source with less than one row for each stream.
    """
    check_batch(global_batch, micro_batch)
    streams = global_batch // micro_batch
    parts = []
    for number, (name, rows) in enumerate(zip(names, sizes, strict=True)):
        if rows.sum() < streams:
            raise ConfigError(
                f"--data {name}=...: the source has {rows.sum()} rows, less than one for each of the "
                f"{streams} micro-batches of a global batch. Use more data, fewer micro-batches, or leave "
                "the source out."
            )
        parts.append(
            GlobalOrder(
                row_group_sizes=rows,
                global_batch=streams,
                micro_batch=1,
                seed=mix(seed, number, _PART),
                window_groups=window_groups,
            )
        )
    return MixedOrder(
        parts=tuple(parts),
        weights=tuple(weights),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
    )
