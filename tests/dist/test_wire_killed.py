"""A node that dies while it sends: the other one is told, and keeps nothing of the file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import xxhash

from ray_ckpt.checkpoint.manifest import FileEntry
from ray_ckpt.errors import CopyError
from ray_ckpt.tiers.depot import Depot
from ray_ckpt.tiers.throttle import Throttle
from ray_ckpt.tiers.wire import FileServer, fetch

pytestmark = pytest.mark.dist

NAME = "step-00000010-g1"
TOKEN = bytes(range(32))
DATA = os.urandom(1 << 20) * 48
ENTRY = FileEntry("x", len(DATA), xxhash.xxh3_128_hexdigest(DATA))


def serve(root: Path, told) -> None:
    depot = Depot(root, sync=False)
    server = FileServer(
        lambda tier, name, path: depot.find(name, path), host="127.0.0.1", token=TOKEN
    )
    told.put(server.address)
    time.sleep(600)


@pytest.fixture
def source(tmp_path):
    depot = Depot(tmp_path / "source", sync=False)
    depot.put(NAME, ENTRY, [DATA])
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=serve, args=(depot.root, told), daemon=True)
    process.start()
    yield process, told.get(timeout=60)
    process.kill()
    process.join()


def test_a_server_that_is_killed_in_the_middle_leaves_nothing(source, tmp_path):
    process, address = source
    target = Depot(tmp_path / "target", sync=False)
    passed = 0

    class Killing(Throttle):
        def spend(self, count: int) -> None:
            nonlocal passed
            passed += count
            if process.is_alive() and passed > len(DATA) // 4:
                os.kill(process.pid, signal.SIGKILL)
                process.join()

    with pytest.raises(CopyError, match=r"copy of x of step-00000010-g1 from 127\.0\.0\.1 port"):
        fetch(address, TOKEN, "memory", NAME, ENTRY, target, Killing(), 10.0)
    assert 0 < passed < len(DATA)
    assert [path for path in target.root.rglob("*") if not path.is_dir()] == []


def test_a_server_that_hangs_in_the_middle_is_given_up_in_time(source, tmp_path):
    process, address = source
    target = Depot(tmp_path / "target", sync=False)
    passed = 0

    class Stopping(Throttle):
        def spend(self, count: int) -> None:
            nonlocal passed
            passed += count
            if passed > len(DATA) // 4:
                os.kill(process.pid, signal.SIGSTOP)

    began_s = time.monotonic()
    with pytest.raises(CopyError, match="timed out"):
        fetch(address, TOKEN, "memory", NAME, ENTRY, target, Stopping(), 1.0)
    assert time.monotonic() - began_s < 20
    os.kill(process.pid, signal.SIGCONT)
    assert [path for path in target.root.rglob("*") if not path.is_dir()] == []
    fetch(address, TOKEN, "memory", NAME, ENTRY, target, Throttle(), 30.0)
    assert target.has(NAME, ENTRY)
