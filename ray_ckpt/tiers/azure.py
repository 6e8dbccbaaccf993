"""Azure Blob Storage by its address, with a key of the account where there is one.

``FileSystem.from_uri`` of pyarrow (26.0) takes no key of an account and no SAS token, not even from the address, and
asks for a token of a user or a machine instead. Both are common, and emulators know nothing else; so with
``AZURE_STORAGE_KEY`` or ``AZURE_STORAGE_SAS_TOKEN`` in the environment, as Azure's own tools read them, the file system
is built here. Without either it is pyarrow's business: a managed identity, or what ``AZURE_CLIENT_ID`` and so on say.
"""

from __future__ import annotations

import os
import urllib.parse
from typing import Any

from ray_ckpt.errors import ConfigError

SCHEMES = ("abfs", "abfss")
_KEY, _SAS = "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"
_OPTIONS = ("enable_tls", "blob_storage_authority", "dfs_storage_authority")


def open_with_key(fs: Any, parts: urllib.parse.SplitResult) -> tuple[Any, str] | None:
    """A ``pyarrow.fs.AzureFileSystem`` and the path in it; None where the environment has no key.

    Args:
        fs: the module ``pyarrow.fs``.
        parts: of the address, in any of the forms that pyarrow takes:
            ``abfs://container@account.dfs.core.windows.net/path``, ``abfs://account.blob.core.windows.net/container/path``,
            ``abfs://account@host:port/container/path`` (an emulator) and ``abfs://account@container/path``.

    Raises:
        ConfigError: the address says something that is not known here, or has a key in it.
    """
    key, sas = os.environ.get(_KEY), os.environ.get(_SAS)
    if ":" in parts.netloc.partition("@")[0] and "@" in parts.netloc:
        raise ConfigError(
            f"an {parts.scheme}:// address has a key in it, which pyarrow passes over: put it into {_KEY} instead"
        )
    if not key and not sas:
        return None
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise ConfigError(
            f"an {parts.scheme}:// address has the option {unknown[0]!r}, which does not go together with {_KEY} or "
            f"{_SAS}; known: {', '.join(_OPTIONS)}"
        )
    account, path, more = _read(parts)
    if not account or not path:
        raise ConfigError(f"an {parts.scheme}:// address names an account and a container")
    plain = options.pop("enable_tls", "true").lower() in ("false", "0")
    if plain:
        more |= {"blob_storage_scheme": "http", "dfs_storage_scheme": "http"}
    # One of the two: pyarrow refuses both.
    login = {"account_key": key} if key else {"sas_token": sas}
    return fs.AzureFileSystem(account_name=account, **login, **more, **options), path


def _read(parts: urllib.parse.SplitResult) -> tuple[str, str, dict[str, str]]:
    """Account, container and path, and where a service of one's own is."""
    user, _, host = parts.netloc.rpartition("@")
    path = urllib.parse.unquote(parts.path).strip("/")
    for kind in ("dfs", "blob"):
        suffix = f".{kind}.core.windows.net"
        if host.endswith(suffix):
            return host.removesuffix(suffix), f"{user}/{path}".strip("/"), {}
    if "." in host or ":" in host:
        return user, path, {"blob_storage_authority": host, "dfs_storage_authority": host}
    return user, f"{host}/{path}".strip("/"), {}
