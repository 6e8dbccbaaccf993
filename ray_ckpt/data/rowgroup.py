"""Reads one row group, through what a disk or a network may do meanwhile.

An error that may pass (a server that restarts, a mount that hangs) is tried again a few times. Bytes
that are wrong each time are *damage*, told apart from a file that cannot be reached: only damage may be
replaced by other rows, because only damage is the same for everybody who looks. Page checksums are
verified where the file has them (``jobs/prepare.py`` writes them); without them a flipped bit in
uncompressed pages is a wrong token, and nobody can know.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ray_ckpt.data.index import DataError, DataIndex

logger = logging.getLogger(__name__)

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Waits before an error of the file system is final."""

# A wait does not bring these back.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class DamagedRowGroup(DataError):
    """A row group whose bytes are there and wrong."""


def read_row_group(index: DataIndex, group: int) -> pa.Table:
    """Reads the token column of one row group.

    Args:
        index: the data.
        group: number of the row group over all files.

    Raises:
        DamagedRowGroup: its bytes do not decode, or not to what their checksums say.
        DataError: the file cannot be reached, or is not the one that was indexed.
    """
    path, local = index.locate(group)
    tries = 0
    while True:
        try:
            table = _read(path, local, index.column)
            break
        except (OSError, pa.ArrowException, IndexError) as error:
            # Arrow gives an errno only to errors of the file system; damage is read a second time,
            # because a cache may have handed it out.
            damage = not isinstance(error, OSError) or error.errno is None
            waits = RETRY_WAITS_S[:1] if damage else RETRY_WAITS_S
            if isinstance(error, _FINAL) or tries >= len(waits):
                kind = DamagedRowGroup if damage else DataError
                raise kind(
                    f"{path}: row group {local} cannot be read ({error}). Every row group is needed for the "
                    "global order: restore the file, or prepare the data again."
                    + (" --reading.on-corrupt replace goes on with other rows." if damage else "")
                ) from error
            logger.warning(
                "%s: row group %d: %s; reading again in %.1f s", path, local, error, waits[tries]
            )
            time.sleep(waits[tries])
            tries += 1
    expected = index.rows_in(group)
    if table.num_rows != expected:
        raise DataError(
            f"{path}: row group {local} has {table.num_rows} rows, the index says {expected}. The file "
            "changed after it was indexed: restore it, or prepare the data again."
        )
    return table


def _read(path: str, local: int, column: str) -> pa.Table:
    found = Path(path).stat()
    footer = _footer(path, found.st_size, found.st_mtime_ns)
    with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
        return file.read_row_group(local, columns=[column])


@lru_cache(maxsize=32)
def _footer(path: str, size: int, mtime_ns: int) -> pq.FileMetaData:
    """A footer, parsed once a process: it grows with the row groups, and each of them needs it."""
    return pq.read_metadata(path)
