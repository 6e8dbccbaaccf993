"""How well the global order shuffles, measured against a full random permutation.

    python -m ray_ckpt.data.quality          prints the table that `order.py` states

Three figures of one epoch, all of them about what training sees:

- *rank correlation* (Spearman 1904) of position and row id: 0 when the epoch does not drift through
  the data, 1 when it goes through it in file order;
- *neighbour distance*: mean distance of the row ids at successive positions, as a share of the
  rows: 1/3 when they have nothing to do with each other;
- *same group*: how often two samples of one global batch come from one row group, which is how
  often they may come from one document or one day.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_ckpt.data.order import GlobalOrder, Int64s


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleQuality:
    """Figures of one order of an epoch."""

    rank_correlation: float
    """Of position and row id, -1 to 1."""
    neighbour_distance: float
    """Mean, as a share of the number of rows."""
    same_group: float
    """Probability that two samples of a global batch are of one row group."""


def epoch_rows(order: GlobalOrder, epoch: int) -> Int64s:
    """Row ids of an epoch in the order of training: int64 [steps_per_epoch * global_batch]."""
    per_epoch = order.steps_per_epoch * order.global_batch
    rows = np.empty(per_epoch, dtype=np.int64)
    for stream in range(order.num_streams):
        offset = 0
        while offset < order.stream_rows:
            span = order.span_at(epoch, stream, offset)
            rows[order.positions(span) - epoch * per_epoch] = order.span_rows(span)[1]
            offset += span.num_rows
    return rows


def measure(
    rows: npt.NDArray[np.int64], row_group_sizes: npt.NDArray[np.int64], global_batch: int
) -> ShuffleQuality:
    """The figures of an order.

    Args:
        rows: int64 [n], row ids in the order of training; n a multiple of ``global_batch``.
        row_group_sizes: int64 [groups], rows of each row group in file order.
        global_batch: samples of a step, at least 2.
    """
    ranks = np.argsort(np.argsort(rows))
    groups = np.searchsorted(np.cumsum(row_group_sizes), rows, side="right")
    batches = np.sort(groups.reshape(-1, global_batch), axis=1)
    return ShuffleQuality(
        rank_correlation=float(np.corrcoef(np.arange(len(rows)), ranks)[0, 1]),
        neighbour_distance=float(np.abs(np.diff(rows)).mean() / row_group_sizes.sum()),
        same_group=_pairs_alike(batches),
    )


def _pairs_alike(batches: npt.NDArray[np.int64]) -> float:
    """Share of the pairs of equal values within sorted rows: int64 [batches, batch]."""
    num_batches, batch = batches.shape
    new = np.ones(batches.shape, dtype=bool)
    new[:, 1:] = batches[:, 1:] != batches[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(new.ravel()), batches.size))
    return float((runs * (runs - 1)).sum() / (num_batches * batch * (batch - 1)))


def table(
    windows: tuple[int, ...] = (1, 4, 16, 64), groups: int = 1000, group_rows: int = 1000
) -> list[tuple[str, ShuffleQuality]]:
    """Figures of one epoch for some windows, and of a full random permutation of the same rows."""
    sizes = np.full(groups, group_rows, dtype=np.int64)
    found = []
    for window in windows:
        order = GlobalOrder(
            row_group_sizes=sizes, global_batch=96, micro_batch=8, window_groups=window
        )
        found.append((f"window {window}", measure(epoch_rows(order, 0), sizes, 96)))
    used = sizes.sum() // 96 * 96
    rows = np.random.default_rng(0).permutation(sizes.sum())[:used]
    return [*found, ("random", measure(rows, sizes, 96))]


def main() -> None:
    """Prints the table."""
    print(f"{'':10}  rank correlation  neighbour distance  same group")
    for name, q in table():
        print(
            f"{name:10}  {q.rank_correlation:16.4f}  {q.neighbour_distance:18.4f}  {q.same_group:10.4f}"
        )


if __name__ == "__main__":
    main()
