"""How long a step takes, and how often to save at that pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from ray_ckpt.policy.decision import Decision, Measured, decide, oversteps
from ray_ckpt.policy.failures import FailureBelief
from ray_ckpt.policy.interval import young
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.records import TrackerOptions

# Steps whose times give the median step time.
RECENT_STEPS = 50
# The first step of an attempt waits for the data to start; alone it would mislead.
_FEW_STEPS = 3
# A decision is written down when it moves by more than this share.
_WORTH_TELLING = 0.02


class Pace:
    """The step time of a run, and the decision that follows from it.

    Args:
        options: how to decide.
        memory: of the run so far.
        step_times_s: of the last steps of the run so far, seconds.
    """

    def __init__(
        self, options: TrackerOptions, memory: RunMemory, step_times_s: Iterable[float]
    ) -> None:
        self._options = options
        self._times_s = deque(step_times_s, maxlen=RECENT_STEPS)
        self._before_s: float | None = None
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

    def _few_are_known(self) -> bool:
        return len(self._times_s) >= _FEW_STEPS

    def begin_attempt(self) -> None:
        """The times so far are those of the attempt before."""
        self._before_s = self.step_time_s
        self._times_s.clear()

    def steps(self, times_s: Iterable[float]) -> bool:
        """Takes the times of steps, seconds; True when it is time to decide again.

        That is when the present attempt's pace is known by them, and when it has moved so far that the
        decision breaks a limit: a save may be a long way off.
        """
        knew = self._few_are_known()
        self._times_s.extend(times_s)
        if not self._few_are_known():
            return False
        return not knew or oversteps(self.decision, median(self._times_s), self._options.limits)

    def decide(self, memory: RunMemory) -> Decision | None:
        """Decides again; returns the decision when it differs from the last one that was returned."""
        new, old = self._decision(memory), self._told
        self.decision = new
        if (
            old is not None
            and new.formula == old.formula
            and abs(new.every_steps - old.every_steps) <= _WORTH_TELLING * old.every_steps
        ):
            return None
        self._told = new
        return new

    def tier_every(self, tier: str, memory: RunMemory) -> int:
        """Steps between copies to a slower tier.

        A copy takes nothing from training but bandwidth, so what it costs is its time, and what it saves is the work
        since the last one when the faster tiers are lost: Young's formula with the one as the stall. Not more often
        than the copies themselves take, nor than there are saves.
        """
        if fixed := self._options.tier_steps.get(tier):
            return fixed
        step_s, times_s = self.step_time_s, memory.transfers_s.get(tier)
        if not step_s or not times_s:
            return self.decision.every_steps
        copy_s = median(times_s)
        wanted_s = max(young(copy_s, self.belief(memory).mtbf_s), copy_s)
        limited_s = min(wanted_s, self._options.limits.max_s)
        return max(self.decision.every_steps, round(limited_s / step_s))

    def belief(self, memory: RunMemory) -> FailureBelief:
        """How often the job fails."""
        return FailureBelief(
            prior_mtbf_s=self._options.prior_mtbf_s,
            prior_weight=self._options.prior_weight,
            failures=memory.failures,
            exposure_s=memory.exposure_s,
        )

    def _decision(self, memory: RunMemory) -> Decision:
        measured = Measured(
            step_s=self.step_time_s,
            stall_s=memory.stall_s,
            upload_s=memory.upload_s,
            world_size=max(1, memory.world_size),
        )
        return decide(measured, self.belief(memory), self._options.limits)
