"""All holders of a run as Ray actors, for its tracker and its workers.

One actor a node, on that node and nowhere else; it takes no CPU of the cluster. Holders belong to the tracker and end
with it; what they hold does not: the next tracker starts others, which find it. When none comes, memory is freed after
a while (:mod:`ray_ckpt.tiers.janitor`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.signature import Keys, install
from ray_ckpt.errors import RayCkptError, StorageError
from ray_ckpt.tiers.durable import durable_of
from ray_ckpt.tiers.fleet import QUICK_S
from ray_ckpt.tiers.holder import Holder
from ray_ckpt.tiers.janitor import HoldersLock, start_janitor, sweep_stale
from ray_ckpt.tiers.stack import Stack

logger = logging.getLogger(__name__)

NAMESPACE = "ray_ckpt"
_START_S = 60.0
_THREADS = 16  # calls of one holder at a time; most of them wait


class HolderActor(Holder):
    """A holder in a process of its own."""

    def __init__(
        self, node: str, run_dir: str, stack: Stack, host: str, token: bytes, keys: Keys | None
    ) -> None:
        install(keys)
        roots = {tier: stack.root(tier, Path(run_dir)) for tier in stack.node_tiers}
        # Held for as long as this process lives, however it ends.
        self._locks = [HoldersLock(root) for root in roots.values()]
        if "memory" in roots:
            sweep_stale(stack.base("memory"), stack.linger_s)  # where a janitor could not
            start_janitor(roots["memory"], stack.linger_s)
        super().__init__(
            node=node,
            run_dir=Path(run_dir),
            stack=stack,
            durable=durable_of(stack, Path(run_dir)),
            host=host,
            token=token,
        )

    def alive(self) -> bool:
        """Answers when the actor is ready."""
        return True


class RayFleet:
    """Holders as Ray actors.

    Args:
        run: name of the run.
        run_dir: its folder.
        stack: its tiers.
        keys: that manifests are signed with.
    """

    def __init__(self, *, run: str, run_dir: Path, stack: Stack, keys: Keys | None) -> None:
        self._run, self._run_dir, self._stack, self._keys = run, run_dir, stack, keys
        self._token = secrets.token_bytes(32)
        self._actors: dict[str, tuple[str, Any]] = {}
        self._labels: dict[str, Mapping[str, str]] = {}

    def gather(self, nodes: Sequence[str]) -> None:
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        self._labels = {node: info.get("Labels") or {} for node, info in alive.items()}
        for node in [node for node in self._actors if node not in alive]:
            del self._actors[node]
        started = {
            node: self._start(node, alive[node]["NodeManagerAddress"])
            for node in dict.fromkeys(nodes)
            if node in alive and not self._answers(node)
        }
        deadline = time.monotonic() + _START_S
        for node, (name, actor) in started.items():
            try:
                ray.get(actor.alive.remote(), timeout=max(0.0, deadline - time.monotonic()))
                self._actors[node] = (name, actor)
            except (ray.exceptions.RayError, TimeoutError) as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, RayCkptError):
                    raise cause from error  # such as a folder that cannot be used
                logger.warning("no holder on node %s: %s", node, error)

    def names(self) -> dict[str, str]:
        return {node: name for node, (name, _) in self._actors.items()}

    def domains(self, label: str) -> dict[str, str]:
        found = {node: self._labels.get(node, {}).get(label) for node in self._actors}
        return {node: value for node, value in found.items() if value}

    def post(self, node: str, method: str, **kwargs: Any) -> Any:
        if node not in self._actors:
            raise StorageError(f"node {node} has no holder of run {self._run!r}: it is gone")
        return getattr(self._actors[node][1], method).remote(**kwargs)

    def take(self, ticket: Any, timeout_s: float) -> tuple[bool, Any]:
        return take(ticket, timeout_s)

    def close(self, *, drop_memory: bool) -> None:
        import ray

        for node, (_, actor) in self._actors.items():
            try:
                if drop_memory:
                    ray.get(actor.forget.remote("memory"), timeout=QUICK_S)
                ray.kill(actor)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("the holder on node %s did not end: %s", node, error)
        self._actors = {}

    def _answers(self, node: str) -> bool:
        import ray

        if node not in self._actors:
            return False
        try:
            ray.get(self._actors[node][1].alive.remote(), timeout=QUICK_S)
        except (ray.exceptions.RayError, TimeoutError):
            del self._actors[node]
            return False
        return True

    def _start(self, node: str, host: str) -> tuple[str, Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"ray_ckpt.holder:{self._run}:{node[:12]}:{secrets.token_hex(4)}"
        actor = (
            ray.remote(HolderActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=_THREADS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(node, str(self._run_dir), self._stack, host, self._token, self._keys)
        )
        return name, actor


def take(ticket: Any, timeout_s: float) -> tuple[bool, Any]:
    """The answer of a holder, as :meth:`Fleet.take`."""
    import ray

    done, _ = ray.wait([ticket], timeout=timeout_s)
    if not done:
        return False, None
    try:
        return True, ray.get(ticket)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RayCkptError):
            raise error.cause from error
        raise StorageError(f"a holder failed: {error}") from error
    except ray.exceptions.RayError as error:
        raise StorageError(f"a holder is gone: {type(error).__name__}") from error


def holder_by_name(name: str) -> Any:
    """A holder, for a worker on its node.

    Raises:
        StorageError: it is gone.
    """
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise StorageError(f"this node's holder {name!r} is gone") from error
