"""Worker processes that wait for the next group: Python, Ray, torch and this package are loaded, and nothing has run.

Most of a restart is the start of Python processes, some seconds of a processor's time for each worker. Ray keeps idle
processes, and gives one to an actor if it has never run anything and has the actor's runtime environment. So each node
that can hold workers is asked to start as many as the group has on one node, once the group trains and nobody waits for
them. What they do first is :func:`ray_ckpt.warm.warm_up`. A group that finds none starts as ever, and they end with
the job. A spare process costs memory (some hundred MB, of which a part is shared) and no processor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ray_ckpt.elastic.sizing import room
from ray_ckpt.errors import RayCkptError
from ray_ckpt.ray_private import (
    WorkerGroupCallback,
    draining_nodes,
    prestart_workers,
    setup_hook_variable,
)
from ray_ckpt.tracker.client import RayTracker
from ray_ckpt.warm import begun_ago_s, worker_environment

logger = logging.getLogger(__name__)

KEEP_S = 30 * 24 * 3600  # a job is not longer, about; Ray ends them with it
LOOK_S = 2.0  # between looks at the nodes
YOUNG_S = 60.0  # so long after they were asked for they may still be starting
TRIES = 3  # groups that may get none of those that there are, before no more are started
_ANSWER_S = 10.0


def warm_environment() -> dict[str, Any]:
    """Runtime environment of workers that warm up; empty where that cannot be, or the job has such a hook itself."""
    variable = setup_hook_variable()
    if not variable:
        return {}
    if variable in ray.get_runtime_context().runtime_env.get("env_vars", {}):
        logger.warning("the job has a worker_process_setup_hook: spare processes import nothing")
        return {}
    return worker_environment(variable)


class Kept:
    """How many spare processes each node has, as far as that is known."""

    def __init__(self) -> None:
        self._number: Counter[str] = Counter()
        self._since_s: dict[str, float] = {}  # when a node was last asked for some
        self._in_vain = 0  # groups in a row that got none although there should have been some

    @property
    def useless(self) -> bool:
        """Whether Ray does not give to groups what is kept for them."""
        return self._in_vain >= TRIES

    def missing(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Node to how many it has too few; those that are gone are forgotten."""
        self._number = Counter({n: have for n, have in self._number.items() if n in wanted})
        return {n: more for n, want in wanted.items() if (more := want - self._number[n]) > 0}

    def started(self, node: str, number: int, now_s: float) -> None:
        """So many more were started there."""
        self._number[node] += number
        self._since_s[node] = now_s

    def took(self, nodes: Sequence[str], were_spare: Sequence[bool], now_s: float) -> int:
        """A new group has workers on these nodes, some of them in spare processes; returns how many.

        Args:
            nodes: node of each worker.
            were_spare: whether the process of each was there before.
            now_s: by the clock of :meth:`started`, seconds.
        """
        in_vain = False
        for node, workers in Counter(nodes).items():
            spare = sum(s for n, s in zip(nodes, were_spare, strict=True) if n == node)
            young = now_s - self._since_s.get(node, 0.0) < YOUNG_S
            if spare < workers and not young:
                # Whoever got a new process found none: they died, or are given to nobody.
                in_vain |= not spare and self._number[node] > 0
                self._number[node] = 0
            self._number[node] = max(0, self._number[node] - spare)
        if any(were_spare):
            self._in_vain = 0
        elif in_vain:
            self._in_vain += 1
        return sum(were_spare)


def trains(status: Mapping[str, Any]) -> bool:
    """Whether the present attempt has made a step, by what the tracker says."""
    last = status["last"] or {}
    return bool(status["attempt_open"]) and last.get("generation") == status["generation"]


def wanted(
    nodes: Iterable[Mapping[str, Any]], per_worker: Mapping[str, float], most: int
) -> dict[str, int]:
    """Node to the spare processes that it should have.

    Args:
        nodes: of the cluster that stay, as ``ray.nodes()`` has them.
        per_worker: resources of a worker.
        most: workers of the group on one node.
    """
    found = {node["NodeID"]: min(most, room(node["Resources"], per_worker)) for node in nodes}
    return {node: number for node, number in found.items() if number > 0}


