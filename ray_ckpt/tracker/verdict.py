"""Whether a run goes on after an interruption."""

from __future__ import annotations

from typing import Any

from ray_ckpt.policy.loops import backoff_s
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.records import TrackerOptions, Verdict


def verdict(memory: RunMemory, options: TrackerOptions, trouble: dict[str, Any] | None) -> Verdict:
    """Whether another attempt is worth it.

    Args:
        memory: of the run, with the interruption.
        options: how to decide.
        trouble: what the attempt that ended had said of itself, None for nothing.
    """
    if trouble is not None and trouble["action"] == "stop":
        return Verdict(go_on=False, reason=str(trouble["reason"]))
    loop = memory.loop
    if loop is not None and loop["action"] == "stop":
        return Verdict(go_on=False, reason=str(loop["reason"]))
    fruitless = memory.fruitless
    if fruitless >= options.max_fruitless:
        return Verdict(
            go_on=False,
            reason=f"{fruitless} attempts in a row ended before a new step or checkpoint, the last "
            f"{memory.last_end}",
        )
    reason = "restart from the newest checkpoint" if loop is None else str(loop["reason"])
    return Verdict(go_on=True, reason=reason, wait_s=backoff_s(memory.failed, options.loops))
