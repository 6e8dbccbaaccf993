"""Options of how the worker group follows the cluster: ``--elastic``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_ckpt.config.checks import at_least, flag, more_than_0, not_negative, one_of
from ray_ckpt.config.failures import FailureOptions

GpuUse = Literal["auto", "yes", "no"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig(FailureOptions):
    """How the worker group follows the cluster."""

    cpus_per_worker: float = 1.0
    """CPUs that each worker reserves."""
    gpu: GpuUse = "auto"
    """One GPU for each worker; auto uses GPUs when the cluster has any."""
    resize_check_s: float = 20.0
    """Time between looks for more (or fewer) resources while training runs, seconds."""
    start_timeout_s: float = 20.0
    """Longest wait for a worker group to start before another size is tried, seconds."""
    node_loss_wait_s: float = 60.0
    """Longest wait for the cluster to notice that a node is dead, after workers failed, seconds."""
    max_fruitless_attempts: int = 3
    """Attempts in a row that may end before a new step or checkpoint; then the run stops and says why."""
    drain_margin_s: float = 5.0
    """How much sooner than the last moment a run saves that leaves a node which will be taken away, seconds."""
    min_gain: float = 0.05
    """Take more workers if they make steps faster by this share, and win more than the restart costs; 0 always does."""
    cooldown_s: float = 60.0
    """Least time from one growth to the next, seconds."""
    settle_s: float = 3.0
    """Take more workers after the cluster has offered the same for so long: one restart for several nodes, seconds."""

    spare_after_s: float = 10.0
    """Training time after which each node starts worker processes for the next restart, that wait with everything
    imported (some hundred MB for each worker); seconds, 0 for none."""

    def __post_init__(self) -> None:
        self.check_failures()
        for name in ("cpus_per_worker", "resize_check_s", "start_timeout_s", "node_loss_wait_s"):
            more_than_0(f"--elastic.{flag(name)}", getattr(self, name))
        for name in ("drain_margin_s", "min_gain", "cooldown_s", "settle_s", "spare_after_s"):
            not_negative(f"--elastic.{flag(name)}", getattr(self, name))
        one_of(GpuUse, "--elastic.gpu", self.gpu)
        at_least(1, "--elastic.max-fruitless-attempts", self.max_fruitless_attempts)
