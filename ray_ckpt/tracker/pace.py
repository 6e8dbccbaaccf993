"""How long a step takes, and how often to save at that pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from ray_ckpt.policy.belief import FailureBelief
from ray_ckpt.policy.decision import Decision, Measured, decide, oversteps
from ray_ckpt.policy.failures import FailureModel
from ray_ckpt.policy.slowdown import UploadCompany
from ray_ckpt.policy.tiers import IntervalPlan, TierCost, plan_intervals
from ray_ckpt.tiers.stack import tier_rates
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.records import TrackerOptions

# Steps whose times give the median step time.
RECENT_STEPS = 50
# The first step of an attempt waits for the data to start; alone it would mislead.
_FEW_STEPS = 3
# A step may take as long as the longest of so many before it.
_LATEST_STEPS = 10
# A slow tier may be needed so rarely that the formulas would leave it alone for days; no team would.
SLOW_TIER_MAX_S = 6 * 3600.0
# A decision is written down when it moves by more than this share.
_WORTH_TELLING = 0.02


class Pace:
    """The step time of a run, and the decision that follows from it.

    Args:
        options: how to decide.
        memory: of the run so far.
        step_times_s: of the last steps of the run so far, seconds.

    Attributes:
        first_step_s: time of the first step of the present attempt, seconds; until it is told, of the one before.
    """

    def __init__(
        self, options: TrackerOptions, memory: RunMemory, step_times_s: Iterable[float]
    ) -> None:
        self._options = options
        self._times_s = deque(step_times_s, maxlen=RECENT_STEPS)
        self._before_s: float | None = None
        self.first_step_s: float | None = None
        self._company = UploadCompany()
        self.tiers: IntervalPlan | None = None
        self.decision = self._decision(memory)
        # A run that has begun was told another decision, by the tracker before this one.
        self._told = None if memory.generation else self.decision

    @property
    def step_time_s(self) -> float | None:
        """Median time of the last steps, seconds.

        Until the present attempt has told a few, that of the attempt before: another number of workers may
        have another pace, but a guess is better than none. None while nothing is known.
        """
        return median(self._times_s) if self._few_are_known() else self._before_s

    @property
    def longest_step_s(self) -> float | None:
        """Longest of the last few steps, seconds; None while nothing is known."""
        return max(list(self._times_s)[-_LATEST_STEPS:], default=self._before_s)

    def _few_are_known(self) -> bool:
        return len(self._times_s) >= _FEW_STEPS

    def begin_attempt(self) -> None:
        """The times so far are those of the attempt before."""
        self._before_s = self.step_time_s
        self._times_s.clear()
        self._company.begin_attempt()

    def steps(self, times_s: Iterable[float]) -> bool:
        """Takes the times of steps, seconds; True when it is time to decide again.

        That is when the present attempt's pace is known by them, and when it has moved so far that the
        decision breaks a limit: a save may be a long way off.
        """
        knew = self._few_are_known()
        times_s = list(times_s)
        if times_s and not self._times_s:
            self.first_step_s = times_s[0]
        self._times_s.extend(times_s)
        self._company.steps(times_s)
        if not self._few_are_known():
            return False
        return not knew or oversteps(self.decision, median(self._times_s), self._options.limits)

    def saved(self, steps_since: int, upload_s: float) -> None:
        """Takes the end of a save.

        Args:
            steps_since: steps told since the one that was saved.
            upload_s: of that save, seconds.
        """
        self._company.saved(steps_since, upload_s)

    def decide(self, memory: RunMemory) -> Decision | None:
        """Decides again; returns the decision when it differs from the last one that was returned."""
        new, old = self._decision(memory, self.decision), self._told
        self.decision = new
        if (
            old is not None
            and new.formula == old.formula
            and abs(new.every_steps - old.every_steps) <= _WORTH_TELLING * old.every_steps
        ):
            return None
        self._told = new
        return new

    def tier_every(self, tier: str) -> int:
        """Steps between copies to a slower tier; until one was measured, as many as between saves."""
        if fixed := self._options.tier_steps.get(tier):
            return fixed
        if self.tiers is None:
            return self.decision.every_steps
        return self.tiers.every_steps[self._options.stack.use.index(tier)]

    def decide_tiers(self, memory: RunMemory) -> IntervalPlan | None:
        """Decides again how often copies go to slower tiers; returns the plan when it differs from the one before."""
        slower = self._options.stack.use[1:]
        decided = [name for name in slower if not self._options.tier_steps.get(name)]
        measured = all(name in memory.transfers_s for name in slower)
        if not decided or not measured or not self.step_time_s:
            return None
        old, self.tiers = self.tiers, self._tier_plan(memory, self.step_time_s)
        return None if old is not None and old.every_steps == self.tiers.every_steps else self.tiers

    def _tier_plan(self, memory: RunMemory, step_s: float) -> IntervalPlan:
        """The intervals of all tiers together."""
        stack, limits = self._options.stack, self._options.limits
        needs = tier_rates(self._failures(memory).rates(max(1, memory.world_size)), stack)
        slowdown = self._company.slowdown
        first = TierCost(
            name=stack.use[0],
            stall_s=memory.stall_s or 0.0,
            upload_s=memory.upload_s or 0.0,
            slowdown=slowdown,
            failures_per_s=needs[stack.use[0]],
        )
        slower = [
            TierCost(
                name=name,
                stall_s=0.0,
                upload_s=median(memory.transfers_s[name]),
                slowdown=slowdown,
                failures_per_s=needs[name],
            )
            for name in stack.use[1:]
        ]
        long = replace(limits, fixed_steps=0, max_s=max(limits.max_s, SLOW_TIER_MAX_S))
        held = self.tiers.every_steps if self.tiers is not None else ()
        return plan_intervals([first, *slower], step_s, [limits, *[long] * len(slower)], held)

    def mtbf_at(self, memory: RunMemory, world_size: int) -> float:
        """Mean time between failures with so many workers, seconds."""
        return self._failures(memory).at(world_size).mtbf_s

    def belief(self, memory: RunMemory) -> FailureBelief:
        """How often the job fails at the present number of workers."""
        return self._failures(memory).at(max(1, memory.world_size))

    def _failures(self, memory: RunMemory) -> FailureModel:
        seen = [*self._options.history, *memory.seen()]
        return FailureModel(self._options.prior(), seen)

    def _decision(self, memory: RunMemory, held: Decision | None = None) -> Decision:
        measured = Measured(
            step_s=self.step_time_s,
            stall_s=memory.stall_s,
            upload_s=memory.upload_s,
            world_size=max(1, memory.world_size),
            slowdown=self._company.slowdown,
        )
        return decide(measured, self.belief(memory), self._options.limits, held)
