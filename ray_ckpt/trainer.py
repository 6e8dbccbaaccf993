"""From options to a finished run: checks, cluster, tracker, ``TorchTrainer``, and the last words.

Everything that can be refused is refused before a worker starts, and before anything on disk changes.
"""

from __future__ import annotations

import functools
import math
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ray_ckpt import ray_dashboard
from ray_ckpt.checkpoint.signature import take
from ray_ckpt.clocks import Instant, submitted
from ray_ckpt.config import DEFAULT_HOME, Config, absolute_folder
from ray_ckpt.data.catalog import Index, MixedIndex, parse_sources
from ray_ckpt.data.mixture import MixedOrder, Order
from ray_ckpt.data.own import OwnIndex
from ray_ckpt.errors import ConfigError, RayCkptError
from ray_ckpt.facts import check_run, index_of, order_of, tracker_options
from ray_ckpt.local_ray import cluster
from ray_ckpt.tiers.durable import durable_entries, remote_of
from ray_ckpt.tiers.remote_records import pull_records
from ray_ckpt.tracker.client import RayTracker
from ray_ckpt.tracker.core import RunFacts
from ray_ckpt.tracker.identity import read_record
from ray_ckpt.tracker.lock import RunLock
from ray_ckpt.tracker.recall import recall
from ray_ckpt.view.summary import snapshot_problem, summary

C = TypeVar("C", bound=Config)

_FAREWELL_S = 5.0  # a tracker that does not answer is ended all the same


def resolve(config: C) -> C:
    """Fills in what depends on the machine: absolute folders, the default data folder.

    Args:
        config: of the run, in the program that starts it.

    Returns:
        The same options for :func:`run`.

    Raises:
        ConfigError: a folder that a job cannot use.
    """
    storage = absolute_folder(config.storage, "--storage")
    # The training function's own dataset is in no folder.
    sources = config.sources or (() if config.samples else parse_sources([default_data(config)]))
    data = (str(replace(s, path=absolute_folder(s.path, "--data"))) for s in sources)
    init_from = config.init_from and absolute_folder(config.init_from, "--init-from")
    return replace(config, storage=storage, data=tuple(data), init_from=init_from)


def default_data(config: Config) -> str:
    """Where the default data is: text that is on every machine, in rows of the run's length."""
    name = f"stdlib-{platform.python_version()}-{config.seq_len}"
    return str(Path(DEFAULT_HOME).expanduser() / "data" / name)


def run(
    config: C,
    train: Callable[[C], None],
    *,
    identity: Mapping[str, Any] | None = None,
    prepare: Callable[[C], Any] | None = None,
) -> int:
    """Trains until the last step, through whatever happens in between.

    Args:
        config: resolved options of the run (see :func:`resolve`).
        train: the training function; called on every worker with ``config``.
        identity: more options that must stay the same for the life of the run, by name.
        prepare: makes the default data, when its folder is missing or empty.

    Returns:
        Exit code: 0 when the run is complete.

    Raises:
        ConfigError: a mistake in the options, or something in them or the function that cannot be sent to workers.
        StorageError: the run's folder cannot be used.
        RayCkptError: the run could not go on, or the training function ended before its last step was committed.
    """
    begun = submitted()
    take()  # from here on no process that is started inherits a key
    # Only one folder can be what is prepared: those of a mixture must be there.
    sources = config.sources
    default = len(sources) == 1 and sources[0].path == default_data(config)
    # Nor does a mistyped path mean "train on the default text".
    unprepared = prepare is not None and default and _is_empty(sources[0].path)
    with ExitStack() as held:
        # Before anything of a run is looked at or mended: another driver may be at work. A new run has no folder yet,
        # and gets none before its options were checked.
        lock = (
            held.enter_context(closing(RunLock(config.run_dir)))
            if config.run_dir.is_dir()
            else None
        )
        _fetch_records(config)
        if not unprepared:
            facts = check_run(config, identity or {})  # before a cluster is started for nothing
            if _complete(config):
                return 0
        lock = lock or held.enter_context(closing(RunLock(config.run_dir)))
        num_cpus = math.ceil(config.worker_range[1] * config.elastic.cpus_per_worker)
        _check_sendable(config, train)
        with cluster(num_cpus) as context:
            if prepare is not None and unprepared:
                prepare(config)
                facts = check_run(config, identity or {})
            print(_opening(config, context), flush=True)
            return _fit(config, train, facts, begun, lock)


