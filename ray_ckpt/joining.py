"""How a training function joins its run: below Ray Train, or in a program that started ``torch.distributed`` itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.clocks import submitted
from ray_ckpt.config import Config
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import check_run, tracker_options
from ray_ckpt.ray_private import quiet_reports, short_leaving
from ray_ckpt.session import Session
from ray_ckpt.tracker.aside import Thread
from ray_ckpt.tracker.core import TrackerCore
from ray_ckpt.tracker.lock import RunLock
from ray_ckpt.warm import settle

_NOWHERE = (
    "attach() joins a training function of Ray Train, or a program that has called "
    "torch.distributed.init_process_group(): start the function with ray_ckpt.run(config, train), or call "
    "init_process_group() first."
)

_stand_in: ContextVar[Session | None] = ContextVar("ray_ckpt_stand_in", default=None)


@contextmanager
def standing_in(session: Session) -> Iterator[None]:
    """Within the block ``attach()`` gives this session: a training function is run for something else than training."""
    token = _stand_in.set(session)
    try:
        yield
    finally:
        _stand_in.reset(token)


def attach(config: Config) -> Session:
    """Joins a training function to its run; every worker calls it once, first of all.

    Below Ray Train the run's tracker is an actor. In a program that started ``torch.distributed`` itself (``torchrun``,
    say) it lives in the process of rank 0: all works but what needs Ray, such as another number of workers without
    a new start.

    Args:
        config: the one that the training function was called with, the same on every worker.

    Returns:
        This worker's session; it lives as long as the training function.

    Raises:
        RuntimeError: neither Ray Train nor ``torch.distributed`` is there.
        ConfigError: without Ray: the options contradict the data, the run's record, or need Ray.
        StorageError: the run's folder cannot be used, or its tracker is gone.
    """
    stand_in = _stand_in.get()
    if stand_in is not None:
        return stand_in
    settle()
    import ray
    import ray.train
    import ray.train.torch

    from ray_ckpt.tracker.client import RayTracker

    if not ray.is_initialized():
        return _attach_alone(config)
    try:
        context = ray.train.get_context()
    except RuntimeError:
        return _attach_alone(config)  # this program uses Ray for something else, or is the driver
    quiet_reports()
    short_leaving()
    rank = context.get_world_rank()
    nodes: list[Any] = [None] * context.get_world_size()
    node = ray.get_runtime_context().get_node_id()
    dist.all_gather_object(nodes, node)
    return Session(
        config,
        tracker=RayTracker(config.run) if rank == 0 else None,
        device=ray.train.torch.get_device(),
        nodes=nodes,
        node=node,
        check=lambda generation: RayTracker(config.run).call("check", generation=generation),
    )


def _attach_alone(config: Config) -> Session:
    from ray_ckpt.tracker.client import LocalTracker

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(_NOWHERE)
    if config.tiers.stack().node_tiers:
        raise ConfigError(
            f"--tiers.use {' '.join(config.tiers.use)}: copies on the nodes are held by actors of Ray, and there is no "
            "Ray here. Use --tiers.use durable, or start the function with ray_ckpt.run(config, train)."
        )
    # Nobody reads ahead, and nobody is told of commits: both are Ray's.
    config = replace(
        config,
        reading=replace(config.reading, feed="local"),
        saving=replace(config.saving, report_to_ray=False),
    )
    tracker = None
    if dist.get_rank() == 0:
        facts = check_run(config, {})
        lock = RunLock(config.run_dir)
        core = TrackerCore(facts, tracker_options(config), aside=Thread("housekeeping"))
        core.announce(submitted())
        tracker = LocalTracker(core, lock)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    return Session(config, tracker=tracker, device=device)
