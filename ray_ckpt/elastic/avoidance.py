"""Keeps workers away from nodes that were suspected of hangs too often.

``on_controller_start_worker_group`` may return a label selector for the group, and ``{"ray.io/node-id": "!in(...)"}``
keeps it off nodes. Ray's elastic policy does not look at it, nor does its coordinator when it reserves. Tried with Ray
2.60 on three nodes with room for one worker each, one of them left out: it counts 3, asks for 3 workers that find no
place, waits for the start timeout, and asks for 3 again, without end. With
:func:`ray_ckpt.ray_private.count_without` the same run starts with 2 workers on the other nodes at once.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayError

from ray_ckpt.elastic.causes import node_names
from ray_ckpt.elastic.startmarks import WITHOUT_GROUP
from ray_ckpt.errors import RayCkptError
from ray_ckpt.policy.avoid import nodes_to_avoid, selector_without, slots_of
from ray_ckpt.ray_private import ControllerCallback, count_without
from ray_ckpt.tracker.client import RayTracker

logger = logging.getLogger(__name__)


class Avoidance(ControllerCallback):
    """Leaves nodes out of the groups of one run, in the controller's process.

    Args:
        run: name of the run, whose tracker knows how often each node was suspected.
        after: times after which a node is left out.
    """

    def __init__(self, run: str, after: int) -> None:
        self._run, self._after = run, after
        self._avoided: tuple[str, ...] = ()
        self._fewest, self._per_worker = 1, {"CPU": 1.0}

    @property
    def avoided(self) -> tuple[str, ...]:
        """Ray's names of the nodes that are left out now."""
        return self._avoided

    def after_controller_start(self, train_run_context: Any) -> None:
        scaling = train_run_context.scaling_config
        number = scaling.num_workers
        self._fewest = number[0] if isinstance(number, tuple) else number
        self._per_worker = dict(scaling.resources_per_worker or self._per_worker)
        count_without(lambda: self.avoided, self._slots)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        # Before the policy counts: when there is a new reason to look.
        if type(current_state).__name__ in WITHOUT_GROUP and previous_state is not current_state:
            self._look()

    def on_controller_start_worker_group(
        self, *, scaling_config: Any, num_workers: int
    ) -> dict[str, str] | None:
        return selector_without(self._avoided)

    def _slots(self) -> dict[str, int]:
        return {
            node["NodeID"]: slots
            for node in ray.nodes()
            if node["Alive"] and (slots := slots_of(node["Resources"], self._per_worker))
        }

    def _look(self) -> None:
        try:
            tracker = RayTracker(self._run)
            suspected = tracker.call("suspected")
            if not suspected and not self._avoided:
                return
            slots = self._slots()
            found = nodes_to_avoid(suspected, slots, fewest=self._fewest, after=self._after)
            if tuple(found) != self._avoided:
                self._tell(tracker, found, suspected)
            self._avoided = tuple(found)
        except (RayCkptError, RayError) as error:
            logger.warning("which nodes are to be left out cannot be told now: %s", error)

    def _tell(self, tracker: RayTracker, found: list[str], suspected: dict[str, int]) -> None:
        names = node_names()
        tracker.call(
            "exclude",
            nodes=found,
            names=[names.get(node, node[:12]) for node in found],
            times=[suspected[node] for node in found],
        )
