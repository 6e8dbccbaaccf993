"""When to save next: a decision, and the sentence that explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_ckpt.policy.failures import FailureBelief
from ray_ckpt.policy.interval import young

# A quotient that should be whole may miss it by the last bit.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalLimits:
    """What a decision may not overstep.

    Attributes:
        fixed_steps: save every so many steps and compute nothing, whatever the limits; 0 computes.
        min_s: least time between saves, seconds.
        max_s: most time between saves, seconds.
        first_steps: steps before the first save, while nothing is measured.
    """

    fixed_steps: int = 0
    min_s: float = 1.0
    max_s: float = 3600.0
    first_steps: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.min_s <= self.max_s < math.inf:
            raise ValueError(
                f"need 0 < policy.min-interval-s <= policy.max-interval-s, both finite, got {self.min_s} "
                f"and {self.max_s}"
            )
        if self.fixed_steps < 0 or self.first_steps < 1:
            raise ValueError(
                "policy.interval-steps must be 0 (computed) or more, policy.first-save-steps at least 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the run has measured; None where it has not.

    Attributes:
        step_s: time of a step, seconds.
        stall_s: time training stands still for one save, seconds.
        upload_s: time from the end of the stall to the commit, seconds.
        world_size: workers now.
    """

    step_s: float | None
    stall_s: float | None
    upload_s: float | None
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Save every ``every_steps`` steps, because of ``reason``.

    Attributes:
        every_steps: steps between saves, at least 1.
        interval_s: the same in seconds; None when no step was measured yet.
        formula: "fixed", "first" or "young".
        reason: the sentence that log, dashboard and command line show.
    """

    every_steps: int
    interval_s: float | None
    formula: str
    reason: str


def decide(measured: Measured, belief: FailureBelief, limits: IntervalLimits) -> Decision:
    """Computes the number of steps between saves from what was measured."""
    if limits.fixed_steps:
        seconds = None if measured.step_s is None else limits.fixed_steps * measured.step_s
        return Decision(
            every_steps=limits.fixed_steps,
            interval_s=seconds,
            formula="fixed",
            reason=f"fixed: every {limits.fixed_steps} steps, as policy.interval-steps says",
        )
    if measured.step_s is None:
        return Decision(
            every_steps=limits.first_steps,
            interval_s=None,
            formula="first",
            reason=f"first: nothing measured yet, save after {limits.first_steps} steps to measure",
        )
    if measured.stall_s is None:
        return _first_decision(measured.step_s, limits)
    return _young_decision(measured, measured.step_s, measured.stall_s, belief, limits)


def steps_to_next(every_steps: int, failed_in_a_row: int) -> int:
    """Steps from the beginning of one save to the next.

    A failed save is tried again soon, and less and less often while it keeps failing.
    """
    return min(every_steps, 2**failed_in_a_row) if failed_in_a_row else every_steps


def oversteps(decision: Decision, step_s: float, limits: IntervalLimits) -> bool:
    """Whether a decision breaks a limit now that a step takes ``step_s`` seconds.

    A fixed number of steps has no limits in seconds.
    """
    seconds = decision.every_steps * step_s
    inside = limits.min_s * (1 - _ROUNDING) <= seconds <= limits.max_s * (1 + _ROUNDING)
    return decision.formula != "fixed" and not inside


def _first_decision(step_s: float, limits: IntervalLimits) -> Decision:
    early = limits.first_steps * step_s
    wanted = min(max(early, limits.min_s), limits.max_s)
    note = ""
    if wanted != early:
        limit = "policy.min-interval-s" if early < limits.min_s else "policy.max-interval-s"
        note = f", {limit} = {_seconds(wanted)}"
    steps = _whole_steps(wanted, max(step_s, 1e-9), limits.min_s, limits.max_s)
    return Decision(
        every_steps=steps,
        interval_s=steps * step_s,
        formula="first",
        reason=f"first: no save measured yet, save after {steps} steps to measure{note}",
    )


def _young_decision(
    measured: Measured,
    step_s: float,
    stall_s: float,
    belief: FailureBelief,
    limits: IntervalLimits,
) -> Decision:
    optimum = young(stall_s, belief.mtbf_s)
    upload_s = measured.upload_s or 0.0
    notes = []
    # A save that starts before the last one is durable would only wait for it.
    floor = max(limits.min_s, upload_s)
    wanted = min(max(optimum, floor), limits.max_s)
    if optimum > limits.max_s:
        notes.append(f"cut to {_seconds(wanted)}, policy.max-interval-s")
    elif floor > limits.max_s:
        notes.append(
            f"held at {_seconds(wanted)} by policy.max-interval-s, though an upload takes {_seconds(upload_s)}"
        )
    elif optimum < floor:
        why = "upload time" if upload_s > limits.min_s else "policy.min-interval-s"
        notes.append(f"raised to {_seconds(wanted)}, the {why}")
    steps = _whole_steps(wanted, max(step_s, 1e-9), floor, limits.max_s)
    note = f" ({'; '.join(notes)})" if notes else ""
    reason = (
        f"young: stall C {_seconds(stall_s)}, MTBF M {_seconds(belief.mtbf_s)} at "
        f"{measured.world_size} worker{'s' if measured.world_size > 1 else ''} ({belief.describe()}): "
        f"sqrt(2 C M) = {_seconds(optimum)}{note} = {steps} steps of {_seconds(step_s)}"
    )
    return Decision(every_steps=steps, interval_s=steps * step_s, formula="young", reason=reason)


def _whole_steps(wanted_s: float, step_s: float, least_s: float, most_s: float) -> int:
    """The number of steps nearest to a time, inside the limits where some number is; at least 1."""
    least = math.ceil(least_s / step_s * (1 - _ROUNDING))
    most = math.floor(most_s / step_s * (1 + _ROUNDING))
    return max(1, min(max(round(wanted_s / step_s), least), most))


def _seconds(value: float) -> str:
    """Seconds for a sentence: three figures and the unit that reads best."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    if value >= 600:
        return f"{value / 60:.3g} min"
    if value >= 1 or value == 0 or not math.isfinite(value):
        return f"{value:.3g} s"
    return f"{value * 1000:.3g} ms"
