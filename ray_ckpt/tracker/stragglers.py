"""Nodes that are slower than the others, on record: a run is as fast as its slowest worker."""

from __future__ import annotations

from collections.abc import Callable

from ray_ckpt.policy.stragglers import Paces, StragglerRule, changed, slowest, streaks
from ray_ckpt.tracker.memory import RunMemory


class Stragglers:
    """Stragglers of one run.

    Args:
        rule: the options.
        memory: of the run.
        record: puts an event on record.
    """

    def __init__(self, rule: StragglerRule, memory: RunMemory, record: Callable[..., None]) -> None:
        self._rule, self._memory, self._record = rule, memory, record
        # A tracker that was started again counts anew; who was told to be a straggler, the journal knows.
        self._streaks: dict[str, int] = {}

    def saved(self, step: int, paces: Paces) -> None:
        """Takes what the ranks tell with a save.

        Args:
            step: that was saved.
            paces: by rank; a rank on no node that is known counts as a node of its own.
        """
        if not self._rule.factor:
            return
        named = [(node or f"rank {rank}", pace_s) for rank, (node, pace_s) in enumerate(paces)]
        now = slowest(named)
        self._streaks = streaks(self._streaks, now, self._rule)
        new, over = changed(self._streaks, list(self._memory.stragglers), self._rule)
        for node in (*new, *over):
            if node not in now:
                continue  # it has no rank just now
            self._record(
                "straggler" if node in new else "straggler_over",
                step=step,
                node=node,
                rank=now[node].rank,
                factor=now[node].factor,
                pace_s=now[node].pace_s,
                others_s=now[node].others_s,
                saves=self._rule.saves,
            )
