"""Addresses of object stores: how they are written, shown without their secrets, and opened.

An address is a URI as ``pyarrow.fs`` knows it: ``s3://bucket/path``, ``gs://``, ``abfs://``, ``file:///path``, with
options behind a question mark. For S3 those are ``region``, ``scheme``, ``endpoint_override``,
``allow_bucket_creation`` and ``tls_ca_file_path``; keys come from the environment (``AWS_ACCESS_KEY_ID`` and so on),
the usual files or the machine's role. Those of Azure come from the environment too (:mod:`ray_ckpt.tiers.azure`).

An S3 file system is built here from the parts of its URI: ``FileSystem.from_uri`` takes no limit of time for it, and
tries 30 times by itself, 100 seconds for one request of a store that hangs, which nobody sees or counts.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers import azure

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
_S3_OPTIONS = (
    "region",
    "scheme",
    "endpoint_override",
    "allow_bucket_creation",
    "tls_ca_file_path",
)
_FIX = "Write it like s3://bucket/path, gs://bucket/path, abfs://container@account.dfs.core.windows.net/path or file:///path."

OpenFs = Callable[[str, float], tuple[Any, str]]
"""Opens an address with a limit of time for each request: a ``pyarrow.fs.FileSystem`` and the path in it."""


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A place on an object store, as it is shown to people: without keys and options.

    Attributes:
        uri: of it; no slash at its end.
    """

    uri: str

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.uri.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The place above."""
        return RemotePath(self.uri.rpartition("/")[0])

    def __truediv__(self, part: str) -> RemotePath:
        return RemotePath(f"{self.uri}/{part}")

    def __str__(self) -> str:
        return self.uri


def is_uri(text: str) -> bool:
    """Whether a text is an address, and no path of this machine."""
    return bool(_SCHEME.match(text)) and "/" in text


def shown(uri: str) -> str:
    """An address without what may be secret: keys, and options."""
    parts = urllib.parse.urlsplit(uri)
    place = parts.netloc
    if ":" in place.partition("@")[0] and "@" in place:
        place = place.rpartition("@")[2]  # key:secret@bucket
    return f"{parts.scheme}://{place}{parts.path}".rstrip("/")


def without_secrets(text: str, uri: str) -> str:
    """A message of a library in which keys of an address may stand, without them."""
    parts = urllib.parse.urlsplit(uri)
    raw = parts.netloc.rpartition("@")[0]
    secrets = [uri, parts.query] if parts.query else [uri]
    if ":" in raw:
        secrets += [raw, *raw.split(":")]
        secrets += [urllib.parse.unquote(part) for part in raw.split(":")]
    secrets += [value for name, value in urllib.parse.parse_qsl(parts.query) if _secret(name)]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, shown(uri) if secret == uri else "***")
    return text


def without_keys(uri: str) -> str:
    """An address that can be put on record and used again: without keys, with its options."""
    parts = urllib.parse.urlsplit(uri)
    user, at, host = parts.netloc.rpartition("@")
    place = host if ":" in user else f"{user}{at}{host}"
    options = urllib.parse.parse_qsl(parts.query)
    plain = urllib.parse.urlencode([(name, value) for name, value in options if not _secret(name)])
    return urllib.parse.urlunsplit(parts._replace(netloc=place, query=plain))


def _secret(option: str) -> bool:
    return any(word in option for word in ("key", "secret", "token", "sig", "credential"))


def below(uri: str, *parts: str) -> str:
    """The address of a place below another; options stay at the end."""
    found = urllib.parse.urlsplit(uri)
    path = "/".join([found.path.rstrip("/"), *(urllib.parse.quote(part) for part in parts)])
    return urllib.parse.urlunsplit(found._replace(path=path))


def split_run(uri: str) -> tuple[str, str]:
    """The address of a storage and the name of a run, from the address of the run.

    Raises:
        ConfigError: it has no name.
    """
    parts = urllib.parse.urlsplit(uri)
    path = PurePosixPath(urllib.parse.unquote(parts.path))
    if (not parts.netloc and len(path.parts) < 3) or path.name in ("", ".", ".."):
        raise ConfigError(f"{shown(uri)} names no run: a run is URI/NAME. {_FIX}")
    above = urllib.parse.quote(str(path.parent))
    return urllib.parse.urlunsplit(parts._replace(path=above)), path.name


def open_filesystem(uri: str, timeout_s: float) -> tuple[Any, str]:
    """A new ``pyarrow.fs`` file system, with keys as they are now, and the path in it.

    Args:
        uri: the address.
        timeout_s: how long one request may go without a byte, seconds; S3 and GCS only, others have limits of
            their own.

    Raises:
        ConfigError: the address is none, or this pyarrow has no such file system.
        OSError: the store cannot be reached, or there are no keys.
    """
    from pyarrow import fs  # a quarter of a second, for those who have no object store as well

    parts = urllib.parse.urlsplit(uri)
    if not is_uri(uri):
        raise ConfigError(f"{uri!r} is no address of an object store. {_FIX}")
    try:
        if parts.scheme == "s3":
            return _open_s3(fs, parts, timeout_s)
        if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in parts.query:
            joint = "&" if parts.query else ""
            query = f"{parts.query}{joint}retry_limit_seconds={timeout_s:g}"
            uri = urllib.parse.urlunsplit(parts._replace(query=query))
        if parts.scheme in azure.SCHEMES and (with_key := azure.open_with_key(fs, parts)):
            return with_key
        found: tuple[Any, str] = fs.FileSystem.from_uri(uri)
    except (ValueError, NotImplementedError) as error:  # those of pyarrow are such
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{shown(uri)} cannot be used: {without_secrets(str(error), uri)}. {_FIX}"
        ) from None  # the cause may show keys
    return found


def _open_s3(fs: Any, parts: urllib.parse.SplitResult, timeout_s: float) -> tuple[Any, str]:
    raw, _, bucket = parts.netloc.rpartition("@")
    if not bucket:
        raise ConfigError(f"s3:{parts.path} names no bucket. {_FIX}")
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [name for name in options if name not in _S3_OPTIONS]:
        raise ConfigError(
            f"s3://{bucket}{parts.path} has the unknown option {unknown[0]!r}; known: {', '.join(_S3_OPTIONS)}"
        )
    if raw:
        key, _, secret = raw.partition(":")
        options["access_key"] = urllib.parse.unquote(key)
        options["secret_key"] = urllib.parse.unquote(secret)
    creation = options.pop("allow_bucket_creation", "false").lower() in ("true", "1")
    if "region" not in options and "endpoint_override" not in options:
        options["region"] = fs.resolve_s3_region(bucket)
    found = fs.S3FileSystem(
        request_timeout=timeout_s,
        connect_timeout=timeout_s,
        # Each try is counted and spaced here; more of them underneath would only multiply the waiting.
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        allow_delayed_open=True,  # a small object is one PUT: there is no upload of it to be left half-done
        allow_bucket_creation=creation,
        **options,
    )
    return found, f"{bucket}{urllib.parse.unquote(parts.path)}".rstrip("/")
