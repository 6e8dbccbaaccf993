"""Memory of a run that was killed goes after a while, and stays for one that comes back: with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_ckpt.tiers.janitor import JANITOR_NAME, HoldersLock, start_janitor

pytestmark = pytest.mark.dist

LINGER_S = 0.5
HOLDER = """
import sys, time
from pathlib import Path
from ray_ckpt.tiers.janitor import HoldersLock, start_janitor
root = Path(sys.argv[1])
lock = HoldersLock(root)
(root / "file").touch()
start_janitor(root, float(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


def hold(root: Path) -> subprocess.Popen[str]:
    """A holder with its janitor, that is ready."""
    call = [sys.executable, "-c", HOLDER, str(root), str(LINGER_S)]
    package = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": package}
    process = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def janitors(root: Path) -> list[int]:
    """Processes that watch a root."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                words = (place / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"ray_ckpt.tiers.janitor" in words and str(root).encode() in words:
                found.append(int(place.name))
    return found


def eventually(what, within_s: float = 15.0) -> float:
    began_s = time.monotonic()
    while not what():
        assert time.monotonic() - began_s < within_s, "it never came"
        time.sleep(0.02)
    return time.monotonic() - began_s


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "base" / "run-key"
    yield root
    for pid in janitors(root):
        os.kill(pid, signal.SIGKILL)


def test_a_killed_run_stays_for_a_while_and_then_leaves_nothing_not_even_its_janitor(root):
    holder = hold(root)
    (janitor,) = janitors(root)
    # Whoever ends a process and its children does not end it.
    stat = Path(f"/proc/{janitor}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[1]) != holder.pid
    assert os.getsid(janitor) not in (os.getsid(0), holder.pid)
    time.sleep(2 * LINGER_S)
    assert (root / "file").exists(), "it is held"
    kill(holder)
    assert eventually(lambda: not root.exists()) >= LINGER_S / 2
    eventually(lambda: not list(root.parent.iterdir()))
    eventually(lambda: not janitors(root))


def test_a_holder_that_comes_back_in_time_finds_everything_and_one_janitor(root):
    lock = None
    for round_ in range(3):
        holder = hold(root)
        if lock is not None:
            lock.close()
        (root / f"file-{round_}").touch()
        kill(holder)
        lock = HoldersLock(root)
        time.sleep(1.5 * LINGER_S)
        assert len(list(root.glob("file-*"))) == round_ + 1
        assert len(janitors(root)) == 1
    lock.close()
    eventually(lambda: not root.exists())


def test_of_many_that_start_at_once_one_watches_and_a_killed_one_is_replaced(root):
    holders = [hold(root) for _ in range(3)]
    (first,) = janitors(root)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not janitors(root))
    start_janitor(root, LINGER_S)
    (second,) = janitors(root)
    assert second != first
    assert (root / JANITOR_NAME).exists()
    for holder in holders[:-1]:
        kill(holder)
    time.sleep(2 * LINGER_S)
    assert root.exists(), "one of them holds it still"
    kill(holders[-1])
    eventually(lambda: not root.exists())


def test_the_janitor_needs_neither_torch_nor_ray(tmp_path):
    call = [sys.executable, "-X", "importtime", "-m", "ray_ckpt.tiers.janitor", "--help"]
    package = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": package}
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ray_ckpt.errors" in imported
    assert not imported & {"torch", "ray", "numpy", "pyarrow", "xxhash"}
