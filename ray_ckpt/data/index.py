"""What the training data is: which Parquet files, how many rows in each row group.

Everything later (who reads which row group, where a sample offset lies) is arithmetic on the row
counts collected here, so seeking costs the same at row 0 and at row 10^10. No token is read: a
prepared folder brings `index.json`, the user's own Parquet is described by its footers, and either
way the cost is one footer a file and one record a row group.

A folder of training data holds `*.parquet` files, perhaps `index.json`, and hidden files (names
that start with `.` or `_`, as in Arrow and Spark). Anything else is refused: a file that nobody
reads, or a half-copied one, would change the data without changing what is trained on.

    index = load_index("/data/stdlib")
    path, row_group = index.locate(17)

Limits: the fingerprint of the user's own Parquet comes from names, sizes and footers, not from the
tokens; a value changed in place that leaves all of these alone goes unseen. That of a prepared
folder comes from every token, but is not computed again on loading.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ray_ckpt.errors import RayCkptError

INDEX_NAME = "index.json"
INDEX_SCHEMA = 1
COLUMN = "tokens"


class DataError(RayCkptError, ValueError):
    """Data or its source cannot be used; the message names the file, the rule and the fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One Parquet file."""

    path: str
    """Name relative to `DataIndex.root`."""
    row_groups: tuple[int, ...]
    """Rows in each row group; may be empty and may contain 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataIndex:
    """All the row groups of a data folder, in the one order that everybody uses."""

    root: str
    """Absolute path of the folder."""
    files: tuple[DataFile, ...]
    """Files in reading order."""
    column: str
    """Name of the column of token ids."""
    seq_len: int
    """Token ids in a row."""
    vocab_size: int | None
    """Token ids are smaller than this; None when nobody recorded it."""
    fingerprint: str
    """Hex digest of the content and of its division into row groups."""
    dtype: str | None = None
    """Integer type of a token id, such as "uint16"; `load_index` always fills it in."""
    tokenizer: str | None = None
    """What made the ids: "byte", or the tokenizer file's name and digest; None when unknown."""
    end_token: int | None = None
    """Id that follows every document; None when unknown."""
    num_documents: int | None = None
    """Documents read by the preparation; None when unknown."""
    dropped_tokens: int = 0
    """Token ids at the very end that did not fill a row and were left out."""
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """For each file, row groups up to its end: looking a group up costs a binary search."""

    def __post_init__(self) -> None:
        ends = itertools.accumulate(len(file.row_groups) for file in self.files)
        object.__setattr__(self, "_ends", tuple(ends))

    @property
    def parts(self) -> tuple[DataIndex]:
        """The index of each source: data that is no mixture is its own only source."""
        return (self,)

    @property
    def num_rows(self) -> int:
        """Rows in all files."""
        return sum(sum(file.row_groups) for file in self.files)

    @property
    def num_tokens(self) -> int:
        """Token ids in all rows."""
        return self.num_rows * self.seq_len

    @property
    def row_group_sizes(self) -> npt.NDArray[np.int64]:
        """Rows of every row group over all files in order: int64[num_groups]."""
        return np.array([rows for file in self.files for rows in file.row_groups], dtype=np.int64)

    def locate(self, group: int) -> tuple[str, int]:
        """Find a row group by its global number.

        Args:
            group: position in `row_group_sizes`.

        Returns:
            Absolute path of the file and number of the row group within it.

        Raises:
            IndexError: there is no such row group.
        """
        number, within = self._place(group)
        return str(Path(self.root) / self.files[number].path), within

    def rows_in(self, group: int) -> int:
        """Rows of one row group, by its global number.

        Raises:
            IndexError: there is no such row group.
        """
        number, within = self._place(group)
        return self.files[number].row_groups[within]

    def _place(self, group: int) -> tuple[int, int]:
        """Number of the file that holds a row group, and of the row group within it."""
        count = self._ends[-1] if self._ends else 0
        if not 0 <= group < count:
            raise IndexError(f"row group {group} of {self.root}: not in 0..{count - 1}")
        # A file without row groups ends where it begins, and so holds none.
        number = bisect_right(self._ends, group)
        return number, group - (self._ends[number] - len(self.files[number].row_groups))


