"""Which node keeps or sends which copy: pure arithmetic over names of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.tiers.stack import NodeTier


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a copy of a file is.

    Attributes:
        tier: on the node.
        node: Ray's id of it.
    """

    tier: NodeTier
    node: str


Copies = Mapping[str, AbstractSet[Place]]
"""Path of a file in a checkpoint to the places that have it."""


def replica_nodes(
    node: str, nodes: Sequence[str], replicas: int, domains: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The nodes that keep copies of what one node holds; never itself.

    The nodes stand in a ring, and the next ones after a node keep its copies, so that each node keeps as many for
    others as others keep for it. Nodes of other failure domains come first, and of those, domains that have no copy
    yet. With fewer other nodes than replicas all of them keep a copy.

    Args:
        node: whose files they are.
        nodes: all of them, in an order that is the same for every caller.
        replicas: how many copies are wanted.
        domains: node to its failure domain; one that is not named fails alone.
    """
    domains = domains or {}
    at = nodes.index(node)
    ring = [*nodes[at + 1 :], *nodes[:at]]
    chosen: list[str] = []
    used = {domains.get(node, node)}
    while ring and len(chosen) < replicas:
        fresh = next((other for other in ring if domains.get(other, other) not in used), ring[0])
        ring.remove(fresh)
        chosen.append(fresh)
        used.add(domains.get(fresh, fresh))
        if all(domains.get(other, other) in used for other in ring):
            used = {domains.get(node, node)}  # every domain has one: begin again with the others
    return tuple(chosen)


def missing(manifest: Manifest, copies: Copies) -> list[str]:
    """Files of a checkpoint that no place has."""
    return [entry.path for entry in manifest.files if not copies.get(entry.path)]


def senders(
    paths: Iterable[str],
    copies: Copies,
    sizes: Mapping[str, int],
    avoid: AbstractSet[tuple[str, str]] = frozenset(),
) -> dict[str, list[str]]:
    """Divides files among the nodes that have them, so that the busiest sends as little as possible (about).

    Args:
        paths: to be sent; each must have a copy somewhere.
        copies: of each.
        sizes: of each, bytes.
        avoid: (node, path) that failed before; taken only when there is no other.

    Returns:
        Node to the paths that it sends; paths without a copy are in none.
    """
    load: dict[str, int] = {}
    sent: dict[str, list[str]] = {}
    for path in sorted(paths, key=lambda path: (-sizes[path], path)):
        nodes = sorted({place.node for place in copies.get(path, ())})
        good = [node for node in nodes if (node, path) not in avoid] or nodes
        if not good:
            continue
        node = min(good, key=lambda node: (load.get(node, 0), node))
        load[node] = load.get(node, 0) + sizes[path]
        sent.setdefault(node, []).append(path)
    return sent
