"""The workers of one group, as they are reached from outside their training: asked, looked at on their node, ended.

Everything here has a bound on its wait. A worker of Ray Train is an actor whose training function runs in a thread
beside its calls, so it answers while it trains (``Worker.execute_async``, read in Ray 2.60).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.elastic.causes import node_names
from ray_ckpt.elastic.dumps import SPY_S, look_and_end
from ray_ckpt.elastic.whereabouts import HERE, Look, look_around

logger = logging.getLogger(__name__)

STEP_S = 3.0  # that the workers of a group that has failed have to say where they were
ASK_S = 5.0  # that a worker has to answer
OUTSIDE_S = SPY_S + 20.0  # that a look on a node may take, with the start of a process there


class RayCrew:
    """Workers of one group.

    Args:
        workers: Ray Train's ``Worker`` objects, by rank.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = list(workers)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self._workers))

    def node_id(self, rank: int) -> str:
        """Ray's name of the node of a rank."""
        return str(self._workers[rank].metadata.node_id)

    def names(self) -> dict[int, str]:
        """The same of all ranks, for people."""
        named = node_names()
        return {rank: named.get(self.node_id(rank), self.node_id(rank)[:12]) for rank in self.ranks}

    def pid(self, rank: int) -> int:
        """Number of the process of a rank, on its node."""
        return int(self._workers[rank].metadata.pid)

    def ask(self) -> dict[int, Look | None]:
        """What each rank answers; None for one that does not, or is dead."""
        refs = {worker.execute_async(look_around): r for r, worker in enumerate(self._workers)}
        found: dict[int, Look | None] = dict.fromkeys(self.ranks)
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ASK_S)
        for ref in ready:
            try:
                found[refs[ref]] = ray.get(ref)
            except RayError as error:
                logger.warning("rank %d cannot be asked where it is: %s", refs[ref], error)
        return found

    def outside(
        self, ranks: Iterable[int], *, look: bool = False, end: bool = False
    ) -> dict[int, str]:
        """Looks at processes on their nodes, or kills them there; what was found, by rank."""
        refs = {}
        for rank in ranks:
            where = NodeAffinitySchedulingStrategy(self.node_id(rank), soft=False)
            task = ray.remote(look_and_end).options(
                num_cpus=0, max_retries=0, scheduling_strategy=where
            )
            refs[task.remote(self.pid(rank), look=look, end=end)] = rank
        if not refs:
            return {}
        ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=OUTSIDE_S)
        found = {refs[ref]: f"no answer from the node within {OUTSIDE_S:g} s" for ref in late}
        for ref in ready:
            try:
                found[refs[ref]] = str(ray.get(ref))
            except RayError as error:
                found[refs[ref]] = f"the node could not be asked: {error}"
        for ref in late:
            ray.cancel(ref, force=True)
        return found

    def end(self, ranks: Iterable[int], silent: Iterable[int] = ()) -> None:
        """Ends the processes of some ranks.

        Args:
            ranks: whose.
            silent: those of them that do not answer: no call reaches a process that is stopped, its node does.
        """
        ranks = list(ranks)
        for rank in ranks:
            try:
                ray.kill(self._workers[rank].actor)
            except (RayError, ValueError) as error:
                logger.warning("rank %d could not be told to end: %s", rank, error)
        self.outside([rank for rank in silent if rank in ranks], end=True)


def step_worked_on(workers: Sequence[Any]) -> int:
    """The step that a group worked on when it failed, counted from 1; 0 when no worker of it can be asked.

    A worker whose training function has failed still answers, and so do those that waited for one that died.
    """
    refs = [worker.execute_async(_step) for worker in workers]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=STEP_S)
    steps = [0]
    for ref in ready:
        with suppress(RayError):  # the one that died
            steps.append(int(ray.get(ref)))
    return max(steps)


def _step() -> int:
    return HERE.now.step
