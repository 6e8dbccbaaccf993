"""Ends nodes and clusters, and those clusters whose owner has gone without saying so."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import _processes
from cluster._state import ClusterRecord, Folders, NodeRecord, all_names


def end_nodes(nodes: Sequence[NodeRecord]) -> None:
    """Kills these nodes, and deletes the named shared memory that only they had in use."""
    identities = [node.identity for node in nodes]
    files = _processes.shared_memory_files(_processes.members(identities))
    _processes.kill(identities)
    _processes.unlink_orphans(files)


def destroy(record: ClusterRecord) -> None:
    """Ends what is left of a cluster and deletes its files."""
    end_nodes(record.nodes)
    Folders(record.name).remove()


def end_if_orphaned(name: str) -> bool:
    """Ends that cluster if its owner is gone; returns whether it did."""
    folders = Folders(name)
    try:
        if not _is_orphaned(folders.load()):
            return False
        with folders.lock():
            record = folders.load()  # another process may have ended it, or made it anew
            if record is None or not _is_orphaned(record):
                return False
            destroy(record)
            return True
    except FileNotFoundError:
        return False


def sweep() -> list[str]:
    """Ends all clusters of this user whose owner is gone; returns their names."""
    return [name for name in all_names() if end_if_orphaned(name)]


def _is_orphaned(record: ClusterRecord | None) -> bool:
    return record is not None and record.owner is not None and not _processes.is_alive(record.owner)
