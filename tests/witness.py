"""A run with failures, lost nodes and tiers, played through event by event.

The rules are those of :mod:`ray_ckpt.policy.replay`, written down a second time in the plainest way: one run, one
event after the other, no arithmetic over many saves. It is slow, and there to be believed; tests hold the arrays
against it, failure by failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ray_ckpt.policy.setting import NODE_LOSS, Setting

# Between two times that should be the same.
_SAME_S = 1e-6

PlanOf = Callable[[int], tuple[float, Sequence[int]]]
"""From the number of workers: work between saves, full-size seconds, and saves to one of each tier."""


class _Failed(Exception):
    pass


class _NodeBack(Exception):
    pass


class _Over(Exception):
    pass


class Witness:
    """One run.

    Args:
        setting: what it lives with.
        plan: when it saves.
        failures: time to the next failure, seconds of exposure of the whole job, and its kind.
        wall_s: how long it goes on, seconds.
    """

    def __init__(
        self, setting: Setting, plan: PlanOf, failures: Iterator[tuple[float, str]], wall_s: float
    ) -> None:
        self._setting, self._plan, self._failures = setting, plan, failures
        self._wall_s = wall_s
        fleet = setting.fleet
        self._up, self._spares = fleet.nodes, fleet.spares
        self._repairs: list[float] = []
        self._now_s = 0.0
        self._work_s = self._steps_s = 0.0
        tiers = len(setting.tiers)
        self._usable = [(0.0, 0.0)] * tiers
        self._flying: list[tuple[float, tuple[float, float]] | None] = [None] * tiers
        self._left_s, self._kind = next(failures)
        self.count = 0
        self.spent_s = dict.fromkeys(("steps", "save", "rework", "restart", "wait"), 0.0)

    def play(self) -> dict[str, float]:
        """Where its time went, seconds, and how many failures there were."""
        try:
            while True:
                self._attempt()
        except _Over:
            pass
        return {
            "useful": self._work_s,
            "fewer": self._steps_s - self._work_s,
            "save": self.spent_s["save"],
            "rework": self.spent_s["rework"],
            "restart": self.spent_s["restart"],
            "wait": self.spent_s["wait"],
            "failures": self.count,
        }

    @property
    def _workers(self) -> int:
        return self._up * self._setting.fleet.workers_per_node

    def _attempt(self) -> None:
        need = 0
        try:
            try:
                while True:
                    unit_s, times = self._plan(self._workers)
                    self._spend("steps", unit_s / float(self._setting.speed(self._workers)))
                    self._save(unit_s, times)
            except _NodeBack:
                self._hand_over()
        except _Failed:
            need = self._fall_back()
        self._restart(need)

    def _spend(self, what: str, seconds: float, *, watch_nodes: bool = True) -> None:
        """Lets time pass, unless something ends it before."""
        hazard = float(self._setting.hazard(self._workers))
        ends = {
            "done": seconds,
            "failed": self._left_s / hazard,
            "over": self._wall_s - self._now_s,
        }
        if watch_nodes and self._up < self._setting.fleet.nodes:
            ends["node back"] = max(0.0, min(self._repairs) - self._now_s)
        first = min(ends, key=lambda name: ends[name])
        passed_s = ends[first]
        self._now_s += passed_s
        self._left_s -= passed_s * hazard
        self.spent_s[what] += passed_s
        if what == "steps":
            self._steps_s += passed_s
            self._work_s += passed_s * float(self._setting.speed(self._workers))
        if first == "over" or self._now_s >= self._wall_s:
            raise _Over
        if first == "failed":
            raise _Failed
        if first == "node back":
            raise _NodeBack
        for tier, flying in enumerate(self._flying):
            if flying is not None and flying[0] <= self._now_s + _SAME_S:
                self._land(tier)

    def _land(self, tier: int) -> None:
        flying = self._flying[tier]
        if flying is not None and flying[0] <= self._now_s + _SAME_S:
            self._usable[tier], self._flying[tier] = flying[1], None

    def _save(self, unit_s: float, times: Sequence[int]) -> None:
        if self._flying[0] is not None:
            self._spend("save", self._flying[0][0] - self._now_s)
        due = [
            tier
            for tier in range(len(times))
            if tier == 0
            or (
                self._flying[tier] is None
                and self._work_s - self._usable[tier][0] >= times[tier] * unit_s - _SAME_S
            )
        ]
        self._spend("save", self._setting.tiers[0].stall_s)
        for tier in due:
            here = (self._work_s, self._steps_s)
            self._flying[tier] = (self._now_s + self._setting.tiers[tier].upload_s, here)
            self._land(tier)

    def _hand_over(self) -> None:
        first = self._setting.tiers[0]
        flying = self._flying[0]
        wait_s = 0.0 if flying is None else max(0.0, flying[0] - self._now_s)
        for seconds in (wait_s, first.stall_s, first.upload_s):
            self._spend("save", seconds, watch_nodes=False)
        self._usable[0], self._flying[0] = (self._work_s, self._steps_s), None

    def _fall_back(self) -> int:
        """A failure; returns the tier that outlived it."""
        self.count += 1
        need = self._setting.need(self._kind)
        if self._kind == NODE_LOSS and self._setting.fleet.repair_s:
            self._repairs.append(self._now_s + self._setting.fleet.repair_s)
            if self._spares:
                self._spares -= 1
            else:
                self._up -= 1
        for tier in range(len(self._usable)):
            self._land(tier)
            self._flying[tier] = None
        back = max(self._usable[need:])
        self.spent_s["rework"] += self._steps_s - back[1]
        self._work_s, self._steps_s = back
        self._usable[: need + 1] = [back] * (need + 1)
        self._left_s, self._kind = next(self._failures)
        return need

    def _restart(self, need: int) -> None:
        while True:
            self._repaired()
            while self._up < self._setting.fleet.enough:
                until_s = min(*self._repairs, math.inf)
                self.spent_s["wait"] += min(until_s, self._wall_s) - self._now_s
                self._now_s = min(until_s, self._wall_s)
                if self._now_s >= self._wall_s:
                    raise _Over
                self._repaired()
            try:
                restart_s = self._setting.restart_s(need, self._workers)
                self._spend("restart", restart_s, watch_nodes=False)
                return
            except _Failed:
                need = max(need, self._fall_back())

    def _repaired(self) -> None:
        while self._repairs and min(self._repairs) <= self._now_s:
            self._repairs.remove(min(self._repairs))
            if self._up < self._setting.fleet.nodes:
                self._up += 1
            else:
                self._spares += 1
