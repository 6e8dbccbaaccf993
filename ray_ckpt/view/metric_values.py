"""What the gauges of a run say, from what its tracker last said of itself; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_ckpt.policy.belief import Seen
from ray_ckpt.policy.failures import FailureModel
from ray_ckpt.tracker.records import TrackerOptions
from ray_ckpt.view.account import Account
from ray_ckpt.view.metric_names import COPIES, Key
from ray_ckpt.view.run_totals import RunTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the tracker said.

    Attributes:
        status: see :meth:`ray_ckpt.tracker.core.TrackerCore.status`.
        seen: exposure and failures of the run so far.
        fruitless: attempts in a row without a new step or checkpoint.
        stepped_s: when a new step was last told, or the tracker began; monotonic seconds.
    """

    status: Mapping[str, Any]
    seen: tuple[Seen, ...]
    fruitless: int
    stepped_s: float


def gauges(
    look: Look,
    totals: RunTotals | None,
    options: TrackerOptions,
    *,
    time_s: float,
    monotonic_s: float,
) -> dict[Key, float]:
    """Every gauge whose value is known.

    Args:
        look: at the tracker.
        totals: of the run; None while its old journal is not read yet.
        options: of the tracker.
        time_s: now, seconds since the epoch.
        monotonic_s: now, on the clock of ``look``.
    """
    status = look.status
    last = status["last"]
    world_size = max(1, status["world_size"])
    belief = FailureModel(options.prior(), [*options.history, *look.seen]).at(world_size)
    offset = last.get("sample_offset")
    if offset is None and totals is not None:
        offset = totals.sample_offset  # of the last commit, as long as nothing newer is told
    found: dict[Key, float | None] = {
        ("ckpt_up", ""): 1.0,
        ("ckpt_attempt_open", ""): float(status["attempt_open"]),
        ("ckpt_generation", ""): status["generation"],
        ("ckpt_world_size", ""): status["world_size"],
        ("ckpt_step", ""): status["step"],
        ("ckpt_step_age_seconds", ""): max(0.0, monotonic_s - look.stepped_s),
        ("ckpt_step_seconds", ""): status["step_time_s"],
        ("ckpt_sample_offset", ""): offset,
        ("ckpt_loss", ""): last.get("loss"),
        ("ckpt_last_commit_step", ""): status["last_commit_step"],
        ("ckpt_mtbf_seconds", ""): belief.mtbf_s,
        ("ckpt_mtbf_low_seconds", ""): belief.low_s,
        ("ckpt_mtbf_high_seconds", ""): belief.high_s,
        ("ckpt_failed_saves_in_a_row", ""): status["failed_in_a_row"],
        ("ckpt_fruitless_attempts", ""): look.fruitless,
    }
    found |= _intervals(status, totals, options)
    if totals is not None:
        found |= totals.values() | _copies(totals, time_s)
        if totals.last_drill_ok is not None:
            found["ckpt_last_drill_ok", ""] = float(totals.last_drill_ok)
    return {key: float(value) for key, value in found.items() if value is not None}


def _copies(totals: RunTotals, time_s: float) -> dict[Key, float | None]:
    found: dict[Key, float | None] = {}
    for tier in COPIES:
        newest = totals.copies.newest(tier)
        if newest is not None:
            step, saved_at = newest
            found["ckpt_copy_step", tier] = step
            # A clock that was set back since then makes no copy younger than now.
            found["ckpt_copy_age_seconds", tier] = max(0.0, time_s - saved_at)
    return found


def _intervals(
    status: Mapping[str, Any], totals: RunTotals | None, options: TrackerOptions
) -> dict[Key, float | None]:
    """Of each tier, as the tracker decides them: what is fixed, what was decided, or as often as there are saves."""
    found: dict[Key, float | None] = {}
    decision, step_s = status["decision"], status["step_time_s"]
    decided = totals.tier_steps if totals is not None else {}
    for place, tier in enumerate(options.stack.use):
        steps = decision["every_steps"]
        if place:
            steps = options.tier_steps.get(tier) or decided.get(tier, steps)
        found["ckpt_interval_steps", tier] = steps
        found["ckpt_interval_seconds", tier] = None if step_s is None else steps * step_s
    return found


def ledger_gauges(account: Account, age_s: float) -> dict[Key, float]:
    """Where the time went.

    Args:
        account: the newest one.
        age_s: since it was made, seconds.
    """
    found: dict[Key, float] = {
        ("ckpt_time_seconds", bucket): seconds for bucket, seconds in account.buckets.items()
    }
    found["ckpt_ledger_age_seconds", ""] = age_s
    if account.goodput is not None and math.isfinite(account.goodput):
        found["ckpt_goodput_ratio", ""] = account.goodput
    return found


def observed(event: Mapping[str, Any]) -> dict[Key, float]:
    """What the histograms learn of an event."""
    kind = event["event"]
    if kind == "commit":
        tier = str(event.get("tier", "durable"))
        return {
            ("ckpt_stall_seconds", ""): float(event["stall_s"]),
            ("ckpt_upload_seconds", tier): float(event["upload_s"]),
        }
    if kind == "promote":
        return {("ckpt_upload_seconds", str(event["tier"])): float(event["seconds"])}
    if kind == "restored" and event["source"]:
        return {("ckpt_restore_seconds", ""): float(event["seconds"])}
    return {}
