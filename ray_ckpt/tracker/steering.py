"""What the workers and the driver are told to do: how often to save, and what somebody asked for."""

from __future__ import annotations

from dataclasses import asdict

from ray_ckpt.tracker.pace import Pace
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import Directive, Leave, TrackerOptions


class Steering:
    """Decisions and requests of one run, each on record before anybody goes by it.

    Args:
        options: how to decide.
        pace: of the run's steps.
        record: puts an event on record.
    """

    def __init__(self, *, options: TrackerOptions, pace: Pace, record: Recorder) -> None:
        self._options, self._pace = options, pace
        self._record, self._memory = record, record.memory

    # ---- how often ------------------------------------------------------------------------------

    def decide(self) -> None:
        """Decides anew how often to save and to copy, by all that is known now."""
        decision = self._pace.decide(self._memory)
        if decision is not None and self._memory.generation:
            self._record("decision", **asdict(decision))
        plan = self._pace.decide_tiers(self._memory)
        if plan is not None and self._memory.generation:
            use = self._options.stack.use[1:]
            reasons = [
                f"{name}: fixed, every {fixed} steps"
                if (fixed := self._options.tier_steps.get(name))
                else reason
                for name, reason in zip(use, plan.reasons[1:], strict=True)
            ]
            every = {name: self._pace.tier_every(name) for name in use}
            self._record("tier_decision", every_steps=every, reasons=reasons)

    @property
    def step_time_s(self) -> float | None:
        """How long a step takes, seconds; None while it is not known."""
        return self._pace.step_time_s

    def begin_attempt(self) -> None:
        """Another worker group, perhaps of another size: its pace is its own."""
        self._pace.begin_attempt()
        self.decide()

    def stepped(self, times_s: list[float]) -> None:
        """Takes the times of executed steps, seconds, and decides when they call for it."""
        if self._pace.steps(times_s):
            self.decide()

    def saved(self, steps_since: int, upload_s: float) -> None:
        """Takes the end of a save (see :meth:`ray_ckpt.tracker.pace.Pace.saved`), and decides."""
        self._pace.saved(steps_since, upload_s)
        self.decide()

    # ---- what somebody asked for ----------------------------------------------------------------

    def request_save(self, reason: str, hold_s: float) -> int:
        """Asks the workers for a save at their next step; returns the number of the request."""
        number = self._memory.save_requests + 1
        self._record("save_requested", reason=reason, number=number, hold_s=hold_s)
        return number

    def request_stop(self, reason: str) -> None:
        """Asks the driver to save at the end of a step and to end the job."""
        self._record("stop_requested", reason=reason)

    def leave(self) -> Leave | None:
        """Why the attempt is to end; None when it is not."""
        event = self._memory.leave
        if event is None or not self._memory.attempt_open:
            return None
        return Leave(kind=event["kind"], cause=event["cause"], saves=event["saves"])

    # ---- what they are told ---------------------------------------------------------------------

    def directive(self) -> Directive:
        """What rank 0 goes by until the next one."""
        decision = self._pace.decision
        return Directive(
            every_steps=decision.every_steps,
            reason=decision.reason,
            save_request=self._memory.save_requests,
            hold_s=self._memory.hold_s,
            last_commit_step=self._memory.last_commit_step,
            failed_in_a_row=self._memory.failed_in_a_row,
            durable_step=self._memory.durable_step,
            leave=self.leave(),
        )
