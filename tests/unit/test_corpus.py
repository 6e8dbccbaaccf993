"""Text to token ids: every character arrives once, in order, or the file is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.data import tokenizer as tokenizer_module
from ray_ckpt.data.corpus import Source, list_corpus, read_documents, standard_library
from ray_ckpt.data.index import DataError
from ray_ckpt.data.tokenizer import (
    ByteTokenizer,
    id_dtype,
    load_tokenizer,
    pack,
    read_task,
    token_pieces,
)

TEXTS = ["first\r\ndocument\n", "zweites Dokument: äöü €", "", "第三 🎈"]


def only_source(path: Path) -> Source:
    (source,) = list_corpus([str(path)]).sources
    return source


def write_input(path: Path) -> list[str]:
    """Write TEXTS in the form that the name asks for; returns the documents to expect."""
    kind, texts = path.name.removesuffix(".gz").rpartition(".")[2], TEXTS
    if kind == "jsonl":
        content = "\n\n".join(json.dumps({"text": text, "n": 1}) for text in texts).encode()
    elif kind == "parquet":
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)
        content = path.read_bytes()
    else:
        texts = TEXTS[:1]
        content = texts[0].encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return texts


@pytest.mark.parametrize("kind", ["txt", "md", "rst", "py", "jsonl", "parquet"])
@pytest.mark.parametrize("gz", ["", ".gz"])
def test_every_kind_is_read_exactly(tmp_path: Path, kind: str, gz: str) -> None:
    path = tmp_path / f"input.{kind}{gz}"
    expected = write_input(path)
    assert list(read_documents(only_source(path))) == expected


def test_encodings_that_a_file_declares(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# coding: latin-1\n# ä\n".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("\ufeffmark".encode())
    documents = [next(read_documents(s)) for s in list_corpus([str(tmp_path)]).sources]
    assert documents == ["# coding: latin-1\n# ä\n", "mark"]


def bad_parquet(column: str, values: Any) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table({column: values}), path)


BAD_INPUTS: list[tuple[str, bytes | Callable[[Path], object], str]] = [
    ("a.txt", b"ok \xff", "is not text in utf-8"),
    ("a.py", b"# coding: klingon\n", "is not text"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
    ("b.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3 is not JSON"),
    ("c.jsonl", b'{"body": "a"}\n', "line 1 has no text in the field 'text'"),
    ("d.jsonl", b'{"text": 7}\n', "line 1 has no text"),
    ("e.jsonl", b"[1]\n", "line 1 has no text"),
    ("f.jsonl", b'{"text": "\\ud800"}\n', "document 0 holds half a character"),
    ("a.txt.gz", b"not gzip", "is not a whole gzip file"),
    ("b.txt.gz", gzip.compress(b"x" * 5000, mtime=0)[:-9], "is not a whole gzip file"),
    (
        "c.txt.gz",
        gzip.compress(bytes(range(200)) * 9, mtime=0)[:30] + b"\xff" * 99,
        "not a whole gzip file",
    ),
    ("a.parquet", b"PAR1 no", "cannot be read as Parquet"),
    ("a.parquet.gz", gzip.compress(b"no", mtime=0), "cannot be read as Parquet"),
    ("b.parquet", bad_parquet("body", ["a"]), r"has the columns \['body'\]"),
    ("c.parquet", bad_parquet("text", [1]), "one column 'text' of strings"),
    ("d.parquet", bad_parquet("text", ["a", None]), "row 1 has null"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_INPUTS)
def test_bad_input_is_named(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], object], message: str
) -> None:
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        list(token_pieces(only_source(path), ByteTokenizer()))


def test_errors_travel_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    source = only_source(path)
    row = {"position": 3, "path": source.path, "ending": ".txt", "num_bytes": 4, "strict": True}
    (good,) = read_task(row, tokenizer=ByteTokenizer())
    assert (good["position"], good["documents"], good["error"]) == (3, 1, "")
    assert np.frombuffer(good["ids"], "<u2").tolist() == [*b"text", 256]
    path.unlink()
    (bad,) = read_task(row, tokenizer=ByteTokenizer())
    assert bad["position"] == 3
    assert str(path) in bad["error"]


def test_folders_are_listed_by_path(tmp_path: Path) -> None:
    for name in (
        "b/z.txt",
        "b/a.md",
        "a.txt",
        "c.png",
        ".hidden.txt",
        "__pycache__/x.py",
        ".git/x",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    corpus = list_corpus([str(tmp_path / "b" / "z.txt"), str(tmp_path)])
    names = [str(Path(source.path).relative_to(tmp_path)) for source in corpus.sources]
    assert names == ["b/z.txt", "a.txt", "b/a.md"]
    assert corpus.passed_over == {"kind .png": 1, "named twice": 1}


def test_inputs_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing does not exist"):
        list_corpus([str(tmp_path / "nothing")])
    with pytest.raises(DataError, match="holds no file of text"):
        list_corpus([str(tmp_path)])
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(DataError, match=r"a\.pdf is of an unknown kind"):
        list_corpus([str(tmp_path / "a.pdf")])


def test_the_standard_library_is_text_without_tests() -> None:
    corpus = standard_library()
    paths = [Path(source.path) for source in corpus.sources]
    assert any(path.name == "dataclasses.py" for path in paths)
    assert not any({"test", "site-packages", "__pycache__"} & set(path.parts) for path in paths)
    assert paths == sorted(paths)
    assert sum(source.num_bytes for source in corpus.sources) > 5_000_000


def test_only_the_default_corpus_skips_what_does_not_decode(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff")
    lenient = Source(path=str(path), ending=".txt", num_bytes=1, strict=False)
    (piece,) = token_pieces(lenient, ByteTokenizer())
    assert (piece.num_skipped, piece.num_documents, len(piece.ids)) == (1, 0, 0)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encoder()(text)
    assert tokenizer.decode(ids) == text
    assert not len(ids) or int(ids.max()) < 256


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.text("ab\nä", max_size=30), max_size=12),
    piece_ids=st.integers(1, 40),
    seq_len=st.integers(1, 9),
    block_rows=st.integers(1, 5),
)
def test_rows_are_the_documents_joined_by_end_tokens(
    texts: list[str], piece_ids: int, seq_len: int, block_rows: int, tmp_path_factory: Any
) -> None:
    """No id is lost, doubled or moved by pieces and packing, whatever their sizes."""
    path = tmp_path_factory.getbasetemp() / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PIECE_IDS", piece_ids)
        pieces = list(token_pieces(only_source(path), ByteTokenizer()))
    kept = [text for text in texts if text]
    stream = [id_ for text in kept for id_ in (*text.encode(), 256)]
    assert [id_ for piece in pieces for id_ in piece.ids.tolist()] == stream
    assert sum(piece.num_documents for piece in pieces) == len(kept)
    assert all(len(piece.ids) <= 2 * piece_ids + len(kept) for piece in pieces)

    blocks = list(
        pack(
            (piece.ids for piece in pieces), seq_len=seq_len, block_rows=block_rows, dtype="uint16"
        )
    )
    rows = len(stream) // seq_len
    assert [id_ for block in blocks for id_ in block.reshape(-1)] == stream[: rows * seq_len]
    assert [len(block) for block in blocks[:-1]] == [block_rows] * (len(blocks) - 1)
    assert all(block.shape[1] == seq_len and len(block) for block in blocks)
    assert all(block.dtype == np.uint16 for block in blocks)


def test_ids_take_the_smallest_type() -> None:
    sizes = {2: "uint8", 256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32"}
    assert {size: id_dtype(size).name for size in sizes} == sizes


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """A small word tokenizer with a hole in its vocabulary, saved with truncation and padding."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "hello": 1, "world": 2, "far": 7}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_keeps_all_the_text(tokenizer_json: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_json)
    assert (tokenizer.end_token, tokenizer.vocab_size) == (4, 8)
    assert tokenizer.name.startswith("tokenizer.json:")
    # Neither cut to two, nor filled up to nine, nor ended by what only looks like an end token.
    assert tokenizer.encoder()("hello world hello </s> hello").tolist() == [1, 2, 1, 0, 1]
    assert load_tokenizer(tokenizer_json, end_token="<unk>").end_token == 0


def test_tokenizer_files_that_cannot_be_used_are_named(
    tokenizer_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"none of the tokens <eos>.*--end-token"):
        load_tokenizer(tokenizer_json, end_token="<eos>")
    with pytest.raises(DataError, match=r"no.json cannot be read"):
        load_tokenizer(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        load_tokenizer(tokenizer_json)
