"""How many workers the next group has, and when the present one gives way to a larger: Ray's elastic policy, taught.

Ray's own (``ElasticScalingPolicy``, read in Ray 2.60) counts nodes that are dead for up to 20 s, or are being drained,
and restarts for each new node at once. Here only nodes that stay are counted, and whether a run that trains grows is
the tracker's decision (:mod:`ray_ckpt.policy.resize`). Without that class Ray decides, as it does by default.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from ray_ckpt.errors import RayCkptError
from ray_ckpt.policy.resize import usable
from ray_ckpt.ray_private import (
    ElasticScalingPolicy,
    NoopDecision,
    draining_nodes,
    refresh_reservations,
)
from ray_ckpt.tracker.client import RayTracker

logger = logging.getLogger(__name__)

# Between looks while the cluster offers more than the run has, seconds.
CLOSE_LOOK_S = 1.0
# The same while it has no room for a group. Ray's controller would ask again at once, and keep a processor and the head
# busy, on which the nodes that are waited for have to start.
NO_ROOM_S = 0.25


def staying(
    reserved: Mapping[str, Any], living: Collection[str], draining: Collection[str]
) -> dict[str, Any]:
    """What is reserved on nodes that live and stay."""
    return {
        node: what for node, what in reserved.items() if node in living and node not in draining
    }


def room(resources: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """For how many workers a node has room."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    return min((int(resources.get(name, 0.0) // need) for name, need in needs.items()), default=0)


class Looks:
    """When to look at what the cluster offers.

    Args:
        period_s: between looks while nothing changes, seconds.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last_s = 0.0
        self._closely = False

    def due(self, now_s: float, group_since_s: float) -> bool:
        """Whether it is time, and then the last look is now."""
        period_s = min(CLOSE_LOOK_S, self._period_s) if self._closely else self._period_s
        if now_s - max(self._last_s, group_since_s) < period_s:
            return False
        self._last_s = now_s
        return True

    def saw(self, more: bool) -> None:
        """What the look showed: while there is more than the run has, the next look is soon."""
        self._closely = more


class _Named:
    """The context of a run for Ray's policy, under another id."""

    def __init__(self, context: Any, run_id: str) -> None:
        self._context, self.run_id = context, run_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Sizing(ElasticScalingPolicy or object):  # type: ignore[misc]
    """The policy of one run.

    Args:
        scaling_config: of the trainer.
        run: name of the run, whose tracker decides.
        sizes: preferred numbers of workers.
        micro_batches: of a global batch.
        check_s: between looks at what the cluster offers, seconds.
    """

    def __init__(
        self,
        scaling_config: Any,
        *,
        run: str,
        sizes: tuple[int, ...],
        micro_batches: int,
        check_s: float,
    ) -> None:
        super().__init__(scaling_config)
        self._run, self._sizes, self._micro_batches = run, sizes, micro_batches
        self._looks = Looks(check_s)
        self._living: frozenset[str] = frozenset()  # nodes, at the last look
        self._going: frozenset[str] = frozenset()  # those that are drained
        self._room_there = 0

    def after_controller_start(self, train_run_context: Any) -> None:
        # Ray reserves under a name that is new for each controller, and what one that died has reserved stays so for
        # three minutes: the next one, of this job or of the next, would wait for it. Under the run's name it takes it
        # over, and there is but one controller at a time: a run has one driver.
        super().after_controller_start(_Named(train_run_context, f"ray_ckpt:{self._run}"))

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible = self._possible(reserved_resources)
        return usable(possible, self._sizes, self._micro_batches)

    def _get_num_workers_for_resource_request(self) -> int:
        # What is reserved is as much as is asked for. Of that a part is on nodes that go: so much more is asked for,
        # and where there are spare nodes the next group is as large as this one.
        return int(super()._get_num_workers_for_resource_request()) + self._room_there

    def _nodes_changed(self) -> bool:
        try:
            living = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        except Exception:
            logger.warning("the cluster could not be asked for its nodes", exc_info=True)
            return False
        before, self._living = self._living, living
        return before not in (frozenset(), living)

    def _look_who_goes(self) -> None:
        try:
            going = frozenset(draining_nodes())
            if going == self._going:
                return
            per_worker = self.scaling_config._resources_per_worker_not_none
            self._room_there = sum(
                room(node["Resources"], per_worker)
                for node in ray.nodes()
                if node["NodeID"] in going and node["Alive"]
            )
            self._going = going
        except Exception:
            logger.warning("the cluster could not be asked which nodes go", exc_info=True)
            return
        self._send_resource_request()

    def _possible(self, reserved: Mapping[str, Any]) -> int:
        try:
            living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            reserved = staying(reserved, living, draining_nodes())
        except Exception:
            # What is raised in a policy ends the run; a count that is 20 s old costs one start in vain.
            logger.warning("the cluster could not be asked which nodes stay", exc_info=True)
        return int(super()._count_possible_workers(reserved))

    def make_decision_for_non_running_worker_group(self) -> Any:
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, NoopDecision):
            time.sleep(NO_ROOM_S)
        return decision

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> Any:
        self._look_who_goes()
        self._maybe_send_resource_request()
        now = time.monotonic()
        if not self._looks.due(now, worker_group_state.start_time):
            return NoopDecision()
        if self._nodes_changed():
            refresh_reservations()  # or a new node would be seen up to 20 s late
        reserved = self._get_reserved_resources()
        if reserved is None:
            return NoopDecision()
        possible, workers = self._possible(reserved), worker_group_state.num_workers
        self._looks.saw(possible > workers)
        if possible <= workers:
            # A group on a node that is dead ends by its errors, and one on a node that is drained when it is time:
            # here it becomes smaller only where its resources were given to others.
            possible = min(workers, int(super()._count_possible_workers(reserved)))
        if possible < self.scaling_config.min_workers:
            return NoopDecision()
        size = self._decide(possible, workers)
        return NoopDecision() if size == workers else self._get_resize_decision(size)

    def _decide(self, possible: int, workers: int) -> int:
        try:
            resizing = RayTracker(self._run).call("resize", possible=possible, workers=workers)
        except (RayCkptError, RayError) as error:
            logger.warning("the tracker could not be asked about %d workers: %s", possible, error)
            return workers
        return int(resizing.workers)
