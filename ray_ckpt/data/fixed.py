"""A few rows of the data that are always the same: those that a checkpoint is measured on.

They depend on (data, seed) alone: not on the world size, the batch, the segment or how far the run is. Source by
source, row groups are taken in an order drawn from the seed, and of each the rows in an order drawn again; a mixture
gives its sources a row in turn. So a handful of rows costs one row group of each source.

They are rows of the training data, and are trained on like all others: a loss on them tells whether two states are
the same, and says nothing about text that the model has not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from ray_ckpt.data.catalog import Index
from ray_ckpt.data.index import DataError, DataIndex
from ray_ckpt.data.permute import mix, permute
from ray_ckpt.data.reader import OnCorrupt, token_matrix
from ray_ckpt.data.rowgroup import DamagedRowGroup, read_row_group

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]

_FIXED = 8  # the purpose of a draw, as those in order.py, reader.py, mixture.py and facts.py


def fixed_rows(index: Index, seed: int, count: int, on_corrupt: OnCorrupt = "fatal") -> Tokens:
    """Tokens of the fixed rows: int64 [count, seq_len], fewer where the data has fewer rows.

    Args:
        index: the data.
        seed: of the run.
        count: how many rows.
        on_corrupt: "replace" passes over damaged row groups, and the rows are then others than before.

    Raises:
        DataError: a row group that cannot be read.
    """
    sources = [
        _rows(part, mix(seed, number, _FIXED), on_corrupt)
        for number, part in enumerate(index.parts)
    ]
    rows: list[Tokens] = []
    while sources and len(rows) < count:
        for source in list(sources):
            row = next(source, None)
            if row is None:
                sources.remove(source)
            elif len(rows) < count:
                rows.append(row)
    if not rows:
        raise DataError("the data has no row that can be read: prepare it again.")
    return np.stack(rows)


def token_digest(tokens: Tokens) -> str:
    """xxh3_128 of rows of tokens, 32 hex digits; the same on every machine."""
    plain = np.ascontiguousarray(tokens, dtype="<i8")
    head = np.asarray(plain.shape, dtype="<i8").tobytes()
    return str(xxhash.xxh3_128_hexdigest(head + plain.tobytes()))


def _rows(index: DataIndex, key: int, on_corrupt: OnCorrupt) -> Iterator[Tokens]:
    sizes = index.row_group_sizes
    for group in permute(np.arange(len(sizes)), len(sizes), key).tolist():
        size = int(sizes[group])
        if not size:
            continue
        try:
            table = read_row_group(index, group)
        except DamagedRowGroup as error:
            if on_corrupt == "fatal":
                raise
            logger.warning("%s The fixed rows are taken from others.", error)
            continue
        tokens = token_matrix(table.column(0), index.seq_len)
        for row in permute(np.arange(size), size, mix(key, group)).tolist():
            yield tokens[row].astype(np.int64)
