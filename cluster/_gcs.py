"""Asks a cluster's head about its nodes, or drains one, in a process of its own.

The caller (a test, a shell command) must not become a Ray client: Ray reads its authentication mode from the
environment once per process, and one process may look at several clusters.

Run as `python _gcs.py REQUEST`, REQUEST being JSON; the answer is JSON on the last line of stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def nodes(client: Any) -> dict[str, dict[str, Any]]:
    """Every node that the cluster has known, by node id."""
    draining = client.get_draining_nodes()
    return {
        node_id.hex(): {
            "alive": info.state == 0,  # GcsNodeInfo.GcsNodeState.ALIVE
            "labels": dict(info.labels),
            "deadline_ms": draining.get(node_id.hex()),
            "death": info.death_info.reason_message if info.state else "",
        }
        for node_id, info in client.get_all_node_info().items()
    }


def drain(client: Any, node_id: str, deadline_s: float, message: str) -> dict[str, Any]:
    """Announces the loss of a node, as a cloud does for a spot machine.

    `ray drain-node` does the same, but takes whole seconds only. The public way is the autoscaler's own.
    """
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = round(1000 * (time.time() + deadline_s))
    accepted, rejection = client.drain_node(node_id, reason, message, deadline_ms)
    return {"accepted": bool(accepted), "rejection": str(rejection), "deadline_ms": deadline_ms}


def main() -> None:
    request = json.loads(sys.argv[1])
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs

    client = GcsClient(address=request.pop("address"))
    calls: dict[str, Callable[..., Any]] = {"nodes": nodes, "drain": drain}
    call = calls[request.pop("call")]
    print(json.dumps(call(client, **request)))


if __name__ == "__main__":
    main()
