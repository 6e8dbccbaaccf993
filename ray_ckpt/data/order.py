"""The one global order of samples: which row is trained at position ``p``.

The order depends on the data, the seed and ``p``; not on the number of workers, and not on how often
the run was interrupted. It is made in four steps, each of them arithmetic:

1. **Row groups** of all files are put in a pseudo-random order drawn from (seed, epoch). Laid end to
   end they are the *permuted row space* of the epoch.
2. The last ``rows mod G`` rows do not fill a global batch. They are left out, on both sides of the
   space by a split drawn from (seed, epoch), so that each epoch leaves out others.
3. ``V`` **streams**, one per micro-batch of the global batch, own equal spans of what remains. The
   ``s``-th micro-batch of stream ``j`` is micro-batch ``j`` of the ``s``-th global batch. So a rank that
   holds micro-batch ``j`` reads stream ``j`` and nothing else, and a row group belongs to one stream
   (or to two neighbours, where a span ends inside it).
4. Inside a stream rows are shuffled in **windows** of ``window_groups`` successive row groups.

What that is worth, on 1000 row groups of 1000 rows, 12 streams of micro-batches of 8
(``python -m ray_ckpt.data.quality`` measures it and says what the figures mean):

    ==============  ================  ==================  ==========
    window_groups   rank correlation  neighbour distance  same group
    ==============  ================  ==================  ==========
    1                          0.020               0.043       0.073
    4 (default)                0.020               0.256       0.019
    16                         0.025               0.311       0.005
    64                         0.011               0.325       0.002
    random order               0.000               0.333       0.001
    ==============  ================  ==================  ==========

The row groups are in random order over the epoch, so nothing drifts at any window (three standard
errors of 1000 random places are a correlation of 0.09). Inside a stream the shuffle is not uniform: a
row travels at most one window away from its row group's neighbours, and two samples of one batch are
of one row group with probability about ``b / (G window_groups)``, if that is more than a random
order's ``1 / groups``. The price of a larger window is memory and the first batch: a rank holds one window for each
of its streams, ``window_groups * rows in a group * bytes in a row``, and reads that much before its
first step.

Looking up a position costs a binary search among row groups; nothing has the length of the data set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ray_ckpt.data.permute import mix, permute
from ray_ckpt.data.plan import check_batch
from ray_ckpt.errors import ConfigError

Int64s = npt.NDArray[np.int64]

# One number per purpose, so that two draws from the same (seed, epoch) have nothing in common.
_GROUPS, _TAIL, _WINDOW = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class EpochLayout:
    """The permuted row space of one epoch.

    Attributes:
        groups: int64 [num_groups], row group at each place of the order.
        starts: int64 [num_groups + 1], first permuted row of each place; the last is the row count.
        first: first permuted row in use; what is before it is left out this epoch.
    """

    groups: Int64s
    starts: Int64s
    first: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive rows of one stream inside one window: the unit of reading.

    Attributes:
        epoch: epoch number.
        stream: stream (micro-batch) number.
        low: first permuted row of the window's part that belongs to the stream.
        high: one past the last.
        offset: place of the window's first row in the stream (rows since the stream's start).
    """

    epoch: int
    stream: int
    low: int
    high: int
    offset: int

    @property
    def num_rows(self) -> int:
        """Rows of the window that belong to the stream."""
        return self.high - self.low