class Spares(WorkerGroupCallback):
    """Keeps spare processes for one run, in the controller's process.

    Args:
        run: its name.
        after_s: how long a group trains before they are started, seconds.
    """

    def __init__(self, run: str, after_s: float) -> None:
        self._run, self._after_s = run, after_s
        self._kept = Kept()
        self._over: threading.Event | None = (
            None  # for the present group; made where it is used: they cannot travel
        )

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        workers = list(worker_group.get_workers())
        per_worker = dict(worker_group.get_resources_per_worker())
        self._end()
        self._over = over = threading.Event()
        if not self._kept.useless:
            threading.Thread(
                target=self._keep, args=(workers, per_worker, over), name="spares", daemon=True
            ).start()

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._end()

    def _end(self) -> None:
        """The group that was looked after is over."""
        if self._over is not None:
            self._over.set()

    def took(self, workers: Sequence[Any], asked_ago_s: float) -> int:
        """Notes which workers of a new group are in processes that were there before it was asked for; how many.

        Args:
            workers: Ray Train's ``Worker`` objects.
            asked_ago_s: seconds since the group was asked for.
        """
        try:
            calls = [worker.execute_async(begun_ago_s) for worker in workers]
            ages_s = ray.get(calls, timeout=_ANSWER_S)
        except RayError as error:
            logger.warning("which workers were spare processes cannot be told: %s", error)
            return 0
        nodes = [worker.metadata.node_id for worker in workers]
        found = self._kept.took(nodes, [age_s > asked_ago_s for age_s in ages_s], time.monotonic())
        if self._kept.useless:
            logger.warning("Ray does not give spare processes to new workers: no more are started")
        return found

    def _keep(
        self, workers: Sequence[Any], per_worker: Mapping[str, float], over: threading.Event
    ) -> None:
        try:
            if not self._wait_until_trained(over):
                return
            job_id, runtime_env = ray.get(workers[0].execute_async(_who), timeout=_ANSWER_S)
            most = max(Counter(worker.metadata.node_id for worker in workers).values())
            while not over.is_set():
                self._start_missing(per_worker, most, job_id, runtime_env, over)
                over.wait(LOOK_S)
        except (RayError, RayCkptError) as error:
            # The group ended meanwhile, as a rule.
            logger.info("no spare processes are kept for this group any more: %s", error)
        except Exception:
            logger.warning("no spare processes are kept", exc_info=True)

    def _wait_until_trained(self, over: threading.Event) -> bool:
        """Whether the group came to train, and has for long enough: its start is not to be slowed down."""
        tracker = RayTracker(self._run)
        since_s = None
        while not over.wait(1.0):
            if since_s is None and trains(tracker.call("status")):
                since_s = time.monotonic()
            if since_s is not None and time.monotonic() - since_s >= self._after_s:
                return True
        return False

    def _start_missing(
        self,
        per_worker: Mapping[str, float],
        most: int,
        job_id: str,
        runtime_env: str,
        over: threading.Event,
    ) -> None:
        going = draining_nodes()
        nodes = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in going}
        for node, number in self._kept.missing(wanted(nodes.values(), per_worker, most)).items():
            if over.is_set():
                return
            where = nodes[node]
            # Counted also if it fails: a node that cannot is not asked again and again.
            self._kept.started(node, number, time.monotonic())
            prestart_workers(
                f"{where['NodeManagerAddress']}:{where['NodeManagerPort']}",
                job_id=job_id,
                runtime_env=runtime_env,
                number=number,
                keep_s=KEEP_S,
                timeout_s=_ANSWER_S,
            )


def _who() -> tuple[str, str]:
    """Job and runtime environment of a worker, as Ray compares them."""
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_runtime_env_string()
