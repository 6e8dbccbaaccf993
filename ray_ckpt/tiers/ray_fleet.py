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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.signature import Keys, install
from ray_ckpt.errors import ConfigError, HolderGoneError, RayCkptError, StorageError
from ray_ckpt.tiers.durable import durable_of
from ray_ckpt.tiers.fleet import QUICK_S
from ray_ckpt.tiers.holder import Holder
from ray_ckpt.tiers.janitor import HoldersLock, start_janitor, sweep_stale
from ray_ckpt.tiers.stack import Stack

logger = logging.getLogger(__name__)

NAMESPACE = "ray_ckpt"
_START_S = 60.0
_ALSO_S = 5.0  # for nodes that only may have copies
_MEND_S = 5.0  # between two looks for nodes that lack a holder
_THREADS = 16  # calls of one holder at a time; most of them wait


class HolderActor(Holder):
    """A holder in a process of its own."""

    def __init__(
        self, node: str, run_dir: str, stack: Stack, host: str, token: bytes, keys: Keys | None
    ) -> None:
        self._mistake: RayCkptError | None = None
        try:
            self._set_up(node, run_dir, stack, host, token, keys)
        except RayCkptError as error:
            # Told by alive(): of a constructor Ray tells nobody what it raised.
            self._mistake = error

    def _set_up(
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
        if self._mistake is not None:
            raise self._mistake
        return super().alive()


@dataclass(frozen=True, slots=True)
class _Starting:
    """A holder that starts: its first answer, and since when it is waited for."""

    name: str
    actor: Any
    ready: Any
    since_s: float


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
        self._starting: dict[str, _Starting] = {}
        self._new: list[str] = []  # nodes that have got a holder, and mend() did not tell of
        self._mended_s = 0.0

    def gather(self, nodes: Sequence[str], also: Sequence[str] = ()) -> None:
        alive = self._look()
        for node in [node for node in self._actors if node not in alive]:
            del self._actors[node]
        self._drop_mute()
        for node in dict.fromkeys((*nodes, *also)):
            self._begin(node, alive)
        deadline = time.monotonic() + _START_S
        mistake: ConfigError | None = None
        for node in dict.fromkeys(nodes):
            mistake = self._started(node, deadline - time.monotonic()) or mistake
        # The others may be full, or about to go; whoever is not ready yet is taken by mend().
        deadline = min(deadline, time.monotonic() + _ALSO_S)
        for node in [node for node in also if node in self._starting]:
            self._started(node, deadline - time.monotonic(), last=False)
        self._new = []  # whoever gathers asks them all
        if mistake is not None:
            raise mistake

    def mend(self, nodes: Sequence[str]) -> list[str]:
        for node, starting in list(self._starting.items()):
            late = time.monotonic() - starting.since_s > _START_S
            self._started(node, 0.0, last=late)
        lack = [node for node in nodes if node not in self._actors and node not in self._starting]
        if lack and time.monotonic() - self._mended_s >= _MEND_S:
            self._mended_s = time.monotonic()
            alive = self._look()
            for node in lack:
                self._begin(node, alive)
        ready, self._new = self._new, []
        return ready

    def renew(self, node: str) -> None:
        import ray

        if node in self._actors:
            _, actor = self._actors.pop(node)
            ray.kill(actor)  # one that hangs would go on when it wakes

    def names(self) -> dict[str, str]:
        return {node: name for node, (name, _) in self._actors.items()}

    def domains(self, label: str) -> dict[str, str]:
        found = {node: self._labels.get(node, {}).get(label) for node in self._actors}
        return {node: value for node, value in found.items() if value}

    def post(self, node: str, method: str, **kwargs: Any) -> Any:
        if node not in self._actors:
            raise HolderGoneError(f"node {node} has no holder of run {self._run!r}: it is gone")
        return getattr(self._actors[node][1], method).remote(**kwargs)

    def take(self, ticket: Any, timeout_s: float) -> tuple[bool, Any]:
        return take(ticket, timeout_s)

    def close(self, *, drop_memory: bool, generation: int) -> None:
        import ray

        tickets = {}
        if drop_memory:
            for node, (_, actor) in self._actors.items():
                tickets[node] = actor.forget.remote(tier="memory", generation=generation)
        deadline = time.monotonic() + QUICK_S
        for node, ticket in tickets.items():
            try:
                ray.get(ticket, timeout=max(0.0, deadline - time.monotonic()))
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("memory of node %s is not freed yet: %s", node, error)
        for _, actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}

    def _where(self) -> str:
        stack = self._stack
        memory = stack.memory_folder or "the node's /dev/shm"
        local = f", --tiers.local-folder {stack.local_folder}" if stack.local_folder else ""
        return f"--tiers.memory-folder {memory}{local}"

    def _look(self) -> dict[str, str]:
        """Nodes that live, and their addresses."""
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        self._labels = {node: info.get("Labels") or {} for node, info in alive.items()}
        return {node: str(info["NodeManagerAddress"]) for node, info in alive.items()}

    def _drop_mute(self) -> None:
        """Ends the holders that do not answer; all are asked at once."""
        import ray

        tickets = {actor.alive.remote(): node for node, (_, actor) in self._actors.items()}
        if not tickets:
            return
        done, _ = ray.wait(list(tickets), num_returns=len(tickets), timeout=QUICK_S)
        for ticket, node in tickets.items():
            try:
                if ticket in done:
                    ray.get(ticket)
                    continue
            except ray.exceptions.RayError as error:
                logger.warning("the holder on node %s is gone: %s", node, type(error).__name__)
            self.renew(node)

    def _begin(self, node: str, alive: Mapping[str, str]) -> None:
        """Starts a holder on a node that lives and has none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in alive or node in self._actors or node in self._starting:
            return
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
            .remote(node, str(self._run_dir), self._stack, alive[node], self._token, self._keys)
        )
        self._starting[node] = _Starting(name, actor, actor.alive.remote(), time.monotonic())

    def _started(self, node: str, timeout_s: float, *, last: bool = True) -> ConfigError | None:
        """Waits for a holder that starts, and gives it up when it is not there and this is the last look.

        Returns:
            The mistake of the user that keeps it from starting.
        """
        import ray

        starting = self._starting.get(node)
        if starting is None:
            return None
        done, _ = ray.wait([starting.ready], timeout=max(0.0, timeout_s))
        if not done and not last:
            return None
        del self._starting[node]
        try:
            ray.get(starting.ready, timeout=0)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("no holder on node %s: %s", node, error)
            ray.kill(starting.actor)
            cause = getattr(error, "cause", None)
            if not isinstance(cause, RayCkptError):
                return None
            return ConfigError(
                f"a tier cannot be used on node {node[:12]}: {cause} (--tiers.use {' '.join(self._stack.use)}, "
                f"{self._where()})"
            )
        self._actors[node] = (starting.name, starting.actor)
        self._new.append(node)
        return None


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
        raise HolderGoneError(f"a holder is gone: {type(error).__name__}") from error


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
