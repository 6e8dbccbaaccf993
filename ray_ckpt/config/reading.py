"""Options of reading data: ``--reading``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_ckpt.config.checks import at_least, flag, one_of
from ray_ckpt.data.reader import OnCorrupt

FeedKind = Literal["ray", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingConfig:
    """How the data is read."""

    window_groups: int = 4
    """Row groups of a stream that are shuffled together; more shuffles better and takes more memory."""
    feed: FeedKind = "ray"
    """Who reads: Ray Data ahead of training, or the training process when it needs the next batch."""
    rows_per_task: int = 16384
    """Rows that one read task of Ray Data reads, about; fewer where they have more than 32 MiB."""
    read_tasks: int = 2
    """Read tasks that run at a time for each worker."""
    prefetch_batches: int = 2
    """Blocks kept ready in each worker."""
    on_corrupt: OnCorrupt = "fatal"
    """A damaged row group: stop and name it, or put other rows in its place and write that down."""

    def __post_init__(self) -> None:
        for name in ("window_groups", "rows_per_task", "read_tasks"):
            at_least(1, f"--reading.{flag(name)}", getattr(self, name))
        at_least(0, "--reading.prefetch-batches", self.prefetch_batches)
        one_of(FeedKind, "--reading.feed", self.feed)
        one_of(OnCorrupt, "--reading.on-corrupt", self.on_corrupt)
