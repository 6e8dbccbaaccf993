"""The data index: what a folder holds is known exactly, or refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ckpt.data.index import (
    INDEX_NAME,
    DataError,
    DataFile,
    DataIndex,
    content_fingerprint,
    load_index,
    write_index,
)

SEQ_LEN = 4
FIXED = pa.list_(pa.uint16(), SEQ_LEN)


def write_parquet(
    path: Path, row_groups: list[int], kind: Any = FIXED, column: str = "tokens"
) -> None:
    """Write a file with exactly these row groups, 0 included."""
    schema = pa.schema([(column, kind)])
    with pq.ParquetWriter(path, schema) as writer:
        for number, rows in enumerate(row_groups):
            values = [[number + i for i in range(SEQ_LEN)] for _ in range(rows)]
            writer.write_table(pa.table({column: pa.array(values, type=kind)}, schema=schema))


def prepared(root: Path) -> DataIndex:
    """A prepared folder: two files and their index."""
    root.mkdir()
    files = []
    for name, row_groups in (("part-00000.parquet", (3, 3)), ("part-00001.parquet", (3, 1))):
        write_parquet(root / name, list(row_groups))
        files.append(DataFile(path=name, row_groups=row_groups))
    index = DataIndex(
        root=str(root),
        files=tuple(files),
        column="tokens",
        seq_len=SEQ_LEN,
        vocab_size=257,
        fingerprint=content_fingerprint(
            seq_len=SEQ_LEN, dtype="uint16", files=files, token_digests=["a", "b"]
        ),
        dtype="uint16",
        tokenizer="byte",
        end_token=256,
        num_documents=5,
        dropped_tokens=2,
    )
    write_index(index)
    return index


def test_a_written_index_is_read_back(tmp_path: Path) -> None:
    index = prepared(tmp_path / "data")
    assert load_index(tmp_path / "data") == index
    assert index.num_rows == 10
    assert index.num_tokens == 40
    record = json.loads((tmp_path / "data" / INDEX_NAME).read_text())
    assert record["num_tokens"] == 40
    assert [file["row_groups"] for file in record["files"]] == [[3, 3], [3, 1]]


def test_a_moved_folder_keeps_its_fingerprint(tmp_path: Path) -> None:
    index = prepared(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = load_index(tmp_path / "moved")
    assert moved.fingerprint == index.fingerprint
    assert moved.locate(0)[0] == str(tmp_path / "moved" / "part-00000.parquet")


def test_locate_skips_empty_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [])
    write_parquet(tmp_path / "b.parquet", [2, 0, 5])
    write_parquet(tmp_path / "c.parquet", [0])
    write_parquet(tmp_path / "d.parquet", [1])
    index = load_index(tmp_path)
    assert index.row_group_sizes.tolist() == [2, 0, 5, 0, 1]
    assert index.row_group_sizes.dtype == np.int64
    located = [index.locate(group) for group in range(5)]
    assert [(Path(path).name, number) for path, number in located] == [
        ("b.parquet", 0),
        ("b.parquet", 1),
        ("b.parquet", 2),
        ("c.parquet", 0),
        ("d.parquet", 0),
    ]
    for group in (5, -1):
        for look in (index.locate, index.rows_in):
            with pytest.raises(IndexError, match=r"not in 0\.\.4"):
                look(group)


def test_a_row_group_is_found_without_counting_through_all(tmp_path: Path) -> None:
    class Unread(tuple[DataFile, ...]):
        """Files that may be picked, not gone through."""

        def __iter__(self) -> NoReturn:
            raise AssertionError("all files were gone through")

    files = tuple(DataFile(path=f"{n}.parquet", row_groups=(2, 0, 5)) for n in range(100))
    index = DataIndex(
        root=str(tmp_path),
        files=files,
        column="tokens",
        seq_len=SEQ_LEN,
        vocab_size=None,
        fingerprint="",
    )
    object.__setattr__(index, "files", Unread(files))
    for number in range(100):
        assert index.locate(3 * number + 2) == (str(tmp_path / f"{number}.parquet"), 2)
        assert [index.rows_in(3 * number + group) for group in range(3)] == [2, 0, 5]
    small = dataclasses.replace(index, files=files[:2])
    again = pickle.loads(pickle.dumps(small))
    assert again == small
    assert again.locate(5) == small.locate(5)


@pytest.mark.parametrize(
    "kind", [FIXED, pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.int8(), SEQ_LEN)]
)
def test_own_parquet_needs_no_index(tmp_path: Path, kind: Any) -> None:
    write_parquet(tmp_path / "a.parquet", [0, 7, 1], kind)
    write_parquet(tmp_path / "b.parquet", [3], kind)
    index = load_index(tmp_path)
    assert (index.seq_len, index.num_rows, index.vocab_size) == (SEQ_LEN, 11, None)
    assert index.dtype == str(kind.value_type)


def test_own_fingerprint_follows_the_content(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [3, 3])
    first = load_index(tmp_path).fingerprint
    assert load_index(tmp_path).fingerprint == first
    write_parquet(tmp_path / "a.parquet", [3, 2, 1])
    second = load_index(tmp_path).fingerprint
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    assert len({first, second, load_index(tmp_path).fingerprint}) == 3


def test_fingerprint_counts_rows_and_their_division() -> None:
    def fingerprint(*row_groups: int, digest: str = "d") -> str:
        files = [DataFile(path="a.parquet", row_groups=row_groups)]
        return content_fingerprint(
            seq_len=SEQ_LEN, dtype="uint16", files=files, token_digests=[digest]
        )

    assert fingerprint(4, 4) == fingerprint(4, 4)
    assert len({fingerprint(4, 4), fingerprint(8), fingerprint(4, 4, digest="e")}) == 3


def test_hidden_files_are_no_data(tmp_path: Path) -> None:
    index = prepared(tmp_path / "data")
    for name in (".part-00002.parquet.crc", "_SUCCESS", ".index.json.tmp"):
        (tmp_path / "data" / name).write_text("x")
    assert load_index(tmp_path / "data") == index


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("name", ["notes.txt", "part-00001.parquet.bak", "folder.parquet"])
def test_foreign_files_are_named(tmp_path: Path, name: str, with_index: bool) -> None:
    prepared(tmp_path / "data")
    if not with_index:
        (tmp_path / "data" / INDEX_NAME).unlink()
    foreign = tmp_path / "data" / name
    if name.startswith("folder"):
        foreign.mkdir()
    else:
        foreign.write_text("x")
    with pytest.raises(DataError, match=rf"foreign (file|folder) '{name}'.*move it away"):
        load_index(tmp_path / "data")


def test_files_that_disagree_with_the_index_are_named(tmp_path: Path) -> None:
    root = tmp_path / "data"
    prepared(root)
    part = root / "part-00001.parquet"
    content = part.read_bytes()

    part.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"part-00001.parquet has \d+ bytes, index.json says"):
        load_index(root)
    part.write_bytes(content[:-4] + b"oops")
    with pytest.raises(DataError, match=r"part-00001.parquet cannot be read as Parquet"):
        load_index(root)
    part.unlink()
    with pytest.raises(DataError, match=r"part-00001.parquet is in index.json but missing"):
        load_index(root)
    part.write_bytes(content)
    (root / "part-00002.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"holds 'part-00002.parquet', which its index.json"):
        load_index(root)


def test_a_file_replaced_by_one_of_the_same_size_is_named(tmp_path: Path) -> None:
    root = tmp_path / "data"
    prepared(root)
    write_parquet(root / "part-00001.parquet", [4])
    record = json.loads((root / INDEX_NAME).read_text())
    record["files"][1]["bytes"] = (root / "part-00001.parquet").stat().st_size
    (root / INDEX_NAME).write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"part-00001.parquet holds 4 rows .* in 1 row groups"):
        load_index(root)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "[]", "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: text.replace('"seq_len": 4', '"seq_len": null'), "cannot be read"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "has schema 99"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    prepared(tmp_path / "data")
    path = tmp_path / "data" / INDEX_NAME
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=rf"data index .*index.json {message}"):
        load_index(tmp_path / "data")


def test_a_missing_or_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_index(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no \*.parquet"):
        load_index(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file, not a folder"):
        load_index(tmp_path / "file")


def test_parquet_without_rows_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [0, 0])
    with pytest.raises(DataError, match="without a single row"):
        load_index(tmp_path)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[1, 2], [3, 4, 5]], pa.list_(pa.int32())),
        ([[1, 2], None], pa.list_(pa.int32())),
        ([[1, 2], None], pa.list_(pa.int32(), 2)),
        ([[], []], pa.list_(pa.int32())),
        ([1, 2], pa.int32()),
        ([[1.0], [2.0]], pa.list_(pa.float32())),
        (["a", "b"], pa.string()),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(tmp_path: Path, values: Any, kind: Any) -> None:
    pq.write_table(pa.table({"tokens": pa.array(values, type=kind)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet.*(length|integer)"):
        load_index(tmp_path)


def test_a_missing_column_and_mixed_lengths_are_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [1], column="input_ids")
    with pytest.raises(DataError, match=r"a.parquet has the columns \['input_ids'\]"):
        load_index(tmp_path)
    write_parquet(tmp_path / "a.parquet", [1])
    pq.write_table(
        pa.table({"tokens": pa.array([[1] * 5], type=pa.list_(pa.uint16(), 5))}),
        tmp_path / "b.parquet",
    )
    with pytest.raises(DataError, match=r"b.parquet has rows of 5"):
        load_index(tmp_path)
