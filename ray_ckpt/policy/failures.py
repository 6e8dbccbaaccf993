"""How often the job fails at a number of workers: a belief that starts at a stated prior and learns.

Failures of each kind are taken as memoryless, at a rate ``a + b W`` for W workers: some come with the job however
small it is (its software, its storage), some with every machine that is added. Small jobs fail far more often than
the machines' part alone would say: Kokolis et al. 2024 (arXiv 2410.21680) saw 7.9 h between failures at 1,024 GPUs,
where their rate per node gives 28.8 h.

At one size alone the two parts look the same, and how failures are shared out between them is the prior's saying: a
cluster of machines worse than the stated ones looks like a bad job until a second size tells the parts apart.

Both parts have gamma priors. Of a sum of two rates nobody sees which one a failure came from, so the posterior is
no product of two gammas. But it is a finite mixture of such products, one for each number K of failures that came
with the job: the likelihood ``prod (a + b W)^n`` is a polynomial, and each of its terms ``a^K b^(N-K)`` is
conjugate. So mean and variance of the rate at any W are exact, with no grid and no sampling. The credible interval
is that of the gamma distribution with this mean and variance: a few percent off in most cases, a seventh at a size
far from those where the failures were seen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ray_ckpt.policy.belief import CREDIBLE, FailureBelief, ScalePrior, Seen
from ray_ckpt.policy.gamma import gamma_quantile
from ray_ckpt.policy.words import DAY_S

Floats = NDArray[np.float64]

# Shares of the failures by kind, before any was seen. Of the 419 unexpected interruptions of Llama 3 405B (arXiv
# 2407.21783, table 5): GPUs and software end a process (324), network, host and maintenance take a node (85), NCCL
# watchdog timeouts are hangs (7), SSDs storage (3). A loss of the whole cluster or driver is not in that table; it
# gets the share of the hangs. The sum over kinds is what matters to a run with one tier, and shares are soon learned.
PRIOR_SHARES: Mapping[str, float] = {
    "worker_error": 324 / 426,
    "node_loss": 85 / 426,
    "hang": 7 / 426,
    "lost": 7 / 426,
    "storage": 3 / 426,
}
# Where a kind is seen that nobody thought of: as rare as the rarest.
OTHER_SHARE = min(PRIOR_SHARES.values())


class FailureModel:
    """What is believed about the rates of all kinds, at every number of workers.

    Args:
        prior: before anything was seen.
        seen: exposure and failures, by number of workers; planned interruptions are no failures.
    """

    def __init__(self, prior: ScalePrior, seen: Sequence[Seen] = ()) -> None:
        self._failures = sum(sum(s.failures.values()) for s in seen)
        kinds = {kind for s in seen for kind in s.failures} | set(PRIOR_SHARES)
        self._parts = {kind: _Part(prior, kind, seen) for kind in sorted(kinds)}

    def at(self, world_size: int, kinds: Collection[str] | None = None) -> FailureBelief:
        """How often the job fails with so many workers.

        Args:
            world_size: workers.
            kinds: of failures that count, by default all.
        """
        parts = [p for kind, p in self._parts.items() if kinds is None or kind in kinds]
        moments = [part.moments(max(1, world_size)) for part in parts]
        mean, variance = (float(sum(m[i] for m in moments)) for i in (0, 1))
        if not mean > 0:
            raise ValueError(f"no kind of failure named {sorted(kinds or ())} is known")
        shape = mean * mean / variance
        low, high = (gamma_quantile(shape, p) for p in ((1 - CREDIBLE) / 2, (1 + CREDIBLE) / 2))
        return FailureBelief(
            mtbf_s=1 / mean,
            low_s=shape / (mean * high),
            high_s=shape / (mean * low) if low else math.inf,
            failures=self._failures if kinds is None else sum(part.failures for part in parts),
        )

    def rates(self, world_size: int) -> dict[str, float]:
        """Mean failures per second with so many workers, by kind."""
        return {kind: part.moments(max(1, world_size))[0] for kind, part in self._parts.items()}


class _Part:
    """The posterior of ``a`` and ``b`` for one kind."""

    def __init__(self, prior: ScalePrior, kind: str, seen: Sequence[Seen]) -> None:
        share = PRIOR_SHARES.get(kind, OTHER_SHARE)
        counts = tuple(
            sorted((s.world_size, s.failures[kind]) for s in seen if s.failures.get(kind))
        )
        self.failures = sum(count for _, count in counts)
        self._shape = prior.weight * share
        # Rates of the gammas: prior and exposure, seconds and worker-seconds.
        per_worker_s = prior.per_1000_worker_days / (1000 * DAY_S)
        self._job_s = prior.weight * prior.job_mtbf_s + sum(s.exposure_s for s in seen)
        self._worker_s = (prior.weight / per_worker_s if per_worker_s else math.inf) + sum(
            s.world_size * s.exposure_s for s in seen
        )
        self._with_job = np.arange(self.failures + 1, dtype=np.float64)
        if math.isinf(self._job_s):
            self._with_job = np.zeros(1)
        elif math.isinf(self._worker_s):
            self._with_job = np.full(1, float(self.failures))
        self._weights = self._mixture(counts)

    def _mixture(self, counts: tuple[tuple[int, int], ...]) -> Floats:
        if len(self._with_job) == 1:
            return np.ones(1)
        job, workers = self._shape + self._with_job, self._shape + self.failures - self._with_job
        logs = (
            _log_coefficients(counts)
            + _lgamma(job)
            - job * math.log(self._job_s)
            + _lgamma(workers)
            - workers * math.log(self._worker_s)
        )
        weights = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())

    def moments(self, world_size: int) -> tuple[float, float]:
        """Mean and variance of the rate ``a + b W``."""
        job, workers = self._shape + self._with_job, self._shape + self.failures - self._with_job
        scale_job, scale_worker = 1 / self._job_s, world_size / self._worker_s
        means = job * scale_job * (self._job_s < math.inf) + workers * scale_worker
        variances = job * scale_job**2 + workers * scale_worker**2
        mean = float(self._weights @ means)
        spread = float(self._weights @ (means - mean) ** 2)  # not knowing which part they came from
        return mean, float(self._weights @ variances) + spread


@lru_cache(maxsize=64)
def _log_coefficients(counts: tuple[tuple[int, int], ...]) -> Floats:
    """Logarithms of the coefficients of ``a^K b^(N-K)`` in ``prod (a + b W)^n``, by K."""
    total = np.zeros(1)
    for world_size, count in counts:
        k = np.arange(count + 1, dtype=np.float64)
        choose = math.lgamma(count + 1) - _lgamma(k + 1) - _lgamma(count - k + 1)
        term = choose + (count - k) * math.log(world_size)
        total = _log_convolve(total, term)
    return total


def _log_convolve(left: Floats, right: Floats) -> Floats:
    short, long = sorted((left, right), key=len)
    found = np.full(len(left) + len(right) - 1, -np.inf)
    for i, value in enumerate(short):
        part = found[i : i + len(long)]
        np.logaddexp(part, value + long, out=part)
    return found


def _lgamma(values: Floats) -> Floats:
    return np.array([math.lgamma(value) for value in values])
