"""The manifest: the one file that makes a checkpoint exist.

A checkpoint is a folder `step-00001200-g3` (step, generation). It counts from the moment its
`COMMITTED.json` is in place, which is written last and atomically, after every file that it names.
There is no "latest" pointer that could move too early: the newest checkpoint is found by listing.

The manifest is JSON for people and scripts. Its last field, `manifest_checksum`, covers all bytes
before it: a flipped digit in a step or a file size would otherwise still be valid JSON. With a key
(`signature.py`) a field `manifest_signature` stands before it, over all bytes before that, and each
file has its SHA-256: the quick checksum finds damage, and could be forged.

What it says is `manifest_fields.py`; here is its file. What a manifest cannot prove is that the bytes
it names are still good: that is `verify.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.manifest_fields import CHECKSUM_ALGORITHM, SCHEMA, FileEntry, Manifest
from ray_ckpt.checkpoint.names import LINKED, MANIFEST_NAME
from ray_ckpt.checkpoint.signature import KEY_VARIABLE, Keys
from ray_ckpt.checkpoint.storing import read_bytes, write_atomically
from ray_ckpt.errors import ManifestError, Place, SignatureError, StorageError

__all__ = [
    "CHECKSUM_ALGORITHM",
    "SCHEMA",
    "FileEntry",
    "Manifest",
    "encode_manifest",
    "parse_manifest",
    "read_manifest",
    "seal_manifest",
    "write_manifest",
]

_SIGNATURE_KEY = b'"manifest_signature": "'
_SIGNATURE_TAIL = re.compile(_SIGNATURE_KEY + b'([0-9a-f]{64})",\n \\Z')
_SEAL_KEY = b'"manifest_checksum": "'
_SEAL_END = b'"\n}\n'


def encode_manifest(document: Mapping[str, Any], keys: Keys | None = None) -> bytes:
    """The bytes of a manifest file: indented JSON that ends with the checksum of what precedes.

    With keys a signature of what precedes it comes before that; without, there is no trace of signing.
    """
    text = json.dumps(document, indent=1, allow_nan=False)
    head = text[: text.rindex("\n")].encode() + b",\n "
    if keys is not None:
        head += _SIGNATURE_KEY
        head += keys.sign(head).encode() + b'",\n '
    head += _SEAL_KEY
    return head + _digest(head) + _SEAL_END


def seal_manifest(manifest: Manifest, where: Place, name: str) -> bytes:
    """The bytes of a manifest that is about to be put in its place, signed when there is a key.

    Args:
        manifest: what is to be committed.
        where: the file, as errors name it.
        name: of the checkpoint's folder.

    Raises:
        ManifestError: the folder is another checkpoint's; or there is a key to sign with, and a file without its
            SHA-256.
    """
    keys = signature.active()
    if keys is not None and (bare := _without_sha256(manifest)):
        raise ManifestError(where, f"cannot be signed: {bare!r} has no SHA-256")
    if name != manifest.name:
        raise ManifestError(where, f"manifest of {manifest.name} does not belong into {name}")
    return encode_manifest(manifest.to_json(), keys)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commits a checkpoint: puts its manifest in place, atomically and durably.

    Writing the same manifest again changes nothing.

    Raises:
        ManifestError: the folder is another checkpoint's, already has a different manifest, or is a link;
            or there is a key to sign with, and a file without its SHA-256.
        StorageError: the disk refused; the checkpoint is not committed.
    """
    path = folder / MANIFEST_NAME
    if folder.is_symlink():
        raise ManifestError(path, LINKED)
    data = seal_manifest(manifest, path, folder.name)
    present = read_bytes(path)
    if present == data:
        return
    if present is not None:
        raise ManifestError(path, "already committed with other content; a commit is never changed")
    try:
        write_atomically(path, data)
    except StorageError:
        # The rename may have happened before the error: a refused commit must not be readable.
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def read_manifest(folder: Path, *, check_signature: bool = True) -> Manifest:
    """Reads and checks a checkpoint's manifest.

    Args:
        folder: the checkpoint.
        check_signature: False for who has no key and restores nothing.

    Raises:
        ManifestError: it is missing (`fault == "missing"`), damaged, or another checkpoint's.
        SignatureError: a key is in use, and this manifest is not signed with it.
        StorageError: storage failed; whether the checkpoint is committed is not known.
    """
    path = folder / MANIFEST_NAME
    # Before the file: a key that is of no use is no fault of a manifest.
    keys = signature.active() if check_signature else None
    data = read_bytes(path)
    if data is None:
        raise ManifestError(path, "missing")
    return _parse(data, path, folder.name, keys, check_signature)


def parse_manifest(data: bytes, where: Place, name: str) -> Manifest:
    """The manifest in the bytes of its file, wherever they came from; checked as :func:`read_manifest` does.

    Args:
        data: the file's content.
        where: the file, as errors name it.
        name: of the checkpoint's folder.

    Raises:
        ManifestError: it is damaged, or another checkpoint's.
        SignatureError: a key is in use, and this manifest is not signed with it.
    """
    return _parse(data, where, name, signature.active(), True)


def _parse(
    data: bytes, where: Place, name: str, keys: Keys | None, check_signature: bool
) -> Manifest:
    if not data.strip():
        raise ManifestError(where, "empty file")
    try:
        document = _decode(data)
        if check_signature:
            _check_signature(where, data, keys)
        manifest = Manifest.from_json(document)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ManifestError(where, str(error)) from error
    if name != manifest.name:
        raise ManifestError(where, f"it is the manifest of {manifest.name}, not of {name}")
    if keys is not None and (bare := _without_sha256(manifest)):
        raise SignatureError(where, f"its signature does not cover the content of {bare!r}")
    return manifest


def _decode(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON, perhaps half-written: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"not a JSON object but {type(document).__name__}")
    # Before the checksum: a later format may be sealed in another way, and deserves a clear word.
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema is {document.get('schema')!r}, this version reads {SCHEMA}")
    head, key, seal = data.rpartition(_SEAL_KEY)
    if not key:
        raise ValueError("field 'manifest_checksum' is missing")
    if seal != _digest(head + key) + _SEAL_END:
        raise ValueError("its own checksum differs: the manifest was changed or damaged")
    return document


def _check_signature(path: Place, data: bytes, keys: Keys | None) -> None:
    """Refuses a whole manifest that no key in use has signed; to call after its checksum matched."""
    head, _, _ = data.rpartition(_SEAL_KEY)
    # Nothing but the checksum may follow: JSON would take a field that comes again for the true one.
    found = _SIGNATURE_TAIL.search(head)
    if keys is None:
        if found is not None:
            signature.warn_unchecked()
        return
    if found is None:
        raise SignatureError(path, f"not signed, and {KEY_VARIABLE} is set")
    if not keys.verify(head[: found.start(1)], found[1].decode()):
        raise SignatureError(path, f"wrong signature: not made with a key of {KEY_VARIABLE}")


def _without_sha256(manifest: Manifest) -> str | None:
    return next((entry.path for entry in manifest.files if entry.sha256 is None), None)


def _digest(data: bytes) -> bytes:
    return str(xxhash.xxh3_128_hexdigest(data)).encode()


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")