def load_index(folder: str | Path) -> DataIndex:
    """Describe a data folder, from its `index.json` or else from its Parquet footers.

    A user's own Parquet needs no index: a column `tokens` of integer lists is enough. A fixed-size
    list says its length; for a variable list the first row says it, and every row group must then
    hold rows * length values. That finds null, short and long rows, but not two wrong lengths that
    cancel out within one row group: readers must check the batches they get.

    Raises:
        DataError: the folder is missing, holds foreign files, disagrees with its index, or has no
            usable column of token ids.
    """
    root = Path(folder).expanduser().absolute()
    names = _list_folder(root)
    if (root / INDEX_NAME).exists():
        return _read_index(root, names)
    return _index_from_footers(root, names)


def write_index(index: DataIndex) -> None:
    """Write `index.json` into `index.root`, atomically; call it after all files are in place.

    Raises:
        OSError: a file of the index is missing or the folder cannot be written.
    """
    root = Path(index.root)
    record = {
        "schema": INDEX_SCHEMA,
        "column": index.column,
        "seq_len": index.seq_len,
        "dtype": index.dtype,
        "vocab_size": index.vocab_size,
        "tokenizer": index.tokenizer,
        "end_token": index.end_token,
        "num_documents": index.num_documents,
        "num_rows": index.num_rows,
        "num_tokens": index.num_tokens,
        "dropped_tokens": index.dropped_tokens,
        "fingerprint": index.fingerprint,
    }
    files = [
        {
            "path": file.path,
            "bytes": (root / file.path).stat().st_size,
            "row_groups": list(file.row_groups),
        }
        for file in index.files
    ]
    # Hidden name: a leftover of a kill between the two calls is not taken for data.
    temporary = root / f".{INDEX_NAME}.tmp"
    with open(temporary, "w", encoding="utf-8") as stream:
        # A line a field and a line a file: a million row groups stay one readable page.
        head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
        lines = ",\n".join(json.dumps(file) for file in files)
        stream.write("{\n" + ",\n".join(head) + f',\n"files": [\n{lines}\n]\n}}\n')
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(root / INDEX_NAME)
    # Without this the rename itself may be lost with a power cut. Not every file system takes it.
    with contextlib.suppress(OSError):
        descriptor = os.open(root, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def content_fingerprint(
    *, seq_len: int, dtype: str, files: Sequence[DataFile], token_digests: Sequence[str]
) -> str:
    """Digest of prepared data: the tokens and their division into files and row groups.

    The division counts because the order of samples follows from it. File bytes do not count:
    another compression or Parquet version gives the same fingerprint for the same rows.

    Args:
        seq_len: token ids in a row.
        dtype: integer type of a token id.
        files: the files, in order.
        token_digests: for each file the hex digest of its token ids, little-endian, in order.
    """
    parts: list[object] = [INDEX_SCHEMA, seq_len, dtype]
    for file, digest in zip(files, token_digests, strict=True):
        parts += [file.path, *file.row_groups, digest]
    return _digest(parts)


def combined_fingerprint(parts: Iterable[object]) -> str:
    """Digest of several sources of data, from words and numbers that say what each is."""
    return _digest(parts)


def _digest(parts: Iterable[object]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(f"{part}\n".encode())
    return str(digest.hexdigest())


def _list_folder(root: Path) -> list[str]:
    """Sorted names of the Parquet files of a folder that holds nothing foreign."""
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise DataError(
            f"data folder {root} {what}: name a folder of Parquet files, or make one with "
            f"`python jobs/prepare.py --output {root}`"
        )
    names = []
    for entry in sorted(root.iterdir()):
        if entry.name.startswith((".", "_")) or entry.name == INDEX_NAME:
            continue
        if entry.suffix != ".parquet" or not entry.is_file():
            kind = "folder" if entry.is_dir() else "file"
            raise DataError(
                f"data folder {root} holds the foreign {kind} {entry.name!r}: only *.parquet, "
                f"{INDEX_NAME} and hidden files may be there; move it away"
            )
        names.append(entry.name)
    if not names:
        raise DataError(
            f"data folder {root} holds no *.parquet file: make the data with "
            f"`python jobs/prepare.py --output {root}` or name another folder"
        )
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """What one Parquet footer says about the column of token ids."""

    metadata: Any
    dtype: str | None
    """Integer type; None for a file without rows, whose column nobody will read."""
    seq_len: int | None
    """Row length; None when the list is of variable length or the file has no rows."""


def _read_footer(root: Path, name: str, column: str) -> _Footer:
    path = root / name
    try:
        with pq.ParquetFile(path) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"data file {path} cannot be read as Parquet ({error}): it is damaged or was copied "
            "half-way; copy it again, or prepare the data again"
        ) from error
    if metadata.num_rows == 0:
        return _Footer(metadata=metadata, dtype=None, seq_len=None)
    if schema.names.count(column) != 1:
        raise DataError(
            f"data file {path} has the columns {schema.names}: exactly one column {column!r} of "
            "token ids is needed; rename yours"
        )
    kind = schema.field(column).type
    fixed = pa.types.is_fixed_size_list(kind)
    if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
        pa.types.is_integer(kind.value_type)
    ):
        raise DataError(
            f"data file {path}: column {column!r} is {kind}, but each row must be a list of "
            "integer token ids; write it as pyarrow.list_(pyarrow.uint16(), seq_len)"
        )
    return _Footer(
        metadata=metadata,
        dtype=str(kind.value_type),
        seq_len=int(kind.list_size) if fixed else None,
    )


