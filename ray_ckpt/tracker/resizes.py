"""Whether a run that trains takes the workers that the cluster has room for, as the tracker knows the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ray_ckpt.policy.decision import steps_to_next
from ray_ckpt.policy.resize import Moment, Resizing, decide_resize
from ray_ckpt.policy.restart import restart_at
from ray_ckpt.tracker.pace import Pace
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import TrackerOptions
from ray_ckpt.tracker.standing import Standing


class Resizes:
    """Decisions about the size of one run.

    Args:
        options: how to decide.
        record: puts an event on record.
        standing: where the run stands.
        pace: of its steps, and how often it saves.
        clock: seconds since the epoch, as in the journal.
        monotonic: seconds of a clock that nobody sets.
    """

    def __init__(
        self,
        *,
        options: TrackerOptions,
        record: Recorder,
        standing: Standing,
        pace: Pace,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._options, self._record, self._memory = options, record, record.memory
        self._standing, self._pace = standing, pace
        self._clock, self._monotonic = clock, monotonic
        self._offer: tuple[int, float] | None = None  # workers that there is room for, since when
        self._told: tuple[int, int, str] | None = None

    def decide(self, possible: int, workers: int, *, leaves: bool) -> Resizing:
        """Decides for an offer of the cluster; what differs from the last decision is put on record.

        Args:
            possible: workers that there is room for.
            workers: of the present group, whose attempt may not have begun yet.
            leaves: whether a node of the run will be taken away.
        """
        now_s = self._monotonic()
        if self._offer is None or self._offer[0] != possible:
            self._offer = possible, now_s
        begun = self._memory.attempt_open and self._memory.world_size == workers
        moment = replace(
            self._moment(possible, now_s - self._offer[1]),
            workers=workers,
            begun=begun,
            leaves=leaves,
        )
        resizing = decide_resize(possible, moment, self._options.resize)
        key = (self._memory.generation, possible, resizing.why)
        if resizing.why != "same" and key != self._told:
            self._record(
                "resize_decision",
                possible=possible,
                workers=resizing.workers,
                why=resizing.why,
                reason=resizing.reason,
            )
        self._told = key
        return resizing

    def _moment(self, possible: int, still_s: float) -> Moment:
        memory, decision = self._memory, self._pace.decision
        step_s = self._pace.step_time_s
        due_step = memory.last_save_step + steps_to_next(
            decision.every_steps, memory.failed_in_a_row
        )
        restart_s = restart_at(max(1, possible), list(memory.starts_s))
        if restart_s is not None:
            restart_s += (
                self._pace.first_step_s or step_s or 0.0
            )  # which is made with the new group
        grown = memory.grown_time
        return Moment(
            workers=max(1, memory.world_size),
            steps_left=max(0, self._options.resize.total_steps - self._standing.step),
            step_s=step_s,
            restart_s=restart_s,
            mtbf_s=self._pace.mtbf_at(memory, max(1, possible)),
            save_due_s=None if step_s is None else (due_step - self._standing.step) * step_s,
            interval_s=decision.every_steps * (step_s or 0.0),
            still_s=still_s,
            since_growth_s=None if grown is None else max(0.0, self._clock() - grown),
        )
