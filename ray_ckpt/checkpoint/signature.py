"""Signed manifests: with a key, only who holds it can make a checkpoint that is restored.

``RAY_CKPT_KEY`` holds one key or several, separated by commas: the first signs, all verify. A key is hexadecimal
digits, or other text, of at least 16 bytes; or ``@/path/to/file`` whose content is one. The driver reads it once
and takes it out of its environment; the tracker gets it as an argument. Workers need none: the tracker has checked
what it tells them to restore.

What a signature does not do: it keeps nobody who can write to the storage from deleting checkpoints, or from
bringing an old signed one back in its old place.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ray_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)

KEY_VARIABLE = "RAY_CKPT_KEY"
LEAST_BYTES = 16
_PURPOSE = b"ray_ckpt manifest 1\n"  # the same key elsewhere gives other signatures
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")
_UNSET = object()
_installed: object = _UNSET


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a run; their bytes are never shown."""

    values: tuple[bytes, ...] = field(repr=False)

    def sign(self, data: bytes) -> str:
        """HMAC-SHA256 with the first key, 64 hex digits."""
        return _mac(self.values[0], data)

    def verify(self, data: bytes, signature: str) -> bool:
        """Whether one of the keys made a signature; the time it takes says nothing about it."""
        found = [hmac.compare_digest(_mac(key, data), signature) for key in self.values]
        return any(found)


def parse_keys(text: str) -> Keys:
    """Keys from what ``RAY_CKPT_KEY`` holds.

    Raises:
        ConfigError: a key is empty, short, or in a file that cannot be read. Never shows a key.
    """
    words = [word.strip() for word in text.split(",")]
    return Keys(tuple(_parse_key(word, number) for number, word in enumerate(words, start=1)))


def install(keys: Keys | None) -> None:
    """Makes keys (or none) those of this process, whatever its environment says."""
    global _installed
    _installed = keys


def active() -> Keys | None:
    """Keys of this process: those installed, else those of its environment, else none.

    Raises:
        ConfigError: the environment's are not usable.
    """
    if _installed is not _UNSET:
        return _installed  # type: ignore[return-value]
    text = os.environ.get(KEY_VARIABLE)
    return None if text is None else _cached(text)


def take() -> Keys | None:
    """Keys of this process, which are in its environment no longer: whatever it starts gets none."""
    if (text := os.environ.get(KEY_VARIABLE)) is not None:
        install(parse_keys(text))
        del os.environ[KEY_VARIABLE]
    return active()


@lru_cache(maxsize=1)
def warn_unchecked() -> None:
    """Says once in a process that signatures are there and nobody checks them."""
    logger.warning("manifests are signed, and not checked: %s is not set", KEY_VARIABLE)


@lru_cache(maxsize=4)
def _cached(text: str) -> Keys:
    return parse_keys(text)


def _mac(key: bytes, data: bytes) -> str:
    return hmac.new(key, _PURPOSE + data, hashlib.sha256).hexdigest()


def _parse_key(word: str, number: int) -> bytes:
    where = f"{KEY_VARIABLE}, key {number}"
    if word.startswith("@"):
        path = Path(word[1:])
        if not path.is_absolute():
            raise ConfigError(f"{where}: @ is followed by the absolute path of a file")
        try:
            raw = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{where}: {path} cannot be read ({error.strerror})") from error
        where = f"{where} ({path})"
    else:
        # As the system handed it over, in any encoding.
        raw = os.fsencode(word)
    text = raw.decode("ascii", errors="ignore")
    key = bytes.fromhex(text) if len(text) == len(raw) and _HEX.fullmatch(text) else raw
    if len(key) < LEAST_BYTES:
        raise ConfigError(
            f"{where} has {len(key)} bytes, must have at least {LEAST_BYTES} (two hexadecimal digits are one byte). "
            "Make one with: openssl rand -hex 32. Unset the variable to leave manifests unsigned."
        )
    return key
