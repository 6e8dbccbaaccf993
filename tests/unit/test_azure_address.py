"""Addresses of Azure Blob Storage with a key in the environment, and folders of a store that lists none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.address import open_filesystem
from ray_ckpt.tiers.azure import open_with_key
from ray_ckpt.tiers.remote_store import RemoteStore, _top

FS = SimpleNamespace(AzureFileSystem=lambda **options: options)
SERVICE = {"blob_storage_authority": "127.0.0.1:10000", "dfs_storage_authority": "127.0.0.1:10000"}
PLAIN = {"blob_storage_scheme": "http", "dfs_storage_scheme": "http"}


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("uri", "path", "more"),
    [
        ("abfs://data@me.dfs.core.windows.net/a/b", "data/a/b", {}),
        ("abfss://data@me.dfs.core.windows.net", "data", {}),
        ("abfs://me.blob.core.windows.net/data/a", "data/a", {}),
        ("abfs://me@data/a%20b", "data/a b", {}),
        ("abfs://me@127.0.0.1:10000/data/a?enable_tls=false", "data/a", {**SERVICE, **PLAIN}),
        ("abfs://me@127.0.0.1:10000/data/a", "data/a", SERVICE),
    ],
)
def test_each_form_of_an_address_with_a_key_of_the_environment(
    uri: str, path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_with_key(FS, urlsplit(uri)) is None, "without a key it is pyarrow's business"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=1")
    assert open_with_key(FS, urlsplit(uri)) == ({"account_name": "me", "sas_token": "sig=1", **more}, path)  # fmt: skip
    monkeypatch.setenv("AZURE_STORAGE_KEY", "k==")
    assert open_with_key(FS, urlsplit(uri)) == ({"account_name": "me", "account_key": "k==", **more}, path)  # fmt: skip


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("abfs://me:secret@data/a", "put it into AZURE_STORAGE_KEY"),
        ("abfs://me@data/a?tenant_id=1", "'tenant_id'"),
        ("abfs://data/a", "an account and a container"),
    ],
)
def test_what_an_address_cannot_say_is_told_without_its_secrets(
    uri: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "k==")
    with pytest.raises(ConfigError, match=match) as found:
        open_filesystem(uri, 1.0)
    assert "secret" not in str(found.value).replace("a secret", "")


@settings(max_examples=30, deadline=None)
@given(st.sets(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple), max_size=6))
def test_folders_are_found_from_the_objects_below_them(
    tmp_path_factory: pytest.TempPathFactory, paths: set[tuple[str, ...]]
) -> None:
    base = tmp_path_factory.mktemp("store")
    for path in paths:
        place = Path(base, "x", *path[:-1], path[-1] + ".file")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"12")
    store = RemoteStore(base.as_uri())

    def facts(items: Any) -> set[tuple[str, bool, int]]:
        return {(item.path, item.is_folder, item.bytes) for item in items}

    if paths:
        assert facts(_top(store.list("x", deep=True))) == facts(store.list("x"))
