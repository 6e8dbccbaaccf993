"""What the head knows about the nodes, asked in a process of its own (`_gcs.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster._launch import client_environment, without_ray
from cluster._state import HEAD, ClusterError, ClusterRecord, Folders, NodeRecord

_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """One node, as the cluster and the process table see it now.

    Attributes:
        state: "alive"; "draining"; "killed" by `kill`; "dead" when it ended in another way, for
            instance drained; "lost" when its processes are gone and the head has not noticed yet.
        deadline_s: Seconds until a draining node's announced end; None when it is not draining.
        data_dir: The node's own folder, `RAY_CKPT_NODE_DIR` to its workers.
        reason: Why Ray counts it as dead.
    """

    name: str
    state: str
    ip: str
    cpus: int
    node_id: str
    raylet_pid: int
    data_dir: Path
    labels: Mapping[str, str]
    deadline_s: float | None = None
    reason: str = ""

    @property
    def alive(self) -> bool:
        """True while Ray counts the node in, which a draining one is."""
        return self.state in ("alive", "draining", "lost")


def require_head(record: ClusterRecord) -> None:
    """Refuses what a cluster without its head cannot do, instead of waiting for an answer."""
    if not record.node(HEAD).is_running:
        raise ClusterError(f"the head of cluster {record.name!r} is dead: end the rest with `down`")


def ask(record: ClusterRecord, call: str, **arguments: Any) -> dict[str, Any]:
    """Calls one function of `_gcs.py`.

    Raises:
        ClusterError: The head is dead or does not answer.
    """
    require_head(record)
    request = json.dumps({"call": call, "address": record.address, **arguments})
    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("_gcs.py")), request],
            env=without_ray(os.environ) | client_environment(record),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"the head has not answered for {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise ClusterError(f"the head did not answer: {done.stderr.strip()[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def node_statuses(record: ClusterRecord, seen: Mapping[str, Any]) -> list[NodeStatus]:
    """Joins what the head has said with what the process table says."""
    return [_status(record, node, seen.get(node.node_id)) for node in record.nodes]


def _status(record: ClusterRecord, node: NodeRecord, seen: Mapping[str, Any] | None) -> NodeStatus:
    deadline_ms: int | None = seen["deadline_ms"] if seen else None
    deadline_s: float | None = None
    state = "killed" if node.killed else "dead"
    if seen and seen["alive"]:
        state = "alive" if node.is_running else "lost"
        if state == "alive" and deadline_ms is not None:
            state, deadline_s = "draining", deadline_ms / 1000 - time.time()
    return NodeStatus(
        name=node.name,
        state=state,
        ip=node.ip,
        cpus=node.cpus,
        node_id=node.node_id,
        raylet_pid=node.raylet.pid if node.raylet else 0,
        data_dir=Folders(record.name).node_data(node.name),
        labels=seen["labels"] if seen else {},
        deadline_s=deadline_s,
        reason=seen["death"] if seen else "",
    )
