"""From text to rows of token ids: the tokenizers, and packing.

A tokenizer is a small value that travels to the nodes; `encoder()` makes the function that does the
work there. Two are enough here: bytes (nothing to download, every text has ids), and the
`tokenizer.json` of the Hugging Face `tokenizers` library, which is imported only when asked for.

Every document is followed by one end token; then the stream is cut into rows. Packing knows nothing
of documents, so a row may begin and end anywhere, and only the tail that fills no row is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ray_ckpt.data.corpus import Source, UndecodableText, read_documents
from ray_ckpt.data.index import DataError

TokenIds = npt.NDArray[np.unsignedinteger[Any]]
Encoder = Callable[[str], TokenIds]

PIECE_IDS = 1 << 20
"""Ids handed on at once: a block of a few pieces stays far below the object store's size."""

COMMON_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)


class Tokenizer(Protocol):
    """What the preparation needs to know of a tokenizer."""

    @property
    def name(self) -> str:
        """Identifies the tokenizer in the data index."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are smaller than this."""
        ...

    @property
    def end_token(self) -> int:
        """Id put behind every document."""
        ...

    def encoder(self) -> Encoder:
        """Make the function from text to ids (any unsigned integer type), without end token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizer:
    """The bytes of the text in UTF-8, and id 256 as the end token."""

    name: str = "byte"
    vocab_size: int = 257
    end_token: int = 256

    def encoder(self) -> Encoder:
        """See `Tokenizer.encoder`; it raises UnicodeEncodeError for a lone surrogate."""
        return lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: TokenIds) -> str:
        """Turn ids back into text; end tokens are left out, cut characters become U+FFFD."""
        return bytes(ids[ids < 256].astype(np.uint8)).decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTokenizer:
    """A `tokenizer.json`; its content travels, so that the file need not be on every node."""

    name: str
    vocab_size: int
    end_token: int
    definition: str
    """Content of the file."""

    def encoder(self) -> Encoder:
        """See `Tokenizer.encoder`."""
        tokenizer = _build(self.definition)
        return lambda text: np.array(
            tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32
        )

    def decode(self, ids: TokenIds) -> str:
        """Turn ids back into text; special tokens are left out."""
        return str(_build(self.definition).decode(ids.tolist(), skip_special_tokens=True))


def load_tokenizer(path: str | Path | None, *, end_token: str | None = None) -> Tokenizer:
    """Load the tokenizer of a preparation.

    Args:
        path: a `tokenizer.json`, or None for the byte tokenizer.
        end_token: the token put behind every document, such as "</s>"; None takes the first of
            `COMMON_END_TOKENS` that the file has. The byte tokenizer has its own.

    Raises:
        DataError: the file cannot be read, or it has no such end token.
        ModuleNotFoundError: the `tokenizers` library is not installed.
    """
    if path is None:
        return ByteTokenizer()
    try:
        definition = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--tokenizer {path} cannot be read ({error}): name a tokenizer.json of the "
            "`tokenizers` library"
        ) from error
    try:
        tokenizer = _build(definition)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # The library raises nothing more special for bad content.
        raise DataError(
            f"--tokenizer {path} is not a tokenizer of the `tokenizers` library ({error}): name "
            "a file written by its Tokenizer.save()"
        ) from error
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    candidates = COMMON_END_TOKENS if end_token is None else (end_token,)
    end = next((vocabulary[token] for token in candidates if token in vocabulary), None)
    if end is None:
        raise DataError(
            f"--tokenizer {path} has none of the tokens {', '.join(candidates)} to put behind each "
            "document: name one of its own by --end-token"
        )
    return FileTokenizer(
        name=f"{Path(path).name}:{xxhash.xxh3_64_hexdigest(definition.encode())}",
        # Not the number of entries: a vocabulary may have holes, an embedding table may not.
        vocab_size=max(vocabulary.values()) + 1,
        end_token=end,
        definition=definition,
    )


def _build(definition: str) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--tokenizer needs the `tokenizers` library, which is not installed: "
            "pip install tokenizers, on every node"
        ) from error
    tokenizer = tokenizers.Tokenizer.from_str(definition)
    # Both may be saved in the file; either would lose or invent text without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that looks like a special token stays text: it must not forge the end of a document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def id_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Smallest unsigned integer type that holds the ids of a vocabulary."""
    return np.dtype(np.min_scalar_type(vocab_size - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Token ids of some documents of one file, or of a part of one."""

    ids: TokenIds
    num_documents: int
    """Documents that end in this piece."""
    num_skipped: int = 0
    """Files left out because they do not decode."""


def token_pieces(source: Source, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Read one file as token ids, each document followed by the end token.

    An empty document gives nothing, not even an end token: it would teach only that text may end
    before it begins.

    Yields:
        Pieces of at most about `PIECE_IDS` ids; at least one piece, perhaps empty.

    Raises:
        DataError: as `read_documents`; or a text has no UTF-8 form.
    """
    encode = tokenizer.encoder()
    dtype = id_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_token], dtype=dtype)
    waiting: list[TokenIds] = [end[:0]]
    held = documents = 0
    try:
        for number, text in enumerate(read_documents(source)):
            try:
                ids = encode(text).astype(dtype)
            except UnicodeEncodeError as error:
                raise DataError(
                    f"input {source.path}, document {number} holds half a character ({error}): a "
                    "lone surrogate such as \\ud800 is not text; remove it"
                ) from error
            if not len(ids):
                continue
            documents += 1
            for part in np.split(ids, range(PIECE_IDS, len(ids), PIECE_IDS)):
                if held >= PIECE_IDS:
                    # The document that fills it may go on: its end is counted with its end token.
                    yield Piece(ids=np.concatenate(waiting), num_documents=documents - 1)
                    waiting, held, documents = [], 0, 1
                waiting.append(part)
                held += len(part)
            waiting.append(end)
            held += 1
    except UndecodableText:
        if source.strict:
            raise
        yield Piece(ids=end[:0], num_documents=0, num_skipped=1)
        return
    yield Piece(ids=np.concatenate(waiting), num_documents=documents)


