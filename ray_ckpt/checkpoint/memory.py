"""Whether a node has the memory that saving will take, asked before it is taken.

A worker that saves keeps a second copy of its part of the state, and while it writes one tensor more. A node that has
less dies at its first save, hours into a run, by the hand of the kernel; so it is refused at the start.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ray_ckpt.errors import MemoryShortError

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker asks for, and what it sees.

    Attributes:
        host: its node.
        bytes: it will take.
        available: bytes of the node that are free or can be made free; None when that cannot be told.
    """

    host: str
    bytes: int
    available: int | None


def shortage(needs: Sequence[Need]) -> str | None:
    """Which node has too little for all its workers, in words; None when each has enough."""
    by_host: dict[str, list[Need]] = defaultdict(list)
    for need in needs:
        by_host[need.host].append(need)
    for host, workers in sorted(by_host.items()):
        wanted = sum(need.bytes for need in workers)
        seen = [need.available for need in workers if need.available is not None]
        if seen and wanted > min(seen):
            return (
                f"node {host}: saving takes {wanted / 2**20:,.0f} MiB of memory for {len(workers)} workers (a copy of "
                f"the state of each), and {min(seen) / 2**20:,.0f} MiB are available. Use fewer workers on a node, "
                "shards (--parallel fsdp), or nodes with more memory."
            )
    return None


def check_memory(need_bytes: int, group: dist.ProcessGroup) -> None:
    """Refuses to go on where a node has too little memory; all ranks of a group call it, and all are refused.

    Args:
        need_bytes: that this rank will take.
        group: of all ranks.

    Raises:
        MemoryShortError: names the node, what is needed and what there is.
    """
    needs: list[Any] = [None] * dist.get_world_size(group)
    mine = Need(socket.gethostname(), need_bytes, available_bytes())
    dist.all_gather_object(needs, mine, group=group)
    problem = shortage(needs)
    if problem is not None:
        raise MemoryShortError(problem)


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes that this node can still give, within the limit of the container if there is one."""
    found = [each for each in (_of_node(meminfo), _of_container(cgroup)) if each is not None]
    return min(found) if found else None


def _of_node(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _of_container(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # The page cache counts as used and is given back when it is wanted.
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
