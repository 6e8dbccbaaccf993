"""Why a worker group failed, from the errors of its workers.

When one worker dies, its peers fail as well, with broken connections; and a node that dies says nothing at
all, so that those echoes are often the only errors there are. So the workers are asked once more before a
cause is named: an answer, or the error of a dead actor, comes from each of them within the time that the
cluster takes to notice a dead node.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ray_ckpt.errors import (
    LeavingError,
    OutOfStepError,
    RayCkptError,
    RollbackError,
    StaleGenerationError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why an attempt ended.

    Attributes:
        kind: "node_loss", "worker_error" or "hang".
        text: in words.
        hopeless: why another attempt would end the same way; empty when it may not.
        more: fields for the journal.
    """

    kind: str
    text: str
    hopeless: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


def ask_again(workers: Sequence[Any], timeout_s: float) -> dict[int, Exception]:
    """Asks every worker of a group for a sign of life; returns the errors of the dead, by rank.

    Args:
        workers: Ray Train's ``Worker`` objects, by rank.
        timeout_s: longest wait, seconds; what has not answered by then is left out.
    """
    refs = {worker.execute_async(sign_of_life): rank for rank, worker in enumerate(workers)}
    ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    errors: dict[int, Exception] = {}
    for ref in ready:
        try:
            ray.get(ref)
        except RayError as error:
            errors[refs[ref]] = error
    if late:
        logger.warning(
            "no sign of life within %g s from ranks %s", timeout_s, [refs[r] for r in late]
        )
    return errors


def sign_of_life() -> bool:
    """What a worker is asked to see whether it lives."""
    return True


def dead_nodes(workers: Sequence[Any]) -> dict[int, str]:
    """Rank to node, of the workers whose node the cluster holds to be dead."""
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    found = {}
    for rank, worker in enumerate(workers):
        node = nodes.get(worker.metadata.node_id)
        if node is None or not node["Alive"]:
            found[rank] = _name(node or {}) or worker.metadata.node_ip
    return found


def node_names() -> dict[str, str]:
    """Node to what people call it, for all nodes of the cluster."""
    return {
        node["NodeID"]: _name(node) or node.get("NodeManagerAddress") or node["NodeID"][:12]
        for node in ray.nodes()
    }


def _name(node: Mapping[str, Any]) -> str:
    return str((node.get("Labels") or {}).get("ray_ckpt.io/node", ""))


def find_cause(errors: Mapping[int, Exception], nodes: Mapping[int, str]) -> Cause:
    """Names the cause of a failure.

    Args:
        errors: errors of workers, by rank.
        nodes: name of the dead node, for each rank that was on one.
    """
    roots = {rank: _root(error) for rank, error in sorted(errors.items())}
    hopeless = next((str(e) for e in roots.values() if _is_ours(e)), "")
    if nodes:
        ranks = ", ".join(map(str, sorted(nodes)))
        names = ", ".join(sorted(set(nodes.values())))
        return Cause(kind="node_loss", text=f"node {names} died, with rank {ranks}")
    for rank, root in roots.items():
        if isinstance(root, RayActorError):
            return Cause(
                kind="worker_error", text=f"the process of rank {rank} died", hopeless=hopeless
            )
    for rank, root in sorted(roots.items(), key=lambda item: is_echo(item[1])):
        text = f"rank {rank}: {type(root).__name__}: {' '.join(str(root).split())}"
        return Cause(kind="worker_error", text=text, hopeless=hopeless)
    return Cause(kind="worker_error", text="the worker group failed without an error")


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that a peer is gone."""
    if isinstance(error, OutOfStepError):
        return True
    text = str(error)
    return any(word in text for word in ("Connection", "gloo", "NCCL", "Broken pipe", "Socket"))


def _is_ours(error: BaseException) -> bool:
    # A rank that nobody heard of may have been frozen, or its node slow: the next attempt may do.
    return isinstance(error, RayCkptError) and not isinstance(
        error, StaleGenerationError | RollbackError | LeavingError | OutOfStepError
    )


def _root(error: BaseException) -> BaseException:
    """The error in the training function, below the wrappers of Ray."""
    for _ in range(8):
        inner = getattr(error, "health_check_failure", None) or getattr(error, "cause", None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error
