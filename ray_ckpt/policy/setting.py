"""What a simulated job lives with: its machines, its tiers, how often what fails, and how long restarts take.

Work is counted in full-size seconds: what the whole job does in a second of steps. With ``W`` of ``W0`` workers a
step takes ``W0 / W`` times as long, since the global batch stays. Failures come at a rate ``a + b W``, as in
:mod:`ray_ckpt.policy.failures`; a restart takes what :func:`ray_ckpt.policy.restart.restart_at` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ray_ckpt.policy.failures import PRIOR_SHARES
from ray_ckpt.policy.restart import restart_at
from ray_ckpt.policy.tiers import TierCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NODE_LOSS = "node_loss"

# Of the 419 unexpected interruptions of Llama 3 405B (arXiv 2407.21783, table 5), software and its dependencies are
# 56: those come with the job, the others with its machines.
JOB_SHARE = 56 / 419


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The machines of a job.

    Attributes:
        nodes: that the whole job uses.
        workers_per_node: that a lost node takes with it.
        spares: nodes that stand by, and take the place of a lost one at once.
        repair_s: until a lost node is back, seconds; 0 is a cluster that always has another one.
        elastic: whether the job goes on with fewer nodes meanwhile; else it waits.
        least_nodes: with fewer an elastic job waits too.
    """

    nodes: int = 1
    workers_per_node: int = 1
    spares: int = 0
    repair_s: float = 0.0
    elastic: bool = False
    least_nodes: int = 1

    def __post_init__(self) -> None:
        if not (self.nodes >= 1 and self.workers_per_node >= 1 and self.spares >= 0):
            raise ValueError(
                "a job has 1 node or more, with 1 worker or more, and 0 spares or more"
            )
        if not 0 <= self.repair_s < float("inf"):
            raise ValueError(f"the repair of a node takes 0 s or more, got {self.repair_s}")
        if not 1 <= self.least_nodes <= self.nodes:
            raise ValueError(f"an elastic job goes on with 1 to {self.nodes} nodes at least")

    @property
    def workers(self) -> int:
        """Of the whole job."""
        return self.nodes * self.workers_per_node

    @property
    def enough(self) -> int:
        """Nodes that the job goes on with."""
        return self.least_nodes if self.elastic else self.nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All that a policy of saving meets.

    Attributes:
        tiers: fastest first; their rates of failure are not looked at, but follow from the rest. Slower ones take
            their copies from the fastest, so only that one has a stall.
        step_s: time of a step of the whole job, seconds.
        mtbf_s: mean time between failures of the whole job, seconds.
        job_share: share of its failures that come with the job, whatever its size.
        shares: of the failures, by kind; they sum to 1.
        needs: for each kind the tier that outlives it, as its place in ``tiers``; others need the slowest.
        restarts: for each tier workers and seconds of restarts that were seen; empty: the ``restart_s`` of the tier,
            at any size.
        fleet: the machines.
    """

    tiers: tuple[TierCost, ...]
    step_s: float = 1.0
    mtbf_s: float
    job_share: float = JOB_SHARE
    shares: Mapping[str, float] = field(default_factory=lambda: dict(PRIOR_SHARES))
    needs: Mapping[str, int] = field(default_factory=dict)
    restarts: tuple[tuple[tuple[int, float], ...], ...] = ()
    fleet: Fleet = Fleet()

    def __post_init__(self) -> None:
        if not self.tiers or any(tier.stall_s for tier in self.tiers[1:]):
            raise ValueError(
                "need 1 tier or more, the fastest first; only that one has a stall, slower ones take its copies"
            )
        if any(tier.slowdown for tier in self.tiers):
            raise ValueError("uploads that slow the steps beside them are not simulated")
        if not (self.step_s > 0 and 0 < self.mtbf_s < float("inf") and 0 <= self.job_share <= 1):
            raise ValueError("need a step and an MTBF of more than 0 s, and a job share of 0 to 1")
        if min(self.shares.values(), default=-1) < 0 or abs(sum(self.shares.values()) - 1) > 1e-6:
            raise ValueError(f"the shares of the failures must sum to 1: {dict(self.shares)}")
        if self.restarts and len(self.restarts) != len(self.tiers):
            raise ValueError(f"need restarts for each of the {len(self.tiers)} tiers")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of failures, in the order of ``shares``."""
        return tuple(self.shares)

    def need(self, kind: str) -> int:
        """The tier that outlives a failure of this kind."""
        return self.needs.get(kind, len(self.tiers) - 1)

    def speed(self, workers: Ints | int) -> Floats:
        """Full-size seconds of work in a second."""
        return np.asarray(workers / self.fleet.workers)

    def hazard(self, workers: Ints | int) -> Floats:
        """Failure rate with so many workers, as a share of that of the whole job."""
        return self.job_share + (1 - self.job_share) * self.speed(workers)

    def mtbf_at(self, workers: int) -> float:
        """Mean time between failures with so many workers, seconds."""
        return self.mtbf_s / float(self.hazard(workers))

    def restart_s(self, tier: int, workers: int) -> float:
        """Of a restart with so many workers from the copies of a tier, seconds."""
        seen = self.restarts[tier] if self.restarts else ()
        found = restart_at(workers, seen)
        return self.tiers[tier].restart_s if found is None else found

    def costs(self, rates: Mapping[str, float], workers: int) -> list[TierCost]:
        """The tiers as the planner of a run takes them.

        Args:
            rates: failures per second, by kind.
            workers: at present.
        """
        needed = [0.0] * len(self.tiers)
        for kind, rate in rates.items():
            needed[self.need(kind)] += rate
        return [
            TierCost(
                name=tier.name,
                stall_s=tier.stall_s,
                upload_s=tier.upload_s,
                restart_s=self.restart_s(k, workers),
                failures_per_s=needed[k],
            )
            for k, tier in enumerate(self.tiers)
        ]

    def true_rates(self, workers: int) -> dict[str, float]:
        """Failures per second with so many workers, by kind, as they really come."""
        return {kind: share / self.mtbf_at(workers) for kind, share in self.shares.items()}


