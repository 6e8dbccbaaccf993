"""Data that the training function brings itself: images, texts of any length, whatever has a number and a length.

A run knows such a dataset by its length (``--samples``): the order of its samples is arithmetic, like that of rows of
tokens, and so is the place where a resume goes on. What a sample is, only the training function knows. It makes the
loader, with torch's own ``DataLoader`` or any other that takes a batch sampler, and the session says which samples
come next::

    for batch in session.batches(loader=lambda sampler: DataLoader(dataset, batch_sampler=sampler, num_workers=4)):
        for micro in batch:
            images, labels = micro.data

What the loader has fetched ahead is nobody's position: the position is what was trained, and the session keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ray_ckpt.data.assemble import MicroBatch
from ray_ckpt.data.index import DataError, combined_fingerprint
from ray_ckpt.data.order import GlobalOrder, Int64s
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.sampler import GlobalOrderIterator, GlobalOrderSampler
from ray_ckpt.errors import ConfigError

# Up to so many samples the shuffle is uniform over the epoch, at 24 bytes a sample and epoch. Of more, neighbours in
# the dataset stay within a window of each other.
MAX_GROUPS = 1 << 22
WINDOW_GROUPS = 1024

MakeLoader = Callable[[GlobalOrderSampler], Iterable[Any]]
"""Makes a loader from the batch sampler: one item of it for each batch of indices, in order."""


def dataset_order(
    num_samples: int, *, global_batch: int, micro_batch: int, seed: int = 0
) -> GlobalOrder:
    """The global order of a map-style dataset: which sample is trained at which position.

    Args:
        num_samples: length of the dataset, at least a global batch.
        global_batch: samples per optimizer step.
        micro_batch: samples per forward and backward pass; divides the global batch.
        seed: names the order.

    Raises:
        ConfigError: fewer samples than a global batch, or a micro-batch that does not divide it.
    """
    if num_samples < 1:
        raise ConfigError(
            f"a dataset of {num_samples} samples has no order: there must be at least 1"
        )
    rows = -(-num_samples // MAX_GROUPS)
    sizes = np.full(-(-num_samples // rows), rows, dtype=np.int64)
    sizes[-1] = num_samples - rows * (len(sizes) - 1)
    return GlobalOrder(
        row_group_sizes=sizes,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        window_groups=WINDOW_GROUPS,
    )


@dataclass(frozen=True, kw_only=True)
class OwnIndex:
    """What a run knows of the training function's own dataset.

    Attributes:
        num_rows: samples in it.
    """

    num_rows: int

    @property
    def vocab_size(self) -> None:
        """Nobody recorded it."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of what is known, which is the length."""
        return combined_fingerprint(["own", self.num_rows])


@dataclass(frozen=True, kw_only=True)
class OwnFeed:
    """Asks the training function's loader for the micro-batches of a rank.

    Attributes:
        order: the global order.
        plan: this rank's share.
        make: makes the loader.
    """

    order: GlobalOrder
    plan: BatchPlan
    make: MakeLoader

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MicroBatch]]:
        """See :meth:`ray_ckpt.data.feed.Feed.steps`.

        Raises:
            DataError: the loader does not follow the sampler.
        """
        from torch.random import fork_rng  # the order alone does without torch

        sampler = _Watched(
            self.order,
            self.plan,
            sample_offset=start_step * self.plan.global_batch,
            stop_step=stop_step,
        )
        # A DataLoader draws a seed when it begins, and a resume begins one where the uninterrupted run has none.
        with fork_rng(devices=[]):
            loader = self.make(sampler)
            self._check_length(loader)
            items = iter(loader)
        indices = GlobalOrderIterator(sampler)
        for step in range(start_step, stop_step):
            yield [
                self._micro_batch(step, number, next(indices), items, sampler)
                for number in self.plan.micro_batches
            ]

    def _check_length(self, loader: object) -> None:
        """Of the dataset behind a loader, where there is one to be seen: the order is made for so many samples."""
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized) and len(dataset) != self.order.num_rows:
            raise DataError(
                f"batches(loader=...): the loader's dataset has {len(dataset)} samples, --samples says "
                f"{self.order.num_rows}. Give Config(samples=...) the length of the dataset."
            )

    def _micro_batch(
        self, step: int, number: int, rows: list[int], items: Iterator[Any], sampler: _Watched
    ) -> MicroBatch:
        try:
            data = next(items)
        except StopIteration:
            raise DataError(
                f"batches(loader=...): the loader ended at step {step}, micro-batch {number}. It must give one item "
                "for each batch of the sampler, and no fewer: DataLoader(dataset, batch_sampler=sampler)."
            ) from None
        if not sampler.asked:
            raise DataError(
                "batches(loader=...): the loader gave a batch without asking the sampler, so that nobody knows which "
                "samples are in it. Hand the sampler on: DataLoader(dataset, batch_sampler=sampler), without "
                "batch_size and shuffle."
            )
        first = step * self.plan.global_batch + number * self.plan.micro_batch
        return MicroBatch(
            index=number,
            tokens=_NO_TOKENS,
            rows=np.array(rows, dtype=np.int64),
            positions=first + np.arange(len(rows), dtype=np.int64),
            data=data,
        )


class _Watched(GlobalOrderSampler):
    """Knows whether a loader has asked it."""

    asked = False

    def __iter__(self) -> GlobalOrderIterator:
        self.asked = True
        return super().__iter__()


_NO_TOKENS: Int64s = np.empty((0, 0), dtype=np.int64)
