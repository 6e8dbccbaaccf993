"""A worker that died with its node is not taken for one that died alone."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from ray_ckpt.elastic import silent_nodes
from ray_ckpt.elastic.causes import dead_nodes
from ray_ckpt.elastic.silent_nodes import wait_for_silent

WORKERS = [
    SimpleNamespace(metadata=SimpleNamespace(node_id=node, node_ip="127.0.0.1")) for node in "ab"
]


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of a raylet that listens, and of one that does not any more."""
    with socket.create_server(("127.0.0.1", 0)) as here, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # nobody else gets it meanwhile
        yield [here.getsockname()[1], gone.getsockname()[1]]


def cluster(monkeypatch: pytest.MonkeyPatch, ports: list[int], dead_after: int) -> list[int]:
    """Ray's view of nodes a and b; b is dead from the so-manieth look on."""
    looks = [0]

    def nodes() -> list[dict[str, Any]]:
        looks[0] += 1
        return [
            {
                "NodeID": node,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": port,
                "Alive": alive,
            }
            for node, port, alive in (
                ("a", ports[0], True),
                ("b", ports[1], looks[0] < dead_after),
            )
        ]

    monkeypatch.setattr("ray.nodes", nodes)
    monkeypatch.setattr(silent_nodes, "_POLL_S", 0.001)
    return looks


def test_it_is_waited_for_until_the_cluster_knows_of_a_dead_node(monkeypatch, ports) -> None:
    cluster(monkeypatch, ports, dead_after=4)
    wait_for_silent(WORKERS, {1: RayActorError()}, timeout_s=30.0)
    assert list(dead_nodes(WORKERS)) == [1]


@pytest.mark.parametrize("errors", [{0: RayActorError()}, {1: RuntimeError("of the user")}, {}])
def test_nothing_is_waited_for_where_nodes_answer_or_no_worker_died(
    monkeypatch, ports, errors
) -> None:
    looks = cluster(monkeypatch, ports, dead_after=10**9)
    wait_for_silent(WORKERS, errors, timeout_s=30.0)
    assert looks[0] == 1


def test_the_wait_ends(monkeypatch, ports, caplog) -> None:
    cluster(monkeypatch, ports, dead_after=10**9)
    began = time.monotonic()
    wait_for_silent(WORKERS, {1: RayActorError()}, timeout_s=0.05)
    assert time.monotonic() - began < 5
    assert "--elastic.node-loss-wait-s" in caplog.text
