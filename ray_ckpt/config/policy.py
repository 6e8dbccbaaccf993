"""Options of when to save: ``--policy``."""

from __future__ import annotations

from dataclasses import dataclass

from ray_ckpt.config.checks import flag, more_than_0
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.belief import (
    FAILURES_PER_1000_WORKER_DAYS,
    JOB_MTBF_S,
    PRIOR_WEIGHT,
    ScalePrior,
)
from ray_ckpt.policy.decision import IntervalLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """When to save."""

    interval_steps: int = 0
    """Save every so many steps; 0 computes the interval from what the run measures."""
    min_interval_s: float = 1.0
    """Least time between saves, seconds."""
    max_interval_s: float = 1800.0
    """Most time between saves, seconds."""
    first_save_steps: int = 10
    """Steps before the first save, while nothing is measured yet."""
    prior_mtbf_s: float = JOB_MTBF_S
    """Mean time between failures that come with the job, whatever its size; seconds, believed until some are seen."""
    prior_per_1000_worker_days: float = FAILURES_PER_1000_WORKER_DAYS
    """Failures that come with the workers, in 1,000 days of one; believed until some are seen."""
    prior_weight: float = PRIOR_WEIGHT
    """How many seen failures each of the two beliefs is worth."""
    history: str = ""
    """File of failures seen before this run, on any cluster like this one; `ray-ckpt interruptions import` makes it."""

    def __post_init__(self) -> None:
        try:
            self.limits()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("prior_mtbf_s", "prior_weight"):
            more_than_0(f"--policy.{flag(name)}", getattr(self, name))
        try:
            ScalePrior(
                job_mtbf_s=self.prior_mtbf_s,
                per_1000_worker_days=self.prior_per_1000_worker_days,
                weight=self.prior_weight,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def limits(self) -> IntervalLimits:
        """The bounds of the interval."""
        return IntervalLimits(
            fixed_steps=self.interval_steps,
            min_s=self.min_interval_s,
            max_s=self.max_interval_s,
            first_steps=self.first_save_steps,
        )