def _check_sendable(config: Config, train: Callable[..., None]) -> None:
    """Refuses what cannot travel to the workers, before any of them is waited for.

    Raises:
        ConfigError: names the field of the options, or the function.
    """
    from ray import cloudpickle

    given = {f"config.{field.name}": getattr(config, field.name) for field in fields(config)}
    for what, value in {**given, f"the training function {train!r}": train}.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # any: objects say in their own way that they cannot be pickled
            raise ConfigError(
                f"{what} cannot be sent to the workers ({type(error).__name__}: {error}). Locks, open files, sockets "
                "and the like belong to one process: make them inside of the training function."
            ) from error


def _trainer(config: C, train: Callable[[C], None]) -> Any:
    """A trainer for one controller of Ray Train."""
    import ray
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ray_ckpt.elastic.callbacks import make_callbacks
    from ray_ckpt.elastic.sizing import Sizing
    from ray_ckpt.elastic.spares import warm_environment
    from ray_ckpt.ray_private import set_scaling_policy

    elastic, workers = config.elastic, config.worker_range
    # Again, now that the lock is ours: a driver that was killed may have deleted a checkpoint since the first look,
    # and Ray refuses to start on a list that names it.
    problem = snapshot_problem(config.run_dir)
    if problem:
        print(problem, flush=True)
    gpu = elastic.gpu == "yes" or (
        elastic.gpu == "auto" and ray.cluster_resources().get("GPU", 0) >= workers[0]
    )
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers if workers[0] != workers[1] else workers[0],
            use_gpu=gpu,
            resources_per_worker={"CPU": elastic.cpus_per_worker} | ({"GPU": 1} if gpu else {}),
            elastic_resize_monitor_interval_s=elastic.resize_check_s,
        ),
        run_config=RunConfig(
            name=config.run,
            storage_path=config.storage,
            # Ray's budget counts every failure of weeks; ours counts attempts that got nowhere.
            failure_config=FailureConfig(max_failures=-1),
            callbacks=make_callbacks(
                config.run,
                save_timeout_s=config.saving.timeout_s,
                node_loss_wait_s=elastic.node_loss_wait_s,
                run_dir=config.run_dir,
                hang_rule=elastic.hang_rule(),
                exclude_after=elastic.exclude_after,
                spare_after_s=elastic.spare_after_s,
            ),
            worker_runtime_env=warm_environment() if elastic.spare_after_s else {},
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )
    if workers[0] != workers[1]:
        set_scaling_policy(
            trainer,
            lambda scaling: Sizing(
                scaling,
                run=config.run,
                sizes=config.preferred_sizes,
                micro_batches=config.global_batch // config.micro_batch,
                check_s=elastic.resize_check_s,
            ),
        )
    return trainer


def _fit(
    config: C, train: Callable[[C], None], facts: RunFacts, begun: Instant, lock: RunLock
) -> int:
    import ray

    from ray_ckpt.refit import fit_through_lost_controllers
    from ray_ckpt.stopping import Stopped, fit_until_stopped
    from ray_ckpt.tracker.actor import start_tracker
    from ray_ckpt.view.narrator import Narrator

    # The controller reads these from its environment; Ray hands them on from the driver's.
    os.environ.setdefault(
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(config.elastic.start_timeout_s)
    )
    os.environ.setdefault(
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", f"{_poll_s(config.worker_range[1]):g}"
    )
    # Ray's own watcher of drains waits for the deadline and restarts then; ours saves, and restarts before.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    lock.close()  # for the tracker, which holds it from here on
    handle = start_tracker(facts, tracker_options(config), begun)
    tracker = RayTracker(config.run, handle)
    tracker.call("alive")
    how, make = "failed", functools.partial(_trainer, config, train)
    try:
        with Narrator(tracker, config.steps, config.log_every):
            fit_until_stopped(lambda: fit_through_lost_controllers(make, tracker), tracker)
        _check_finished(config)
        how = "finished"
    except Stopped as stopped:
        how = "stopped"
        print(
            f"stopped by {stopped}; the same command goes on.\n{summary(config.run_dir)}",
            flush=True,
        )
        return 128 + stopped.number
    except ray.train.TrainingFailedError as error:
        cause = str(getattr(error, "controller_failure", error))
        raise RayCkptError(
            f"run {config.run!r} stopped: {cause.removeprefix('the run stops: ')}\nWhat there is: ray-ckpt ls "
            f"{config.run_dir}. The same command goes on from the newest checkpoint that is whole."
        ) from error
    finally:
        with suppress(ray.exceptions.RayError):  # it may be gone
            ray.get(handle.ended.remote(how), timeout=_FAREWELL_S)
        ray.kill(handle)
    print(summary(config.run_dir), flush=True)
    return 0


