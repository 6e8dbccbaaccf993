"""What a choice of stall, upload and restart costs before a run exists, and which of them is worth making better.

First order, as the literature prints it: of each useful second, saves take ``C/T``, work done again ``(T/2 + U)/M`` and
restarts ``R/M`` (Young 1974; Daly 2006, eq. 8). The goodput beside it is exact for memoryless failures. Both suppose
that an upload costs the steps beside it nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ray_ckpt.policy.interval import daly, efficiency, exact, young
from ray_ckpt.policy.words import DAY_S

# From here on the first order tells too little: a failure is likely within one interval.
LONG_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Waste:
    """Seconds lost for each useful one, first order.

    Attributes:
        save: stalls.
        rework: steps done again.
        restart: from failures to the first new steps.
    """

    save: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.save + self.rework + self.restart

    def to_json(self) -> dict[str, float]:
        """For scripts."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What saving and failing cost.

    Attributes:
        mtbf_s: mean time between failures of the whole job.
        stall_s: training stands still for one save.
        restart_s: from a failure to the first new step.
        upload_s: from the end of the stall to a usable checkpoint.
    """

    mtbf_s: float
    stall_s: float
    restart_s: float
    upload_s: float = 0.0

    def __post_init__(self) -> None:
        # "not more" instead of "less": NaN is neither.
        if not (self.mtbf_s > 0 and self.stall_s > 0):
            raise ValueError("mtbf and stall must be more than 0 s")
        if not (self.restart_s >= 0 and self.upload_s >= 0):
            raise ValueError("restart and upload must be 0 s or more")

    @property
    def interval_s(self) -> float:
        """Young's interval."""
        return young(self.stall_s, self.mtbf_s)

    def waste(self, interval_s: float) -> Waste:
        """Of saves every so many useful seconds."""
        return Waste(
            save=self.stall_s / interval_s,
            rework=(interval_s / 2 + self.upload_s) / self.mtbf_s,
            restart=self.restart_s / self.mtbf_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One combination.

    Attributes:
        costs: of it.
        naive_s: the interval it is compared with.
    """

    costs: Costs
    naive_s: float

    def __post_init__(self) -> None:
        if not self.naive_s > 0:
            raise ValueError("the naive interval must be more than 0 s")

    @property
    def waste(self) -> Waste:
        """At Young's interval."""
        return self.costs.waste(self.costs.interval_s)

    @property
    def naive(self) -> Waste:
        """At the naive one."""
        return self.costs.waste(self.naive_s)

    @property
    def exact_s(self) -> float:
        """Best interval for memoryless failures."""
        return exact(self.costs.stall_s, self.costs.mtbf_s)

    @property
    def is_rough(self) -> bool:
        """Whether the first order says too little here."""
        return self.costs.interval_s > LONG_SHARE * self.costs.mtbf_s

    def goodput(self, interval_s: float) -> float:
        """Expected share of wall time that is useful, exactly."""
        costs = self.costs
        return efficiency(
            interval_s, costs.stall_s, costs.mtbf_s, costs.restart_s, upload=costs.upload_s
        )

    def halved(self) -> dict[str, float]:
        """How much less is wasted, at the interval that is best then, if one of the costs were half."""
        costs = self.costs
        changed = {
            "stall": replace(costs, stall_s=costs.stall_s / 2),
            "upload": replace(costs, upload_s=costs.upload_s / 2),
            "restart": replace(costs, restart_s=costs.restart_s / 2),
        }
        return {
            name: self.waste.total - each.waste(each.interval_s).total
            for name, each in changed.items()
        }

    def to_json(self) -> dict[str, Any]:
        """For scripts; times in seconds."""
        costs = self.costs
        return {
            **asdict(costs),
            "interval_s": costs.interval_s,
            "daly_s": daly(costs.stall_s, costs.mtbf_s),
            "exact_s": self.exact_s,
            "waste": self.waste.to_json(),
            "goodput": self.goodput(self.exact_s),
            "naive": {
                "interval_s": self.naive_s,
                "waste": self.naive.to_json(),
                "goodput": self.goodput(self.naive_s),
            },
            "halved": self.halved(),
            "first_order_is_rough": self.is_rough,
        }


def mtbf_of(workers: int, per_1000_worker_days: float) -> float:
    """Mean time between failures of a job whose workers fail at this rate each, seconds."""
    if not (workers >= 1 and per_1000_worker_days > 0):
        raise ValueError("need 1 worker or more, and a rate of more than 0")
    return 1000 * DAY_S / (workers * per_1000_worker_days)
