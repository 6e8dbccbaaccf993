"""What an attempt trains on, step by step: through which feed, and past the holes in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ray_ckpt.config import Config
from ray_ckpt.data.catalog import Index
from ray_ckpt.data.feed import Feed, LocalFeed, MicroBatch, RayFeed, Transform
from ray_ckpt.data.mixture import Order
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.replaced import RecordedFeed
from ray_ckpt.segment import Segment
from ray_ckpt.skips import Skip, stretches


def make_feed(
    config: Config,
    *,
    index: Index,
    order: Order,
    plan: BatchPlan,
    transform: Transform | None,
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
        generation: of the attempt.
        steps_before: steps of the run before the order's first.
    """
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