@dataclass(frozen=True, kw_only=True)
class GlobalOrder:
    """The order of one data set for one (seed, global batch, micro-batch, window).

    Attributes:
        row_group_sizes: rows of every row group, in file order.
        global_batch: samples per optimizer step.
        micro_batch: samples per stream and step.
        seed: names the order.
        window_groups: row groups shuffled together; 1 shuffles inside row groups only.
    """

    row_group_sizes: Int64s
    global_batch: int
    micro_batch: int
    seed: int = 0
    window_groups: int = 4
    _layouts: dict[int, EpochLayout] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_batch(self.global_batch, self.micro_batch)
        if self.window_groups < 1:
            raise ConfigError("data.window-groups must be at least 1 row group")
        if self.num_rows < self.global_batch:
            raise ConfigError(
                f"the data has {self.num_rows} rows, less than one global batch of "
                f"{self.global_batch}. Use more data, or a smaller --global-batch."
            )

    @cached_property
    def num_rows(self) -> int:
        """Rows of the data set."""
        return int(self.row_group_sizes.sum())

    @cached_property
    def group_starts(self) -> Int64s:
        """int64 [num_groups + 1]: first row id of each row group, in file order."""
        return np.concatenate([[0], np.cumsum(self.row_group_sizes)]).astype(np.int64)

    @property
    def num_streams(self) -> int:
        """V: streams, which is micro-batches of a global batch."""
        return self.global_batch // self.micro_batch

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return self.num_rows // self.global_batch

    @property
    def dropped_rows(self) -> int:
        """Rows left out of every epoch, other ones each time: ``rows mod G``."""
        return self.num_rows % self.global_batch

    @property
    def stream_rows(self) -> int:
        """Rows of one stream in one epoch."""
        return self.steps_per_epoch * self.micro_batch

    @property
    def parts(self) -> tuple[GlobalOrder]:
        """The order of each source: data that is no mixture is its own only source."""
        return (self,)

    def without_caches(self) -> GlobalOrder:
        """The same order, small enough to travel."""
        return replace(self, _layouts={})

    def rows_before(self, stream: int, row: int) -> list[int]:
        """Rows of each source among the first ``row`` rows of a stream."""
        return [row]

    def stream_places(self, stream: int, source: int, low: int, high: int) -> Int64s:
        """Rows of a stream (since the run began) that take the rows ``[low, high)`` of a source's stream."""
        return np.arange(low, high, dtype=np.int64)

    def epoch_at(self, position: int) -> int:
        """Epoch of the sample at a global position."""
        return position // (self.steps_per_epoch * self.global_batch)

    def layout(self, epoch: int) -> EpochLayout:
        """The permuted row space of an epoch; the last two epochs asked for are kept."""
        found = self._layouts.get(epoch)
        if found is None:
            count = len(self.row_group_sizes)
            groups = permute(np.arange(count), count, mix(self.seed, epoch, _GROUPS))
            starts = np.zeros(count + 1, dtype=np.int64)
            np.cumsum(self.row_group_sizes[groups], out=starts[1:])
            first = mix(self.seed, epoch, _TAIL) % (self.dropped_rows + 1)
            found = EpochLayout(groups=groups, starts=starts, first=first)
            while len(self._layouts) >= 2:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[epoch] = found
        return found

    def span_at(self, epoch: int, stream: int, offset: int) -> Span:
        """The span that holds row ``offset`` of a stream."""
        layout = self.layout(epoch)
        stream_low = layout.first + stream * self.stream_rows
        row = stream_low + offset
        # side="right" skips empty row groups that start at the same row.
        place = int(np.searchsorted(layout.starts, row, side="right")) - 1
        window = place // self.window_groups
        last = min((window + 1) * self.window_groups, len(layout.groups))
        low = max(int(layout.starts[window * self.window_groups]), stream_low)
        high = min(int(layout.starts[last]), stream_low + self.stream_rows)
        return Span(epoch=epoch, stream=stream, low=low, high=high, offset=low - stream_low)

    def span_rows(self, span: Span) -> tuple[Int64s, Int64s]:
        """Rows of a span in training order.

        Returns:
            ``(permuted, row_ids)``, int64 [span.num_rows] each: place in the permuted row space, and
            row id (rows counted through all files in order).
        """
        layout = self.layout(span.epoch)
        key = mix(self.seed, span.epoch, _WINDOW, span.low)
        permuted = span.low + permute(np.arange(span.num_rows), span.num_rows, key)
        return permuted, self._row_ids(layout, permuted)

    def _row_ids(self, layout: EpochLayout, permuted: Int64s) -> Int64s:
        place = np.searchsorted(layout.starts, permuted, side="right") - 1
        within = permuted - layout.starts[place]
        ids: Int64s = self.group_starts[layout.groups[place]] + within
        return ids

    def rows_at(self, positions: npt.ArrayLike) -> Int64s:
        """Row ids of global positions (samples trained since the run began).

        Args:
            positions: int64 [n], each at least 0; any epoch.

        Returns:
            int64 [n]: row ids, counted through all files in order.
        """
        wanted = np.asarray(positions, dtype=np.int64)
        out = np.empty(wanted.shape, dtype=np.int64)
        per_epoch = self.steps_per_epoch * self.global_batch
        for i, position in enumerate(wanted.tolist()):
            epoch, rest = divmod(position, per_epoch)
            step, in_batch = divmod(rest, self.global_batch)
            stream, k = divmod(in_batch, self.micro_batch)
            offset = step * self.micro_batch + k
            span = self.span_at(epoch, stream, offset)
            key = mix(self.seed, epoch, _WINDOW, span.low)
            permuted = span.low + permute([offset - span.offset], span.num_rows, key)
            out[i] = self._row_ids(self.layout(epoch), permuted)[0]
        return out

    def positions(self, span: Span) -> Int64s:
        """Global positions of the rows of a span, in the order of :meth:`span_rows`."""
        offsets = span.offset + np.arange(span.num_rows, dtype=np.int64)
        step = span.epoch * self.steps_per_epoch + offsets // self.micro_batch
        return (
            step * self.global_batch + span.stream * self.micro_batch + offsets % self.micro_batch
        )