def read_task(row: dict[str, Any], *, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Read one file in a Ray Data task: `token_pieces` as rows.

    An error travels as a row, in its place in the order: so the first bad file of the corpus is the
    one that is named, whatever ran first, and its message arrives without a remote traceback.

    Args:
        row: `position` (of the file in the corpus) and the fields of its `Source`.
        tokenizer: makes the ids.

    Yields:
        Rows of `position`, `ids` (bytes, little-endian), `documents`, `skipped` and `error` ("" or
        a message).
    """
    position = row["position"]
    source = Source(**{name: row[name] for name in ("path", "ending", "num_bytes", "strict")})
    dtype = id_dtype(tokenizer.vocab_size).newbyteorder("<")
    nothing = {"position": position, "ids": b"", "documents": 0, "skipped": 0, "error": ""}
    try:
        for piece in token_pieces(source, tokenizer):
            yield nothing | {
                "ids": piece.ids.astype(dtype, copy=False).tobytes(),
                "documents": piece.num_documents,
                "skipped": piece.num_skipped,
            }
    except (DataError, ModuleNotFoundError) as error:
        yield nothing | {"error": str(error)}


def pack(
    pieces: Iterable[TokenIds], *, seq_len: int, block_rows: int, dtype: npt.DTypeLike
) -> Iterator[TokenIds]:
    """Cut a stream of ids into blocks of rows.

    Args:
        pieces: one-dimensional arrays of ids; where one ends and the next begins does not matter.
        seq_len: ids in a row.
        block_rows: rows in a block.
        dtype: integer type of the blocks.

    Yields:
        Arrays [block_rows, seq_len]; the last may have fewer rows, but at least one. The ids after
        the last full row, fewer than `seq_len`, are left out.
    """
    block = block_rows * seq_len
    waiting: list[TokenIds] = []
    held = 0
    for piece in pieces:
        waiting.append(piece.astype(dtype, copy=False))
        held += len(piece)
        if held < block:
            # Joining only when a block is full keeps many short documents from being copied often.
            continue
        joined = np.concatenate(waiting)
        full = held // block * block
        for start in range(0, full, block):
            yield joined[start : start + block].reshape(block_rows, seq_len)
        waiting, held = [joined[full:]], held - full
    rows = held // seq_len
    if rows:
        yield np.concatenate(waiting)[: rows * seq_len].reshape(rows, seq_len)
