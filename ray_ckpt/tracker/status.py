"""Where a run stands, as plain values: for metrics, the dashboard and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ray_ckpt.policy.decision import steps_to_next
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.pace import Pace
from ray_ckpt.tracker.standing import Standing


def status_of(
    run: str,
    memory: RunMemory,
    standing: Standing,
    pace: Pace,
    *,
    segment: int,
    tiers: Sequence[str],
) -> dict[str, Any]:
    """Where a run stands.

    Args:
        run: its name.
        memory: of the run.
        standing: its steps.
        pace: of its steps.
        segment: number of the segment it trains in.
        tiers: that it uses.
    """
    return {
        "run": run,
        "attempt_open": memory.attempt_open,
        "stop_request": memory.stop_request,
        "generation": memory.generation,
        "segment": segment,
        "world_size": memory.world_size,
        "nodes": list(memory.nodes),
        "step": standing.step,
        "last": standing.last_record,
        "step_time_s": pace.step_time_s,
        "commits": memory.commits,
        "failed_saves": memory.failed_saves,
        "refused": memory.refused,
        "leaving": memory.leave is not None,
        "settled_request": memory.settled_request,
        "saves_settled": memory.commits + memory.refused,
        "last_commit_step": memory.last_commit_step,
        "last_commit_time": memory.last_commit_time,
        "failed_in_a_row": memory.failed_in_a_row,
        "next_save_step": memory.last_save_step
        + steps_to_next(pace.decision.every_steps, memory.failed_in_a_row),
        "interruptions": dict(memory.interruptions),
        "lost_steps": memory.lost_steps,
        "first_time": memory.first_time,
        "finished_step": memory.finished_step,
        "mtbf_s": pace.belief(memory).mtbf_s,
        "decision": asdict(pace.decision),
        "tiers": {name: memory.tier_steps.get(name) for name in tiers},
    }
