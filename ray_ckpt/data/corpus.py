"""Which files hold the text, and the documents in them.

    .txt .md .rst .py   one document each, UTF-8 (.py: the encoding that the file declares)
    .jsonl              one document a line, in the field `text`
    .parquet            one document a row, in the column `text`
    .gz                 any of these, compressed

Order is part of the result: inputs as they were named, the files of a folder by their path. Input
that a user names is read strictly: a file that cannot be read, decoded or parsed ends the
preparation with its name (and line), because text lost without a word is data nobody can explain
later. Only the default corpus, the running Python's standard library, may skip files (counted).

Limits: text files and .parquet.gz are read whole, and one file is read by one task, so a corpus in
a single huge file is read by one core.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_ckpt.data.index import DataError

TEXT_ENDINGS = (".md", ".py", ".rst", ".txt")
ENDINGS = (*TEXT_ENDINGS, ".jsonl", ".parquet")
FIELD = "text"


class UndecodableText(DataError):
    """A text file that does not decode; the default corpus leaves such a file out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of text."""

    path: str
    """Absolute path."""
    ending: str
    """One of `ENDINGS`, without ".gz"."""
    num_bytes: int
    """Size on disk."""
    strict: bool = True
    """False: a file that does not decode is left out and counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The files of a preparation in reading order, and how many were passed over, by reason."""

    sources: tuple[Source, ...]
    passed_over: dict[str, int]


def ending_of(path: Path) -> str | None:
    """The kind of a file by its name, without ".gz"; None when it is not one of `ENDINGS`."""
    name = path.name.lower().removesuffix(".gz")
    return next((ending for ending in ENDINGS if name.endswith(ending)), None)


def list_corpus(inputs: Sequence[str]) -> Corpus:
    """List the files of the inputs: as named, a folder's files by path.

    In a folder, hidden files and `__pycache__` are left out, and files of another kind are passed
    over and counted; a file that is named itself must be of a known kind.

    Raises:
        DataError: an input is missing, of an unknown kind, or cannot be listed; or nothing is left.
    """
    sources: dict[str, Source] = {}
    passed_over: Counter[str] = Counter()
    for name in inputs:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            found = _walk(path)
        elif path.is_file():
            found = [path]
            if ending_of(path) is None:
                raise DataError(
                    f"--input {path} is of an unknown kind: {', '.join(ENDINGS)} and .gz of these "
                    "are read; rename or convert it"
                )
        else:
            raise DataError(f"--input {path} does not exist: name a file or a folder of text")
        for file in found:
            ending = ending_of(file)
            if ending is None:
                passed_over[f"kind {file.suffix or 'without ending'}"] += 1
            elif str(file) in sources:
                passed_over["named twice"] += 1
            else:
                size = file.stat().st_size
                sources[str(file)] = Source(path=str(file), ending=ending, num_bytes=size)
    if not sources:
        raise DataError(
            f"--input {' '.join(inputs)} holds no file of text: {', '.join(ENDINGS)} and .gz of "
            "these are read"
        )
    return Corpus(sources=tuple(sources.values()), passed_over=dict(passed_over))


def standard_library() -> Corpus:
    """The source and text files of the running Python's standard library, without its tests.

    Raises:
        DataError: this Python comes without source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    found = _walk(root, left_out) if root.is_dir() else []
    files = [file for file in found if file.suffix in TEXT_ENDINGS]
    if not files:
        raise DataError(
            f"the standard library in {root} holds no source files: name your own text by --input"
        )
    return Corpus(
        sources=tuple(
            Source(path=str(file), ending=file.suffix, num_bytes=file.stat().st_size, strict=False)
            for file in files
        ),
        passed_over={},
    )


def _walk(folder: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Regular files under a folder sorted by path; links are followed, each folder visited once."""

    def refuse(error: OSError) -> None:
        raise DataError(f"--input {error.filename} cannot be listed ({error.strerror})") from error

    files: list[Path] = []
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            # A link to a folder above would otherwise never end.
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and name != "__pycache__" and name not in left_out
        ]
        files += [Path(place) / name for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)


def read_documents(source: Source) -> Iterator[str]:
    """Read the documents of one file, in their order; empty ones too.

    Raises:
        DataError: the file cannot be read, decompressed, decoded or parsed; the message names the
            file, and the line or row where there is one.
    """
    try:
        if source.ending == ".jsonl":
            yield from _jsonl_documents(source)
        elif source.ending == ".parquet":
            yield from _parquet_documents(source)
        else:
            yield _text_document(source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"input {source.path} is not a whole gzip file ({error}): copy or compress it again"
        ) from error
    except pa.ArrowException as error:
        raise DataError(
            f"input {source.path} cannot be read as Parquet ({error}): copy or write it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"input {source.path} cannot be read ({error.strerror or error}): it must be readable "
            "under this path on every node"
        ) from error


def _open(source: Source) -> IO[bytes] | gzip.GzipFile:
    if source.path.lower().endswith(".gz"):
        return gzip.open(source.path, "rb")
    return open(source.path, "rb")


def _text_document(source: Source) -> str:
    with _open(source) as stream:
        content = stream.read()
    encoding = "utf-8-sig"
    try:
        if source.ending == ".py":
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise UndecodableText(
            f"input {source.path} is not text in {encoding} ({error}): convert it, for example "
            "with `iconv -t UTF-8`"
        ) from error


def _jsonl_documents(source: Source) -> Iterator[str]:
    with _open(source) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"input {source.path}, line {number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8 ({error}): convert the file") from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where} is not JSON ({error}): each line must be one JSON object"
                ) from error
            text = record.get(FIELD) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise DataError(
                    f"{where} has no text in the field {FIELD!r}: each line must be a JSON object "
                    f'such as {{"{FIELD}": "..."}}'
                )
            yield text


def _parquet_documents(source: Source) -> Iterator[str]:
    with _open(source) as stream:
        # Parquet is read from its end; a compressed stream cannot be, so it is unpacked in memory.
        seekable: Any = stream
        if source.path.lower().endswith(".gz"):
            seekable = io.BytesIO(stream.read())
        with pq.ParquetFile(seekable) as parquet:
            names = parquet.schema_arrow.names
            kind = parquet.schema_arrow.field(FIELD).type if names.count(FIELD) == 1 else None
            if kind is not None and pa.types.is_dictionary(kind):
                kind = kind.value_type
            if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(
                    f"input {source.path} has the columns {names}: one column {FIELD!r} of strings "
                    "is needed; rename or convert yours"
                )
            row = 0
            for batch in parquet.iter_batches(batch_size=1024, columns=[FIELD]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        raise DataError(
                            f"input {source.path}, row {row} has null in the column {FIELD!r}: "
                            "each row must hold text; filter the file"
                        )
                    row += 1
                    yield text
