"""When to save next: a decision, and the sentence that explains it.

What is believed about failures is a distribution, and the decision takes its mean rate. The waste is all but linear in
the rate, so the interval that is best for the mean wastes least in expectation over all that is believed. It is not the
best for the true rate, which nobody knows: after n failures the interval is off by a share of ``1 / 2 sqrt(n + 1)``,
and the part of the waste that it decides is larger by about ``1 / 8 (n + 1)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_ckpt.policy.belief import FailureBelief
from ray_ckpt.policy.limits import ROUNDING, IntervalLimits
from ray_ckpt.policy.tiers import TierCost, plan_intervals
from ray_ckpt.policy.words import percent, seconds

__all__ = ["Decision", "IntervalLimits", "Measured", "decide", "oversteps", "steps_to_next"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the run has measured; None where it has not.

    Attributes:
        step_s: time of a step, seconds.
        stall_s: time training stands still for one save, seconds.
        upload_s: time from the end of the stall to the commit, seconds.
        world_size: workers now.
        slowdown: share of the time of an upload that training loses, 0 to 1.
    """

    step_s: float | None
    stall_s: float | None
    upload_s: float | None
    world_size: int
    slowdown: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Save every ``every_steps`` steps, because of ``reason``.

    Attributes:
        every_steps: steps between saves, at least 1.
        interval_s: the same in seconds; None when no step was measured yet.
        formula: "fixed", "first" or "exact".
        reason: the sentence that log, dashboard and command line show.
    """

    every_steps: int
    interval_s: float | None
    formula: str
    reason: str


def decide(
    measured: Measured, belief: FailureBelief, limits: IntervalLimits, held: Decision | None = None
) -> Decision:
    """Computes the number of steps between saves from what was measured.

    Args:
        measured: by the run.
        belief: about failures at its present number of workers.
        limits: of the decision.
        held: what is done now. Its number of steps stays while it keeps the limits and another one would win
            less than 2 % of the waste.
    """
    if limits.fixed_steps:
        fixed_s = None if measured.step_s is None else limits.fixed_steps * measured.step_s
        return Decision(
            every_steps=limits.fixed_steps,
            interval_s=fixed_s,
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
    return _exact_decision(measured, measured.step_s, measured.stall_s, belief, limits, held)


def steps_to_next(every_steps: int, failed_in_a_row: int) -> int:
    """Steps from the beginning of one save to the next.

    A failed save is tried again soon, and less and less often while it keeps failing.
    """
    return min(every_steps, 2**failed_in_a_row) if failed_in_a_row else every_steps


def oversteps(decision: Decision, step_s: float, limits: IntervalLimits) -> bool:
    """Whether a decision breaks a limit now that a step takes ``step_s`` seconds.

    A fixed number of steps has no limits in seconds.
    """
    interval_s = decision.every_steps * step_s
    inside = limits.min_s * (1 - ROUNDING) <= interval_s <= limits.max_s * (1 + ROUNDING)
    return decision.formula != "fixed" and not inside


def _first_decision(step_s: float, limits: IntervalLimits) -> Decision:
    early = limits.first_steps * step_s
    wanted = min(max(early, limits.min_s), limits.max_s)
    note = ""
    if wanted != early:
        limit = "policy.min-interval-s" if early < limits.min_s else "policy.max-interval-s"
        note = f", {limit} = {seconds(wanted)}"
    least, most = limits.steps(step_s)
    steps = min(max(round(wanted / max(step_s, 1e-9)), least), most)
    return Decision(
        every_steps=steps,
        interval_s=steps * step_s,
        formula="first",
        reason=f"first: no save measured yet, save after {steps} steps to measure{note}",
    )


def _exact_decision(
    measured: Measured,
    step_s: float,
    stall_s: float,
    belief: FailureBelief,
    limits: IntervalLimits,
    held: Decision | None,
) -> Decision:
    upload_s = measured.upload_s or 0.0
    tier = TierCost(
        name="durable",
        stall_s=stall_s,
        upload_s=upload_s,
        slowdown=measured.slowdown,
        failures_per_s=1 / belief.mtbf_s,
    )
    before = (held.every_steps,) if held is not None and held.formula == "exact" else ()
    steps = plan_intervals([tier], step_s, limits, held=before).every_steps[0]
    kept = before == (steps,) and plan_intervals([tier], step_s, limits).every_steps != before
    interval_s = steps * step_s
    slower = ""
    if measured.slowdown and upload_s:
        slower = f" slowing steps by {percent(measured.slowdown)}"
    workers = f"{measured.world_size} worker{'s' if measured.world_size > 1 else ''}"
    optimum = f"{seconds(tier.optimum_s())}{_limit_note(tier, limits, kept)}"
    costs = (
        f"saving costs {percent(tier.saving(interval_s))}" if interval_s else "steps take no time"
    )
    reason = (
        f"exact: stall C {seconds(stall_s)}, MTBF M {seconds(belief.mtbf_s)} at {workers} "
        f"({belief.describe()}), upload U {seconds(upload_s)}{slower} -> {optimum} = {steps} steps of "
        f"{seconds(step_s)}; {costs}, rework {percent(tier.rework(interval_s))}"
    )
    return Decision(every_steps=steps, interval_s=interval_s, formula="exact", reason=reason)


def _limit_note(tier: TierCost, limits: IntervalLimits, kept: bool) -> str:
    """Why the interval is not the optimum, in brackets; empty when it is."""
    optimum, floor = tier.optimum_s(), max(limits.min_s, tier.upload_s)
    wanted = min(max(optimum, floor), limits.max_s)
    note = ""
    if kept:
        note = "less than 2 % better than now, so kept"
    elif optimum > limits.max_s:
        note = f"cut to {seconds(wanted)}, policy.max-interval-s"
    elif floor > limits.max_s:
        note = (
            f"held at {seconds(wanted)} by policy.max-interval-s, though an upload takes "
            f"{seconds(tier.upload_s)}"
        )
    elif optimum < floor:
        why = "upload time" if tier.upload_s > limits.min_s else "policy.min-interval-s"
        note = f"raised to {seconds(wanted)}, the {why}"
    return f" ({note})" if note else ""
