"""Nodes that died, before the cluster says so.

A machine that goes down ends its processes one after the other. The death of a worker is known at once, from its own
raylet or a broken connection; that of its node only when the head has missed some of its health checks. Who looks in
between sees a dead worker on a live node, restarts the group at its old size, and waits for a node that is gone.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # within this a raylet that lives takes a connection, seconds
_POLL_S = 0.2


def wait_for_silent(
    workers: Sequence[Any], errors: Mapping[int, BaseException], timeout_s: float
) -> None:
    """Waits until the cluster knows that nodes are dead whose workers died and whose raylets do not answer.

    Args:
        workers: Ray Train's ``Worker`` objects, by rank.
        errors: of workers, by rank.
        timeout_s: longest wait, seconds.
    """
    deadline = time.monotonic() + timeout_s
    died = {
        workers[rank].metadata.node_id
        for rank, error in errors.items()
        if isinstance(error, RayActorError)
    }
    silent = {node for node, address in _alive().items() if node in died and not answers(*address)}
    while silent and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        silent &= _alive().keys()
    if silent:
        logger.warning(
            "nodes %s have dead workers and do not answer, but the cluster still holds them to be alive after %g s "
            "(--elastic.node-loss-wait-s)",
            ", ".join(sorted(node[:12] for node in silent)),
            timeout_s,
        )


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _alive() -> dict[str, tuple[str, int]]:
    """Node to the address of its raylet, of all nodes that the cluster holds to be alive."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
        for node in ray.nodes()
        if node["Alive"]
    }