def _first_row_length(path: Path, column: str) -> int:
    """Length of the first row of a file that has rows; decodes one page, not the row group."""
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(batch_size=1, columns=[column]):
            if batch.num_rows:
                return len(batch.column(0)[0].as_py() or ())
    return 0


def _index_from_footers(root: Path, names: list[str]) -> DataIndex:
    """Describe the user's own Parquet; files are taken in the order of their names."""
    seq_len: int | None = None
    dtype: str | None = None
    files: list[DataFile] = []
    parts: list[object] = [COLUMN]
    for name in names:
        path = root / name
        footer = _read_footer(root, name, COLUMN)
        if footer.dtype is not None:
            length = footer.seq_len
            if length is None:
                length = seq_len if seq_len is not None else _first_row_length(path, COLUMN)
            if seq_len is None:
                seq_len, dtype = length, footer.dtype
            if (length, footer.dtype) != (seq_len, dtype) or length < 1:
                raise DataError(
                    f"data file {path} has rows of {length} {footer.dtype} token ids, the files "
                    f"before it {seq_len} {dtype}: all rows must have one length of at least 1 and "
                    "one integer type; pack the documents with jobs/prepare.py"
                )
        row_groups, facts = _row_groups(path, footer, COLUMN, seq_len)
        files.append(DataFile(path=name, row_groups=row_groups))
        parts += [name, path.stat().st_size, footer.dtype, footer.seq_len, *facts]
    if seq_len is None or dtype is None:
        raise DataError(
            f"data folder {root} holds Parquet files without a single row: there is nothing to "
            "train on; name another folder"
        )
    return DataIndex(
        root=str(root),
        files=tuple(files),
        column=COLUMN,
        seq_len=seq_len,
        vocab_size=None,
        fingerprint=_digest(parts),
        dtype=dtype,
    )


