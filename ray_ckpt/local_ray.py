"""Where the job runs: the cluster it was told to use, or a Ray of its own that ends with it.

``ray.init()`` without an address joins whatever Ray is on the machine, also one that a killed driver left
behind. So a job that was given no cluster (no ``RAY_ADDRESS``) starts one with a folder of its own, and a small
watchdog process beside it: when the driver is gone, however it went, the watchdog ends what is left of its Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray_ckpt.ray_dashboard import enable_if_possible

KEPT_SESSIONS = 5  # folders of ended jobs that are kept for their logs
_PORT_VARIABLE = "RAY_GCS_SERVER_PORT"
_held: list[int] = []
GRACE_S = 5.0  # Ray's own shutdown gets this long before the watchdog helps


@contextmanager
def cluster(num_cpus: int) -> Iterator[Any]:
    """Connects to the given cluster, or starts a private one for the time of the block.

    Args:
        num_cpus: least number of CPUs that a private Ray offers.

    Yields:
        What ``ray.init`` returned.
    """
    import ray

    quiet = {"logging_level": "warning"}
    if os.environ.get("RAY_ADDRESS") or ray.is_initialized():
        yield ray.init(ignore_reinit_error=True, **quiet)
        return
    # Ray starts workers at nice 15: beside two busy processes on two cores they all but stand still.
    os.environ.setdefault("RAY_worker_niceness", "0")
    enable_if_possible()
    folder = _session_folder()
    watchdog = _start_watchdog(folder)
    try:
        with _known_port() as port:
            context = ray.init(
                address="local",
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                include_dashboard=True,
                dashboard_port=8265 if _is_ours(8265) else 0,
                _temp_dir=str(folder),
                # What looks for "the" Ray from inside, as Ray Train's own cleaner does, finds this one also where
                # the machine has others. A Ray that is started inside it must have another port.
                runtime_env={"env_vars": {"RAY_ADDRESS": f"127.0.0.1:{port}", _PORT_VARIABLE: ""}},
                **quiet,
            )
        yield context
    finally:
        ray.shutdown()
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            watchdog.wait(timeout=4 * GRACE_S)


@contextmanager
def _known_port() -> Iterator[int]:
    """A free port, at which the Ray that is started in the block is reached; no other Ray gets it from us."""
    port = next(port for port in iter(_random_port, None) if not _port_taken(port))
    before = os.environ.get(_PORT_VARIABLE)
    os.environ[_PORT_VARIABLE] = str(port)
    try:
        yield port
    finally:
        if before is None:
            del os.environ[_PORT_VARIABLE]
        else:
            os.environ[_PORT_VARIABLE] = before


def _random_port() -> int:
    # Below the ports that outgoing connections are given, above those of Ray's workers: nobody takes it meanwhile.
    return 20_000 + secrets.randbelow(12_000)


def _root() -> Path:
    # Short: the path of a Unix socket, of which Ray makes some below here, has 107 bytes at most.
    return Path(tempfile.gettempdir()) / f"ray_ckpt-{os.getuid()}"


def _session_folder() -> Path:
    root = _root()
    root.mkdir(mode=0o700, exist_ok=True)
    old = sorted((f for f in root.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime)
    ended = [folder for folder in old if not _processes_of(folder)]
    for folder in ended[: max(0, len(ended) - KEPT_SESSIONS + 1)]:
        shutil.rmtree(folder, ignore_errors=True)
    folder = root / f"{os.getpid()}-{secrets.token_hex(2)}"
    folder.mkdir()
    return folder


def _start_watchdog(folder: Path) -> subprocess.Popen[bytes]:
    # Its standard input is a pipe that only this process holds: it ends when this process does.
    return subprocess.Popen(
        [sys.executable, "-m", "ray_ckpt.local_ray", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not for it
        cwd="/",
    )


def _is_ours(port: int) -> bool:
    """Whether this process may take a port that everybody likes; of two that start at once, one may."""
    handle = os.open(_root() / f".port-{port}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    _held.append(handle)  # for as long as this process lives
    return not _port_taken(port)


def _port_taken(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _processes_of(folder: Path) -> list[int]:
    """Processes of the Ray whose temporary folder this is: the path is in their command line."""
    mark, found = str(folder).encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if mark + b"/" in command and b"ray_ckpt.local_ray" not in command:
                    found.append(int(entry.name))
    return found


def _watch(folder: Path) -> None:
    """Waits for the driver to end, then ends the rest of its Ray."""
    while sys.stdin.buffer.read(1):
        continue
    deadline = time.monotonic() + GRACE_S
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(2.0)
        left = _processes_of(folder)
        if not left:
            return


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _watch(Path(sys.argv[1]))
