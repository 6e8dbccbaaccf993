"""How often the job fails: a belief that starts at a stated prior and learns from what happens.

Failures are taken as memoryless with an unknown rate whose prior is a gamma distribution. Observing
``n`` failures in ``t`` seconds of exposure gives another gamma distribution (Gelman et al. 2013,
Bayesian Data Analysis, section 2.6), so the belief is two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureBelief:
    """Gamma belief about the failure rate of the whole job.

    Attributes:
        prior_mtbf_s: mean time between failures before anything was seen, seconds.
        prior_weight: how many observed failures the prior is worth.
        failures: unplanned interruptions seen.
        exposure_s: time the job was running while they were counted, seconds.
    """

    prior_mtbf_s: float
    prior_weight: float = 1.0
    failures: int = 0
    exposure_s: float = 0.0

    def __post_init__(self) -> None:
        # "not more" instead of "less": NaN is neither.
        if not (self.prior_mtbf_s > 0 and self.prior_weight > 0):
            raise ValueError("policy.prior-mtbf-s and policy.prior-weight must be more than 0")
        if not (self.failures >= 0 and self.exposure_s >= 0):
            raise ValueError("failures and exposure must not be negative")

    @property
    def mtbf_s(self) -> float:
        """One over the mean failure rate, seconds."""
        total = self.prior_weight * self.prior_mtbf_s + self.exposure_s
        return total / (self.prior_weight + self.failures)

    def describe(self) -> str:
        """Where the number comes from, in words."""
        if not self.failures:
            return "prior, no failure yet"
        return f"{self.failures} failure{'s' if self.failures > 1 else ''} seen"
