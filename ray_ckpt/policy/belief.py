"""What is believed about failures: before anything was seen, what was seen, and what follows at one size.

Plain values; :mod:`ray_ckpt.policy.failures` makes the last from the first two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ray_ckpt.policy.words import DAY_S, span

# Kokolis et al. 2024 (arXiv 2410.21680): 6.50 failures per 1,000 node-days on one cluster, of 8 GPUs each.
FAILURES_PER_1000_WORKER_DAYS = 6.5 / 8

# A run that fails often learns fast, and one that fails rarely lives long with what it believed: so the belief about
# the job, of which nobody publishes a rate, is rather that it fails rarely, and it is weak. Half a failure is the shape
# of Jeffreys' prior for a rate (1946), the one that says least. Simulated with 64 workers over 30 days, saves of 20 s
# and 3 hours to 16 days between failures, not knowing the rate costs 2.9 % of the waste on average and 8 % at most;
# with a whole failure in a day it is 3.8 % and 16 %.
JOB_MTBF_S = 2 * DAY_S
PRIOR_WEIGHT = 0.5

CREDIBLE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen at one number of workers.

    Attributes:
        world_size: workers.
        exposure_s: time the job was running with so many, seconds.
        failures: unplanned interruptions meanwhile, by kind.
    """

    world_size: int
    exposure_s: float
    failures: Mapping[str, int]

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.exposure_s < math.inf:
            raise ValueError(
                f"need world_size >= 1 and exposure of 0 s or more, got {self.world_size} and {self.exposure_s}"
            )
        if any(count < 0 for count in self.failures.values()):
            raise ValueError(f"counts of failures must not be negative, got {dict(self.failures)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePrior:
    """Belief before anything was seen.

    Attributes:
        job_mtbf_s: mean time between the failures that come with the job, seconds; inf for none.
        per_1000_worker_days: failures that come with the workers; 0 for none.
        weight: how many seen failures each of the two is worth.
    """

    job_mtbf_s: float
    per_1000_worker_days: float = FAILURES_PER_1000_WORKER_DAYS
    weight: float = PRIOR_WEIGHT

    def __post_init__(self) -> None:
        # "not more" instead of "less": NaN is neither.
        if not (self.job_mtbf_s > 0 and 0 < self.weight < math.inf):
            raise ValueError("policy.prior-mtbf-s and policy.prior-weight must be more than 0")
        if not 0 <= self.per_1000_worker_days < math.inf:
            raise ValueError("policy.prior-per-1000-worker-days must be 0 or more")
        if math.isinf(self.job_mtbf_s) and not self.per_1000_worker_days:
            raise ValueError(
                "a job that never fails cannot be believed in: policy.prior-mtbf-s must be finite, or "
                "policy.prior-per-1000-worker-days more than 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureBelief:
    """How often the job fails at one number of workers.

    Attributes:
        mtbf_s: one over the mean failure rate, seconds.
        low_s: the time between failures is longer than this with 95 %, seconds.
        high_s: and shorter than this with 95 %.
        failures: how many were seen, at any number of workers.
    """

    mtbf_s: float
    low_s: float
    high_s: float
    failures: int = 0

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and 0 <= self.low_s <= self.high_s and self.failures >= 0):
            raise ValueError(f"need mtbf_s > 0, 0 <= low_s <= high_s and failures >= 0, got {self}")

    def describe(self) -> str:
        """Where the number comes from, in words."""
        seen = "prior, no failure yet"
        if self.failures:
            seen = f"{self.failures} failure{'s' if self.failures > 1 else ''} seen"
        return f"{seen}, {100 * CREDIBLE:.0f} %: {span(self.low_s, self.high_s)}"
