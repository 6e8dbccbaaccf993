"""What an attempt trains on, step by step: through which feed, and past the holes in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ray_ckpt.config import Config
from ray_ckpt.data.catalog import Index
from ray_ckpt.data.feed import Feed, LocalFeed, MicroBatch, RayFeed, Transform
from ray_ckpt.data.mixture import Order
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.own import MakeLoader, OwnFeed, OwnIndex
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.replaced import RecordedFeed
from ray_ckpt.errors import ConfigError
from ray_ckpt.segment import Segment
from ray_ckpt.skips import Skip, stretches


def make_feed(
    config: Config,
    *,
    index: Index | OwnIndex,
    order: Order,
    plan: BatchPlan,
    transform: Transform | None,
    loader: MakeLoader | None,
    generation: int,
    steps_before: int,
) -> Feed:
    """The feed of one rank in one attempt.

    Args:
        config: of the run.
        index: of the data.
        order: of the samples.
        plan: which micro-batches are this rank's.
        transform: applied while reading, None for nothing.
        loader: makes the loader of a dataset of the training function's own; None for data that is read here.
        generation: of the attempt.
        steps_before: steps of the run before the order's first.

    Raises:
        ConfigError: a loader for data that is read here, or none for data that is not.
    """
    if isinstance(index, OwnIndex):
        if loader is None:
            raise ConfigError(
                f"--samples {index.num_rows}: the samples are the training function's own, so give batches() what "
                "loads them: batches(loader=lambda sampler: DataLoader(dataset, batch_sampler=sampler)). Or name a "
                "folder with --data, in place of --samples."
            )
        if transform is not None:
            raise ConfigError(
                "batches(transform=...) changes rows of --data; with --samples the loader does that itself."
            )
        assert isinstance(order, GlobalOrder)
        return OwnFeed(order=order, plan=plan, make=loader)
    if loader is not None:
        raise ConfigError(
            "batches(loader=...): the run reads --data. To train on a dataset of your own, give --samples its length "
            "(Config(samples=len(dataset))) and leave out --data."
        )
    reading = config.reading
    feed: Feed
    if reading.feed == "local":
        feed = LocalFeed(
            index=index,
            order=order,
            plan=plan,
            transform=transform,
            on_corrupt=reading.on_corrupt,
        )
    else:
        feed = RayFeed(
            index=index,
            order=order,
            plan=plan,
            rows_per_task=reading.rows_per_task,
            read_tasks=reading.read_tasks,
            prefetch_batches=reading.prefetch_batches,
            transform=transform,
            on_corrupt=reading.on_corrupt,
        )
    if reading.on_corrupt == "fatal":
        return feed
    return RecordedFeed(
        feed=feed,
        index=index,
        order=order,
        run_dir=config.run_dir,
        facts={"rank": plan.rank, "generation": generation},
        steps_before=steps_before,
    )


def steps_of(
    feed: Feed, segment: Segment, skips: Sequence[Skip], start: int, stop: int
) -> Iterator[list[MicroBatch]]:
    """This rank's micro-batches of each step of an attempt.

    Args:
        feed: in the order of the segment.
        segment: that the attempt trains in.
        skips: holes in its order, in steps of the run.
        start: steps of the run before the first one.
        stop: last step of the run.
    """
    own_step = segment.own_step  # an order counts from the start of its segment
    holes = [replace(skip, from_step=own_step(skip.from_step)) for skip in skips]
    stretch = stretches(own_step(start), own_step(stop), holes)
    return chain.from_iterable(feed.steps(*each) for each in stretch)
