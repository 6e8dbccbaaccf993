"""Which processes belong to a node, and how to end exactly those.

A node is a handful of processes that Ray starts and then lets go: `ray start` exits, its children are
adopted by init. Three marks find them again, read straight from `/proc` (Linux only):

1. the *tag*: a variable in the environment that every process of the node inherits, also a program
   that a worker starts in a session of its own. It is unique to one life of one node.
2. the *session* (setsid) that `ray start` opened. Needed because Ray's agents write their process title
   over their environment, so that the tag of some of them can no longer be read.
3. children of any of those.

A pid is only believed together with its start time, so a recycled pid is never killed, and a session
number only while a process that carries the tag lives in it: as long as one does, the kernel cannot
hand that number out again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TAG_VARIABLE = "RAY_CKPT_CLUSTER_TAG"
_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table; `started` is in clock ticks since boot."""

    pid: int
    parent: int
    session: int
    started: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What one life of one node is recognised by.

    Attributes:
        tag: Value of `TAG_VARIABLE` in the environment of its processes.
        session: Session number of its `ray start`, 0 when not known.
        raylet: Recorded raylet, which is believed without its tag.
    """

    tag: str
    session: int = 0
    raylet: Process | None = None


def read(pid: int) -> Process | None:
    """Returns the live process with this pid; None when there is none or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets and may hold spaces and brackets itself.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]))


def is_alive(process: Process | None) -> bool:
    """True when this very process still runs, not merely its pid."""
    if process is None:
        return False
    found = read(process.pid)
    return found is not None and found.started == process.started


def table() -> dict[int, Process]:
    """All live processes of this machine by pid."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {pid: process for pid in pids if (process := read(pid)) is not None}


def arguments(pid: int) -> list[str]:
    """Command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _tag_of(pid: int) -> str:
    try:
        blob = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return ""
    prefix = f"{TAG_VARIABLE}=".encode()
    for entry in blob.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return ""


def members(identities: Iterable[Identity]) -> list[Process]:
    """All live processes of these nodes, parents before children.

    The calling process is never among them, so that a job may kill other nodes of its own cluster.
    """
    wanted = list(identities)
    by_tag = {identity.tag: identity for identity in wanted}
    by_raylet = {(i.raylet.pid, i.raylet.started): i for i in wanted if i.raylet is not None}
    processes = table()
    found: dict[int, Process] = {}
    sessions: set[int] = set()
    for process in processes.values():
        identity = by_raylet.get((process.pid, process.started)) or by_tag.get(_tag_of(process.pid))
        if identity is not None:
            found[process.pid] = process
            if process.session == identity.session:
                sessions.add(process.session)
    found.update((p.pid, p) for p in processes.values() if p.session in sessions)
    _add_children(found, processes)
    found.pop(os.getpid(), None)
    return sorted(found.values(), key=lambda process: process.started)


def _add_children(found: dict[int, Process], processes: dict[int, Process]) -> None:
    while True:
        new = [p for p in processes.values() if p.parent in found and p.pid not in found]
        if not new:
            return
        found.update((process.pid, process) for process in new)


def send(identities: Iterable[Identity], number: int) -> int:
    """Sends a signal to every process of these nodes once, parents first; returns how many got it."""
    sent = 0
    for process in members(identities):
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
                sent += 1
    return sent


def kill(identities: Iterable[Identity], timeout_s: float = 10.0) -> int:
    """Sends SIGKILL to every process of these nodes until none is left.

    It looks again after each round, because a raylet may start a worker while it is being looked for.

    Returns:
        How many processes were killed.

    Raises:
        TimeoutError: Some would not die, for instance those waiting for a hung disk.
    """
    wanted = list(identities)
    deadline = time.monotonic() + timeout_s
    killed: set[Process] = set()
    while remaining := members(wanted):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise TimeoutError(f"processes {pids} did not end within {timeout_s:g} s of SIGKILL")
        for process in remaining:
            if is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            killed.add(process)
        time.sleep(0.05)
    return len(killed)


def shared_memory_files(processes: Iterable[Process]) -> set[str]:
    """Named files under /dev/shm that these processes have mapped."""
    return {path for process in processes for path in _mapped_shared_memory(process.pid)}


def unlink_orphans(paths: set[str]) -> None:
    """Deletes those of these shared-memory files that no live process maps any more."""
    if not paths:
        return
    used = shared_memory_files(table().values())
    for path in paths - used:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108  (names come from the kernel as they are)


def _mapped_shared_memory(pid: int) -> Iterator[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if path.startswith(_SHARED_MEMORY) and not path.endswith(" (deleted)"):
            yield path
