"""A network for each node of a local cluster, which can be cut: nothing goes out, nothing comes in, nobody is told.

The nodes are in network namespaces of Linux, joined by a bridge; the head, and the test itself, are where the bridge
is. That needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), `ip`, `unshare` and `nsenter`. Nothing of the machine's own
network is touched, and nothing is left of it: a namespace goes with the last process in it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

SUBNET = "10.77.3"
INTERFACE = "eth0"  # in every namespace
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_LIBC = ctypes.CDLL(None, use_errno=True)


def forbidden() -> str:
    """Why there can be no networks here; empty where they can be."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    make = "ip link add br0 type bridge && ip link add v0 type veth peer name w0"
    tried = subprocess.run(
        ["unshare", "-n", "sh", "-c", make], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


class Networks:
    """Namespaces for the nodes `node0` (the head, here) to `node<count - 1>`, for the time of a block.

    Args:
        count: number of nodes.
        folder: for the names by which `nsenter` finds them.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._count, self._folder = count, folder
        self._holders: list[subprocess.Popen[bytes]] = []
        self._home = -1

    @property
    def in_front(self) -> tuple[str, ...]:
        """What enters the namespace of a node: for `Settings.in_front`."""
        return ("nsenter", f"--net={self._folder}/{{node}}")

    def __enter__(self) -> Networks:
        # Of this thread, which starts all processes of the cluster.
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        if _LIBC.unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            _ip("link", "set", "lo", "up")
            _ip("link", "add", INTERFACE, "type", "bridge")
            _ip("addr", "add", f"{SUBNET}.1/24", "dev", INTERFACE)
            _ip("link", "set", INTERFACE, "up")
            self._name("node0", os.getpid())
            for number in range(1, self._count):
                self._add(number)
        except BaseException:
            self._leave()
            raise
        return self

    def _add(self, number: int) -> None:
        holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        self._holders.append(holder)
        mine = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == mine:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self._name(f"node{number}", holder.pid)
        inside = ["nsenter", f"--net={self._folder}/node{number}"]
        _ip(
            "link",
            "add",
            f"v{number}",
            *("type", "veth", "peer", "name", INTERFACE),
            *("netns", str(holder.pid)),
        )
        _ip("link", "set", f"v{number}", "master", INTERFACE, "up")
        _ip("addr", "add", f"{SUBNET}.{number + 1}/24", "dev", INTERFACE, inside=inside)
        _ip("link", "set", INTERFACE, "up", inside=inside)
        _ip("link", "set", "lo", "up", inside=inside)

    def cut(self, node: str) -> None:
        """From now on nothing reaches the node, and nothing leaves it."""
        _ip("link", "set", f"v{int(node.removeprefix('node'))}", "down")

    def heal(self, node: str) -> None:
        """The node can be reached again."""
        _ip("link", "set", f"v{int(node.removeprefix('node'))}", "up")

    def _name(self, node: str, pid: int) -> None:
        (self._folder / node).symlink_to(f"/proc/{pid}/ns/net")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if _LIBC.setns(self._home, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(self._home)
        for holder in self._holders:
            holder.kill()
            holder.wait()


def _ip(*words: str, inside: list[str] | None = None) -> None:
    done = subprocess.run(
        [*(inside or []), "ip", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