def _poll_s(most_workers: int) -> float:
    """Time between two looks of Ray Train's controller at its workers, seconds: soon, but no load for a large group."""
    return min(2.0, max(0.5, most_workers / 100))


def _check_finished(config: Config) -> None:
    """A training function may end without a word before its run does.

    Raises:
        RayCkptError: it did not close its session at the last step.
    """
    memory = recall(config.run_dir)
    if memory.finished_step != config.steps:
        raise RayCkptError(
            f"the training function of run {config.run!r} ended, and the run is not finished: the newest checkpoint "
            f"is of step {memory.last_commit_step or 0} of {config.steps}. It left the loop over session.batches() "
            "before its end, or did not call session.close() after it. The same command goes on from there."
        )


def _fetch_records(config: Config) -> None:
    """What a run has on record, from the object store to a machine that has nothing of it."""
    tier = remote_of(config.tiers.stack(), config.run_dir)
    if tier is None or read_record(config.run_dir) is not None:
        return
    if names := pull_records(tier, config.run_dir):
        print(f"fetched {', '.join(names)} of run {config.run!r} from {tier.where}", flush=True)


def _complete(config: Config) -> bool:
    """Whether the run reached its last step before; says so."""
    entries = durable_entries(config.tiers.stack(), config.run_dir)
    newest = next((entry for entry in entries if entry.usable), None)
    if newest is None or newest.step < config.steps:
        return False
    if newest.step > config.steps:
        raise ConfigError(
            f"run {config.run!r} is at step {newest.step}, after the last step that --steps {config.steps} "
            "asks for. Give more steps, or another --run name."
        )
    print(f"run {config.run!r} is complete: step {newest.step} of {config.steps}.")
    print(summary(config.run_dir), flush=True)
    return True


def _is_empty(folder: str) -> bool:
    path = Path(folder)
    return not path.is_dir() or not any(path.iterdir())


def _opening(config: Config, context: Any) -> str:
    index = index_of(config)
    url = getattr(context, "dashboard_url", None)
    lines = [
        f"run {config.run!r}: {config.steps} steps of {config.global_batch} samples, workers {config.workers}, "
        f"{config.parallel}",
        *_describe(config, index, order_of(index, config)),
        f"storage {config.run_dir}",
    ]
    if url:
        lines.append(
            f"dashboard http://{url} (actor ray_ckpt.tracker:{config.run}, Logs: ray_ckpt-{config.run}.log)"
        )
        path = ray_dashboard.page_path()
        if not path and not os.environ.get("RAY_ADDRESS") and ray_dashboard.status().enabled:
            path = ray_dashboard.PAGE_PATH  # of a Ray of its own, whose dashboard just starts
        if path:
            lines.append(f"checkpoints http://{url}{path}")
    return "\n".join(lines)


def _describe(config: Config, index: Index | OwnIndex, order: Order) -> list[str]:
    """The lines about the data: one, or one for each source of a mixture."""
    if isinstance(index, OwnIndex):
        return [
            f"data of the training function: {index.num_rows} samples, {config.global_batch} a step"
        ]
    if not isinstance(index, MixedIndex) or not isinstance(order, MixedOrder):
        assert not isinstance(order, MixedOrder)
        return [
            f"data {config.sources[0].path}: {index.num_rows} rows, {order.steps_per_epoch} steps an epoch, "
            f"{order.dropped_rows} rows left out of each"
        ]
    lines = [f"data: {len(index.sources)} sources, mixed in every {order.block_rows} rows"]
    for number, (source, part) in enumerate(zip(index.sources, order.parts, strict=True)):
        lines.append(
            f"  {source.name} {source.path}: {part.num_rows} rows, "
            f"{source.weight / order.block_rows:.2%} of the samples, "
            f"{order.epoch_steps(number):.1f} steps an epoch, {part.dropped_rows} rows left out of each"
        )
    return lines
