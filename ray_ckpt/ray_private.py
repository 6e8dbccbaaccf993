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
    start, policy = getattr(trainer, name, None), _elastic_policy()[0]
    if start is None or policy is None:
        _missing(f"{type(trainer).__name__}.{name}", AttributeError(name))
        return False

    def start_with(**kwargs: Any) -> Any:
        if isinstance(kwargs.get("scaling_policy"), policy):
            kwargs["scaling_policy"] = make(kwargs["scaling_policy"].scaling_config)
        elif "scaling_policy" not in kwargs:
            _missing(f"{name}(scaling_policy=...)", TypeError("no such argument"))
        return start(**kwargs)

    setattr(trainer, name, start_with)
    return True


def setup_hook_variable() -> str:
    """Variable that names what each worker process of a runtime environment calls first; empty when Ray has none.

    Ray offers the field ``worker_process_setup_hook`` for whole jobs only; for single actors there is the variable.
    """
    try:
        from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR as NAME
    except ImportError as error:
        _missing("ray._private.ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR", error)
        return ""
    return str(NAME)


def prestart_workers(
    address: str, *, job_id: str, runtime_env: str, number: int, keep_s: int, timeout_s: float
) -> bool:
    """Has a node start worker processes that wait for an actor of this runtime environment; False if it does not.

    Ray gives an actor an idle process that has never run anything, if its job and its runtime environment are the same;
    it starts one when there is none. The node's own call for starting some ahead has no Python name.

    Args:
        address: of the node's raylet, HOST:PORT.
        job_id: of the job, in hex.
        runtime_env: as an actor has it (``get_runtime_env_string()``), to the letter.
        number: of processes.
        keep_s: for how long the node keeps them idle at least, seconds.
        timeout_s: longest wait for its answer, seconds.
    """
    try:
        import grpc  # type: ignore[import-untyped]
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.utils import get_runtime_env_info
        from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
        from ray.core.generated.common_pb2 import Language
        from ray.runtime_env import RuntimeEnv

        info = get_runtime_env_info(RuntimeEnv.deserialize(runtime_env))
        # Written anew it could have its fields in another order, and be another one for Ray.
        info.serialized_runtime_env = runtime_env
        request = node_manager_pb2.PrestartWorkersRequest(
            language=Language.Value("PYTHON"),
            job_id=bytes.fromhex(job_id),
            runtime_env_info=info,
            keep_alive_duration_secs=keep_s,
            num_workers=number,
        )
        channel = init_grpc_channel(address)
        call = node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _missing("NodeManagerService.PrestartWorkers", error)
        return False
    try:
        call(request, timeout=timeout_s)
    except grpc.RpcError as error:
        logger.warning("node %s starts no spare processes: %s", address, error)
        return False
    finally:
        channel.close()
    return True


def counts_of(executor: Any) -> tuple[int, ...] | None:
    """What the operators of a dataset's executor have done so far, as numbers that only grow; None if not to be told.

    Tasks begun and ended, and blocks made and handed on.
    """
    try:
        done = [operator.metrics for operator in executor._topology]
        return tuple(
            number
            for each in done
            for number in (
                each.num_tasks_submitted,
                each.num_tasks_finished,
                each.num_task_outputs_generated,
                each.num_outputs_taken,
            )
        )
    except AttributeError as error:
        _missing_once("StreamingExecutor._topology, OpRuntimeMetrics", str(error))
        return None


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


def __getattr__(name: str) -> Any:
    """The classes of Ray Train that are extended, when they are asked for: it takes longer to load than the rest."""
    if name in ("ControllerCallback", "WorkerGroupCallback"):
        globals()[name] = _callback(name)
    elif name in ("ElasticScalingPolicy", "NoopDecision"):
        globals().update(
            zip(("ElasticScalingPolicy", "NoopDecision"), _elastic_policy(), strict=True)
        )
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