def one_tier(
    *, stall_s: float, upload_s: float = 0.0, restart_s: float = 0.0, name: str = "durable"
) -> tuple[TierCost, ...]:
    """A job that saves to one place alone."""
    return (TierCost(name=name, stall_s=stall_s, upload_s=upload_s, restart_s=restart_s),)


def restart_line(setting: Setting, tier: int) -> tuple[float, float]:
    """A restart from a tier with one worker, and what each further one adds, seconds: :meth:`Setting.restart_s`."""
    workers = setting.fleet.workers
    one = setting.restart_s(tier, 1)
    if workers == 1:
        return one, 0.0
    return one, (setting.restart_s(tier, workers) - one) / (workers - 1)


def shared_out(failures: int, shares: Mapping[str, float] = PRIOR_SHARES) -> dict[str, int]:
    """Failures by kind, in the shares that kinds have, as near as whole numbers come."""
    exact = {kind: failures * share for kind, share in shares.items()}
    counts = {kind: int(each) for kind, each in exact.items()}
    rest = sorted(shares, key=lambda kind: counts[kind] - exact[kind])
    for kind in rest[: failures - sum(counts.values())]:
        counts[kind] += 1
    return counts


def table_of_restarts(rows: Sequence[Mapping[str, str]]) -> tuple[tuple[int, float], ...]:
    """Workers and seconds of restarts, from rows with ``gpus`` (or ``workers``) and ``recovery_s``.

    Raises:
        ValueError: no rows, or a row that has no such numbers.
    """
    found = []
    for number, row in enumerate(rows, 1):
        try:
            workers, seconds = int(row.get("gpus") or row["workers"]), float(row["recovery_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"row {number} has no numbers gpus and recovery_s ({error!r})"
            ) from error
        if not (workers >= 1 and 0 <= seconds < float("inf")):
            raise ValueError(f"row {number}: give 1 GPU or more, and 0 s or more")
        found.append((workers, seconds))
    if not found:
        raise ValueError("it has no rows")
    return tuple(found)
