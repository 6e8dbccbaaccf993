"""Names of Ray that are not public, in one place.

Those of its dashboard are in :mod:`ray_ckpt.ray_dashboard`. Read in Ray 2.60.0. Each function checks that what it
needs exists, and goes without it, with a warning, when it does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

READ_IN = "2.60.0"


def session_logs_dir() -> Path | None:
    """The folder whose files the dashboard's Logs tab lists for this node; None when not to be found."""
    try:
        from ray._private.worker import _global_node

        if _global_node is not None:
            return Path(_global_node.get_logs_dir_path())
    except (ImportError, AttributeError) as error:
        _missing("ray._private.worker._global_node.get_logs_dir_path", error)
    return None


def _callback(name: str) -> type:
    """A base class of Ray Train's controller callbacks; without it nothing is called."""
    place = "ray.train.v2._internal.execution.callback"
    try:
        return getattr(import_module(place), name)
    except (ImportError, AttributeError) as error:
        from ray.train import UserCallback

        _missing(f"{place}.{name}", error)
        return UserCallback


def refresh_reservations() -> None:
    """Makes Ray Train's next look at the cluster a fresh one; its own view is up to 20 s old."""
    import ray

    try:
        name = "AutoscalingCoordinator"
        actor = ray.get_actor(name, namespace=name)
        ray.get(actor.get_reserved_resources.remote("ray_ckpt", recompute=True), timeout=10)
    except (ValueError, AttributeError, TypeError, ray.exceptions.RayError) as error:
        _missing("AutoscalingCoordinator.get_reserved_resources(recompute=True)", error)


def count_without(
    avoided: Callable[[], Collection[str]], slots: Callable[[], Mapping[str, int]]
) -> None:
    """Makes Ray Train's elastic policy, in this process, not count some nodes when it looks for room.

    A label selector keeps workers off nodes; the policy counts them all the same, and asks for a group that finds no
    place. Of the most workers it asks for as many more as those nodes could hold: they may be given to it.

    Args:
        avoided: Ray's names of the nodes.
        slots: node to how many workers it has room for.
    """
    place = "ray.train.v2._internal.execution.scaling_policy.elastic"
    try:
        policy = import_module(place).ElasticScalingPolicy
        count, ask = policy._count_possible_workers, policy._get_num_workers_for_resource_request
    except (ImportError, AttributeError) as error:
        _missing(f"{place}.ElasticScalingPolicy", error)
        return

    def counted(self: Any, reserved_resources: Any) -> int:
        without = avoided()
        left = {node: have for node, have in reserved_resources.items() if node not in without}
        return int(count(self, left))

    def asked(self: Any) -> int:
        without = avoided()
        more = sum(slots().get(node, 0) for node in without) if without else 0
        return int(ask(self)) + more

    policy._count_possible_workers = counted
    policy._get_num_workers_for_resource_request = asked


def quiet_reports() -> None:
    """Keeps the line that a worker logs of each report out of the job's log; the journal has them.

    The name of that logger is a path, not below ``ray.train``: ``LoggingConfig`` does not reach it.
    """
    place = "ray.train.v2._internal.execution.context"
    try:
        import_module(place).logger.setLevel(logging.WARNING)
    except (ImportError, AttributeError) as error:
        _missing(f"{place}.logger", error)


def _missing(name: str, error: Exception) -> None:
    import ray

    logger.warning(
        "%s is not there in Ray %s (read in %s): %s. The feature that uses it is off.",
        name,
        ray.__version__,
        READ_IN,
        error,
    )


ControllerCallback: Any = _callback("ControllerCallback")
WorkerGroupCallback: Any = _callback("WorkerGroupCallback")
