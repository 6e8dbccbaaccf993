"""Object stores other than S3 on loopback: emulators that people install for it, each in a process of its own.

Neither belongs to what tests need: where one is missing, tests skip, and say how to get it.

- Google Cloud Storage: ``pip install gcp-storage-emulator``
- Azure Blob Storage: ``npm install -g azurite`` (its ``azurite-blob`` must be on ``PATH``)
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

# Of every Azurite, and of no other account.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

_GCS = """
import sys, threading
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket").start()
threading.Event().wait()
"""


@contextmanager
def google() -> Iterator[str]:
    """The address of a bucket of an emulator of Google Cloud Storage."""
    if importlib.util.find_spec("gcp_storage_emulator") is None:
        pytest.skip("gcp-storage-emulator is not installed: pip install gcp-storage-emulator")
    port = _free_port()
    with _process([sys.executable, "-c", _GCS, str(port)], port):
        yield f"gs://anonymous@bucket/runs?scheme=http&endpoint_override=127.0.0.1:{port}"


@contextmanager
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a container of an emulator of Azure Blob Storage; its key is put into the environment."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on PATH: npm install -g azurite")
    from pyarrow.fs import AzureFileSystem

    port = _free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with _process([program, "--blobPort", str(port), *options], port):
        place = f"127.0.0.1:{port}"
        AzureFileSystem(
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            blob_storage_authority=place,
            dfs_storage_authority=place,
            blob_storage_scheme="http",
            dfs_storage_scheme="http",
        ).create_dir("bucket")
        monkeypatch.setenv("AZURE_STORAGE_KEY", AZURE_KEY)
        yield f"abfs://{AZURE_ACCOUNT}@{place}/bucket/runs?enable_tls=false"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def _process(command: Sequence[str], port: int) -> Iterator[None]:
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert child.poll() is None, f"{command[0]} ended at once"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, f"{command[0]} does not listen"
                time.sleep(0.1)
        yield
    finally:
        child.kill()
        child.wait()
