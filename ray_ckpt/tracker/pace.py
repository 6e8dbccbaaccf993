"""How long a step takes, and how often to save at that pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from ray_ckpt.policy.belief import FailureBelief
from ray_ckpt.policy.decision import Decision, Measured, decide, oversteps
from ray_ckpt.policy.failures import FailureModel
from ray_ckpt.policy.slowdown import UploadCompany
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
        self._company = UploadCompany()
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
        self._company.begin_attempt()

    def steps(self, times_s: Iterable[float]) -> bool:
        """Takes the times of steps, seconds; True when it is time to decide again.

        That is when the present attempt's pace is known by them, and when it has moved so far that the
        decision breaks a limit: a save may be a long way off.
        """
        knew = self._few_are_known()
        times_s = list(times_s)
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

    def belief(self, memory: RunMemory) -> FailureBelief:
        """How often the job fails at the present number of workers."""
        model = FailureModel(self._options.prior(), memory.seen())
        return model.at(max(1, memory.world_size))

    def _decision(self, memory: RunMemory, held: Decision | None = None) -> Decision:
        measured = Measured(
            step_s=self.step_time_s,
            stall_s=memory.stall_s,
            upload_s=memory.upload_s,
            world_size=max(1, memory.world_size),
            slowdown=self._company.slowdown,
        )
        return decide(measured, self.belief(memory), self._options.limits, held)
