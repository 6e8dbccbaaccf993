"""Which nodes get no workers: those that were suspected too often, never so many that the run does not fit. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

NODE_LABEL = "ray.io/node-id"  # that Ray gives every node


def nodes_to_avoid(
    suspected: Mapping[str, int], slots: Mapping[str, int], *, fewest: int, after: int
) -> list[str]:
    """Nodes that are left out, the most suspected first.

    Args:
        suspected: node to how often a hang was found to be its fault.
        slots: node to how many workers it has room for, of those that live; others are forgotten.
        fewest: workers that the run needs.
        after: times after which a node is left out; 0 leaves out none.
    """
    guilty = [node for node in slots if after and suspected.get(node, 0) >= after]
    left = sum(slots.values())
    avoided = []
    for node in sorted(guilty, key=lambda node: (-suspected[node], node)):
        if left - slots[node] >= fewest:
            avoided.append(node)
            left -= slots[node]
    return avoided


def selector_without(nodes: Collection[str]) -> dict[str, str] | None:
    """Ray's label selector for workers that are on none of these nodes; None for no such rule.

    Args:
        nodes: Ray's names of them, for whatever reason each is to be left.
    """
    return {NODE_LABEL: f"!in({','.join(sorted(nodes))})"} if nodes else None


def slots_of(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """How many workers a node has room for.

    Args:
        resources: of the node.
        per_worker: that each worker reserves, at least one kind.
    """
    wanted = {name: amount for name, amount in per_worker.items() if amount > 0}
    return int(min((resources.get(name, 0.0) // wanted[name] for name in wanted), default=0))