def _row_groups(
    path: Path, footer: _Footer, column: str, seq_len: int | None
) -> tuple[tuple[int, ...], list[object]]:
    """Row counts of a file, and what its footer says about the content of each row group."""
    metadata = footer.metadata
    if footer.dtype is None:
        return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)), []
    leaf = next(
        i
        for i in range(metadata.num_columns)
        if metadata.schema.column(i).path.split(".")[0] == column
    )
    row_groups: list[int] = []
    facts: list[object] = []
    for number in range(metadata.num_row_groups):
        rows = metadata.row_group(number).num_rows
        chunk = metadata.row_group(number).column(leaf)
        if rows and chunk.num_values != rows * (seq_len or 0):
            raise DataError(
                f"data file {path}, row group {number}: {rows} rows hold {chunk.num_values} token "
                f"ids, not {seq_len} each: all rows must have one length and none may be null; "
                "pack the documents with jobs/prepare.py"
            )
        row_groups.append(rows)
        facts += [rows, chunk.total_compressed_size, chunk.total_uncompressed_size]
        if chunk.statistics is not None and chunk.statistics.has_min_max:
            facts += [chunk.statistics.min, chunk.statistics.max]
    return tuple(row_groups), facts


def _read_index(root: Path, names: list[str]) -> DataIndex:
    """Read `index.json` and hold every file in the folder against it."""
    path = root / INDEX_NAME
    again = "restore the file, or prepare the data again into an empty folder"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != INDEX_SCHEMA:
            raise DataError(
                f"data index {path} has schema {record['schema']!r}, this version reads "
                f"{INDEX_SCHEMA}: use the version that wrote it, or prepare the data again"
            )
        sizes = {str(file["path"]): int(file["bytes"]) for file in record["files"]}
        index = DataIndex(
            root=str(root),
            files=tuple(
                DataFile(path=str(f["path"]), row_groups=tuple(int(n) for n in f["row_groups"]))
                for f in record["files"]
            ),
            column=str(record["column"]),
            seq_len=int(record["seq_len"]),
            vocab_size=record["vocab_size"],
            fingerprint=str(record["fingerprint"]),
            dtype=str(record["dtype"]),
            tokenizer=record["tokenizer"],
            end_token=record["end_token"],
            num_documents=record["num_documents"],
            dropped_tokens=int(record["dropped_tokens"]),
        )
    except DataError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"data index {path} cannot be read ({type(error).__name__}: {error}): {again}"
        ) from error
    for name in sizes:
        if name not in names:
            raise DataError(f"data file {root / name} is in {INDEX_NAME} but missing: {again}")
    for name in names:
        if name not in sizes:
            raise DataError(
                f"data folder {root} holds {name!r}, which its {INDEX_NAME} does not know: move it "
                f"away, or remove {INDEX_NAME} to use all Parquet files of the folder"
            )
    for file in index.files:
        _check_file(index, file, sizes[file.path], again)
    return index


def _check_file(index: DataIndex, file: DataFile, size: int, again: str) -> None:
    """Hold one file against the index: size, schema and row counts, from its footer alone."""
    path = Path(index.root) / file.path
    found = path.stat().st_size
    if found != size:
        raise DataError(f"data file {path} has {found} bytes, {INDEX_NAME} says {size}: {again}")
    footer = _read_footer(Path(index.root), file.path, index.column)
    metadata = footer.metadata
    same_rows = (metadata.num_row_groups, metadata.num_rows) == (
        len(file.row_groups),
        sum(file.row_groups),
    )
    if not same_rows or (
        footer.dtype is not None and (footer.dtype, footer.seq_len) != (index.dtype, index.seq_len)
    ):
        raise DataError(
            f"data file {path} holds {metadata.num_rows} rows of {footer.seq_len} {footer.dtype} "
            f"in {metadata.num_row_groups} row groups, {INDEX_NAME} says {sum(file.row_groups)} "
            f"rows of {index.seq_len} {index.dtype} in {len(file.row_groups)}: {again}"
        )
