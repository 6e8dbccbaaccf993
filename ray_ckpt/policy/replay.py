"""What a policy of saving would have cost over weeks of failures, for many runs at once.

The same code decides here as in a run (:mod:`ray_ckpt.policy.contenders`): a policy is asked again after each failure,
after each change of size, and after each stretch without one. All runs go through their failures side by side, as
arrays, so that thousands of weeks take seconds; what happens inside a stretch is arithmetic, and
`tests/witness.py` is the slow witness for it. The rules:

- A failure needs the tier that outlives its kind. What was computed since the newest usable copy there is lost, faster
  tiers and uploads in flight with it. A failure during a restart begins it again.
- A copy is usable once its upload is over. A save to the fastest tier waits for the upload before it; a slower tier
  whose upload is not over takes a later copy.
- A lost node is back after its repair. A spare takes its place at once. Without one, an elastic job goes on with the
  nodes that are left, others wait; nothing fails while a job waits.
- When a node is back, a smaller job saves at once, is restarted, and goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_ckpt.policy.contenders import GRAIN, Plans, Policy, Sight
from ray_ckpt.policy.draws import Failures
from ray_ckpt.policy.machines import Machines
from ray_ckpt.policy.setting import NODE_LOSS, Floats, Ints, Setting, restart_line
from ray_ckpt.policy.shelf import Shelf, Stretch

Mask = NDArray[np.bool_]

# A policy is asked again after so many intervals without a failure, or when it has seen a grain more; a run asks at
# every commit.
_STRETCH = 16


@dataclass(kw_only=True, slots=True)
class Totals:
    """Where the time of each run went, seconds: [runs]; the parts sum to the wall time.

    Attributes:
        useful_s: steps that counted, in full-size seconds.
        fewer_s: what those steps took longer because there were fewer workers.
        save_s: standing still for saves.
        rework_s: steps that were lost.
        restart_s: restarts.
        wait_s: for nodes.
        failures: how many.
        last_interval_s: that was decided last, seconds of steps of the whole job, by tier: [tiers, runs].
        progress_s: useful time so far, at the times that were asked for: [times, runs].
    """

    useful_s: Floats
    fewer_s: Floats
    save_s: Floats
    rework_s: Floats
    restart_s: Floats
    wait_s: Floats
    failures: Ints
    last_interval_s: Floats
    progress_s: Floats

    @property
    def wall_s(self) -> Floats:
        """All of it: [runs]."""
        parts = (self.save_s, self.rework_s, self.restart_s, self.wait_s, self.fewer_s)
        return self.useful_s + sum(parts)

    @property
    def waste(self) -> Floats:
        """Seconds lost for each useful one: [runs]."""
        return self.wall_s / self.useful_s - 1

    @property
    def goodput(self) -> Floats:
        """Useful full-size seconds in a second: [runs]."""
        return self.useful_s / self.wall_s


def replay(
    policy: Policy,
    setting: Setting,
    failures: Failures,
    *,
    runs: int,
    wall_s: float,
    at_s: Sequence[float] = (),
) -> Totals:
    """Plays runs through their failures.

    Args:
        policy: when to save.
        setting: what the runs live with.
        failures: that they meet; the same for every policy that is given them.
        runs: how many.
        wall_s: how long each goes on, seconds.
        at_s: times at which the progress is looked at, ascending, seconds.
    """
    state = _Runs(setting, failures, runs, wall_s)
    progress = _Progress(at_s, runs)
    last_s = np.zeros((len(setting.tiers), runs))
    while (active := state.time_s < wall_s).any():
        before = state.time_s.copy(), state.shelf.work_s.copy()
        plans = policy.plans(state.sight())
        full_s = plans.unit_s / setting.speed(state.workers)
        last_s = np.where(active, full_s * plans.times, last_s)
        down = state.go_on(plans, active)
        if down.any():
            state.restart(down)
        progress.look(*before, state.time_s, state.shelf.work_s)
    return Totals(
        useful_s=state.shelf.work_s,
        fewer_s=state.shelf.steps_s - state.shelf.work_s,
        save_s=state.save_s,
        rework_s=state.rework_s,
        restart_s=state.restart_s,
        wait_s=state.wait_s,
        failures=state.count,
        last_interval_s=last_s,
        progress_s=progress.found,
    )


class _Runs:
    """Where all runs are."""

    def __init__(self, setting: Setting, failures: Failures, runs: int, wall_s: float) -> None:
        self._setting, self._failures, self._wall_s = setting, failures, wall_s
        self._needs = np.array([setting.need(kind) for kind in setting.kinds])
        kinds = setting.kinds
        self._lost_node = kinds.index(NODE_LOSS) if NODE_LOSS in kinds else -1
        self._lines = np.array([restart_line(setting, k) for k in range(len(setting.tiers))])
        self._all = np.arange(runs)
        self.time_s, self.save_s, self.rework_s, self.restart_s, self.wait_s = np.zeros((5, runs))
        self._exposure_s, self._worker_s = np.zeros((2, runs))
        self.count = np.zeros(runs, np.int64)
        self._left_s = failures.gaps_s(self.count, self._all).copy()  # of exposure of the whole job
        self._need = np.zeros(runs, np.int64)  # of the restart that is on
        self.machines = Machines(setting.fleet, runs)
        self.shelf = Shelf([tier.upload_s for tier in setting.tiers], runs)

    @property
    def workers(self) -> Ints:
        # At least a node: one that ended while it waited for the last one computes no more.
        return np.maximum(self.machines.up, 1) * self._setting.fleet.workers_per_node

    def sight(self) -> Sight:
        whole = float(self._setting.fleet.workers)
        mean = np.full(len(self.count), whole)
        np.divide(self._worker_s, self._exposure_s, out=mean, where=self._exposure_s > 0)
        return Sight(
            failures=self.count,
            exposure_s=self._exposure_s,
            mean_workers=mean,
            workers=self.workers,
        )

    def go_on(self, plans: Plans, active: Mask) -> Mask:
        """Computes and saves until something else happens; returns whom it brought down."""
        speed = self._setting.speed(self.workers)
        stretch = Stretch(
            self.shelf,
            now_s=self.time_s,
            unit_s=plans.unit_s,
            speed=speed,
            times=plans.times,
            stall_s=self._setting.tiers[0].stall_s,
        )
        units = np.maximum(_STRETCH, np.ceil(GRAIN * self._exposure_s / stretch.cycle_s))
        fail_s = self._left_s / self._setting.hazard(self.workers)
        node_s, room_s = self._node_back_s(), self._wall_s - self.time_s
        passed_s = np.minimum.reduce([stretch.end_s(units), fail_s, node_s, room_s])
        passed_s = np.where(active, passed_s, 0.0)
        self.save_s += stretch.play(passed_s)
        self._live(passed_s)
        ended = active & (self.time_s < self._wall_s)
        fails = ended & (passed_s == fail_s)
        grows = ended & ~fails & (passed_s == node_s)
        self._need[grows] = 0
        if grows.any():
            fails |= self._hand_over(grows)
        if fails.any():
            self._need[fails] = 0
            self._fail(fails)
        return fails | grows

    def _node_back_s(self) -> Floats:
        """Until a node is back that a smaller job waits for."""
        smaller = self.machines.up < self._setting.fleet.nodes
        left_s = np.maximum(self.machines.next_back_s - self.time_s, 0.0)
        return np.where(smaller, left_s, np.inf)

    def _live(self, passed_s: Floats) -> None:
        """Lets time pass in which failures can come."""
        workers = self.workers
        self.time_s += passed_s
        self._exposure_s += passed_s
        self._worker_s += workers * passed_s
        self._left_s -= passed_s * self._setting.hazard(workers)

    def _hand_over(self, grows: Mask) -> Mask:
        """A save that a larger job begins with; returns whose failure came first."""
        first = self._setting.tiers[0]
        whole_s = self.shelf.upload_left_s(self.time_s) + first.stall_s + first.upload_s
        fail_s = self._left_s / self._setting.hazard(self.workers)
        passed_s = np.minimum.reduce([whole_s, fail_s, self._wall_s - self.time_s])
        passed_s = np.where(grows, passed_s, 0.0)
        self.save_s += passed_s
        self._live(passed_s)
        fails: Mask = grows & (fail_s < whole_s) & (self.time_s < self._wall_s)
        self.shelf.keep(grows & ~fails & (whole_s <= passed_s))
        return fails

    def _fail(self, fails: Mask) -> None:
        """The next failure: what it takes with it, and when the one after it comes."""
        runs = self._all[fails]
        kinds = self._failures.kinds(self.count[fails], runs)
        self.count += fails
        self._left_s[fails] = self._failures.gaps_s(self.count[fails], runs)
        needs = self._needs[kinds]
        self._need[fails] = np.maximum(self._need[fails], needs)
        self.rework_s[fails] += self.shelf.fall_back(runs, needs, self.time_s[fails])
        self.machines.lose(runs[kinds == self._lost_node], self.time_s)

    def restart(self, down: Mask) -> None:
        """Waits and restarts, until a restart is not ended by another failure."""
        while True:
            down = down & (self.time_s < self._wall_s)
            if not down.any():
                return
            self.machines.take_back(down, self.time_s)
            short = down & (self.machines.up < self._setting.fleet.enough)
            if short.any():
                until_s = np.minimum(self.machines.next_back_s, self._wall_s)
                waited_s = np.where(short, until_s - self.time_s, 0.0)
                self.wait_s += waited_s
                self.time_s = np.where(short, until_s, self.time_s)
            tries = down & ~short
            one_s, more_s = self._lines[self._need].T
            whole_s = one_s + more_s * (self.workers - 1)
            fail_s = self._left_s / self._setting.hazard(self.workers)
            passed_s = np.minimum.reduce([whole_s, fail_s, self._wall_s - self.time_s])
            passed_s = np.where(tries, passed_s, 0.0)
            self.restart_s += passed_s
            self._live(passed_s)
            fails = tries & (fail_s < whole_s) & (passed_s == fail_s)
            if fails.any():
                self._fail(fails)
            down = down & (short | fails)


class _Progress:
    """Useful time so far, at given times."""

    def __init__(self, at_s: Sequence[float], runs: int) -> None:
        self._at_s = np.array([*at_s, np.inf])
        self._next = np.zeros(runs, np.int64)
        self.found = np.zeros((len(at_s), runs))

    def look(self, before_s: Floats, then_s: Floats, now_s: Floats, here_s: Floats) -> None:
        """Takes the times and the progress before and after something happened."""
        while (passed := self._at_s[self._next] <= now_s).any():
            runs = np.flatnonzero(passed)
            at = self._next[runs]
            share = (self._at_s[at] - before_s[runs]) / np.maximum(now_s - before_s, 1e-9)[runs]
            self.found[at, runs] = then_s[runs] + share * (here_s - then_s)[runs]
            self._next[runs] += 1
