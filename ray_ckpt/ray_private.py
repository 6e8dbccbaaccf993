"""Names of Ray that are not public, in one place.

Those of its dashboard are in :mod:`ray_ckpt.ray_dashboard`. Read in Ray 2.60.0. Each function checks that what it
needs exists, and goes without it, with a warning, when it does not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ray_ckpt.errors import LeavingError

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


def placement_groups() -> set[str]:
    """The placement groups of this job that hold, or wait for, resources."""
    import ray
    from ray.util import placement_group_table

    job = ray.get_runtime_context().get_job_id()
    found = placement_group_table()
    # The id of a placement group ends with that of its job.
    return {name for name, row in found.items() if name.endswith(job) and row["state"] != "REMOVED"}


def release(groups: Collection[str]) -> None:
    """Gives back what placement groups hold whose maker is gone."""
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    try:
        from ray._raylet import PlacementGroupID

        for name in groups:
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
    except (ImportError, TypeError, ValueError, AttributeError) as error:
        _missing("ray._raylet.PlacementGroupID", error)


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


def draining_nodes() -> dict[str, float | None]:
    """Nodes that will be taken away, and when: seconds since the epoch, None when nobody said."""
    try:
        from ray._private.state import state

        found = state.get_draining_nodes()
    except (ImportError, AttributeError) as error:
        _missing_once("ray._private.state.state.get_draining_nodes", str(error))
        return {}
    return {
        node: deadline_ms / 1000 if deadline_ms else None for node, deadline_ms in found.items()
    }


def _elastic_policy() -> Any:
    """Ray Train's policy of how many workers a run has, to be extended; None when it is another one."""
    place = "ray.train.v2._internal.execution.scaling_policy"
    try:
        module = import_module(place)
        policy = module.ElasticScalingPolicy
        for name in _POLICY_METHODS:
            getattr(policy, name)
        return policy, module.NoopDecision
    except (ImportError, AttributeError) as error:
        _missing(f"{place}.ElasticScalingPolicy", error)
        return None, None


# What an extension of it overrides or calls.
_POLICY_METHODS = (
    "_count_possible_workers",
    "_get_reserved_resources",
    "_get_num_workers_for_resource_request",
    "_get_resize_decision",
    "_send_resource_request",
    "_maybe_send_resource_request",
    "make_decision_for_running_worker_group",
)


def set_scaling_policy(trainer: Any, make: Callable[[Any], Any]) -> bool:
    """Has a trainer decide by another policy how many workers it has; False when that cannot be.

    ``TorchTrainer`` takes none: it makes its own when it starts, and hands it to the controller there.

    Args:
        trainer: that is not yet started.
        make: from ``ScalingConfig`` to the policy.
    """
    name = "_initialize_and_run_controller"
    start = getattr(trainer, name, None)
    if start is None or ElasticScalingPolicy is None:
        _missing(f"{type(trainer).__name__}.{name}", AttributeError(name))
        return False

    def start_with(**kwargs: Any) -> Any:
        if isinstance(kwargs.get("scaling_policy"), ElasticScalingPolicy):
            kwargs["scaling_policy"] = make(kwargs["scaling_policy"].scaling_config)
        elif "scaling_policy" not in kwargs:
            _missing(f"{name}(scaling_policy=...)", TypeError("no such argument"))
        return start(**kwargs)

    setattr(trainer, name, start_with)
    return True


def quiet_reports() -> None:
    """Keeps the line that a worker logs of each report out of the job's log; the journal has them.

    The name of that logger is a path, not below ``ray.train``: ``LoggingConfig`` does not reach it.
    """
    place = "ray.train.v2._internal.execution.context"
    try:
        import_module(place).logger.setLevel(logging.WARNING)
    except (ImportError, AttributeError) as error:
        _missing(f"{place}.logger", error)


def short_leaving() -> None:
    """Has a worker that leaves as planned log that in one line: Ray Train logs a traceback, as of a failure."""
    place = "ray.train.v2._internal.util"
    try:
        import_module(place).logger.addFilter(_shorten)
    except (ImportError, AttributeError) as error:
        _missing(f"{place}.logger", error)


def _shorten(record: logging.LogRecord) -> bool:
    *_, last = str(record.msg).strip().splitlines() or [""]
    name, _, reason = last.partition(": ")
    if name.endswith(f".{LeavingError.__name__}"):
        record.msg, record.args = reason, ()
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


@functools.cache
def _missing_once(name: str, problem: str) -> None:
    """For what asks all the time."""
    _missing(name, AttributeError(problem))


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
ElasticScalingPolicy, NoopDecision = _elastic_policy()
