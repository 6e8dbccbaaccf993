"""Who computes which micro-batch, for any number of workers.

The global batch is ``G = V * b`` samples: ``V`` micro-batches of ``b``. Rank ``r`` of ``W`` takes the
micro-batches from ``r*V//W`` up to ``(r+1)*V//W``: shares differ by one at most, and nothing but ``W``
changes when the group is resized. ``V`` is therefore also the largest world size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_ckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The share of one rank.

    Attributes:
        global_batch: samples per optimizer step, constant within a segment of a run.
        micro_batch: samples per forward and backward pass.
        world_size: number of workers now.
        rank: this worker, 0 to ``world_size - 1``.
    """

    global_batch: int
    micro_batch: int
    world_size: int
    rank: int

    def __post_init__(self) -> None:
        check_batch(self.global_batch, self.micro_batch)
        if not 1 <= self.world_size <= self.num_micro_batches:
            raise ConfigError(
                f"world size {self.world_size} does not fit the global batch: there are "
                f"{self.num_micro_batches} micro-batches ({self.global_batch} samples in micro-batches "
                f"of {self.micro_batch}), so 1 to {self.num_micro_batches} workers can share them. "
                "Lower the maximum of --workers, or make --micro-batch smaller."
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in a world of {self.world_size}")

    @property
    def num_micro_batches(self) -> int:
        """V, micro-batches of a global batch."""
        return self.global_batch // self.micro_batch

    @property
    def micro_batches(self) -> range:
        """The micro-batches of this rank, in order."""
        v, w = self.num_micro_batches, self.world_size
        return range(self.rank * v // w, (self.rank + 1) * v // w)

    @property
    def max_share(self) -> int:
        """Micro-batches of the rank that has most: ``ceil(V / W)``."""
        return -(-self.num_micro_batches // self.world_size)


def check_batch(global_batch: int, micro_batch: int) -> None:
    """Refuses a micro-batch that does not divide the global batch.

    Raises:
        ConfigError: naming both options and the nearest sizes that work.
    """
    if global_batch < 1 or micro_batch < 1:
        raise ConfigError("--global-batch and --micro-batch must be at least 1")
    if global_batch % micro_batch:
        divisors = [d for d in range(1, global_batch + 1) if global_batch % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - micro_batch))[:3]
        raise ConfigError(
            f"--micro-batch {micro_batch} does not divide --global-batch {global_batch}: every "
            "micro-batch must have the same size. Micro-batches that fit: "
            + ", ".join(map(str, sorted(near)))
            + "."
        )
