"""Which nodes are slower than the others, by what their ranks need for themselves. Pure.

One slow save says little: a node is a straggler after several in a row, and none any more after as many without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Paces = Sequence[tuple[str, float | None]]
"""Node and mean time of a pass of each rank, seconds; None where it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerRule:
    """When a node is a straggler.

    Attributes:
        factor: so many times the time of the others; 0 never looks.
        saves: in a row.
    """

    factor: float = 1.5
    saves: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Slow:
    """The slowest rank of a node at one save.

    Attributes:
        rank: which.
        pace_s: of it, seconds.
        others_s: median of the other ranks, seconds.
    """

    rank: int
    pace_s: float
    others_s: float

    @property
    def factor(self) -> float:
        """How many times as long it takes."""
        return self.pace_s / self.others_s


def slowest(paces: Paces) -> dict[str, Slow]:
    """The slowest rank of each node, against all other ranks; empty when fewer than two are known."""
    known = {rank: (node, s) for rank, (node, s) in enumerate(paces) if s is not None and s > 0}
    found: dict[str, Slow] = {}
    for rank, (node, pace_s) in known.items():
        others = [s for other, (_, s) in known.items() if other != rank]
        if others and (node not in found or pace_s > found[node].pace_s):
            found[node] = Slow(rank=rank, pace_s=pace_s, others_s=median(others))
    return found


def streaks(
    before: Mapping[str, int], now: Mapping[str, Slow], rule: StragglerRule
) -> dict[str, int]:
    """Saves in a row at which each node was slow (more than 0) or was not (less).

    A node that has no rank any more keeps what it had: it may come back.

    Args:
        before: up to the save before.
        now: the slowest ranks.
        rule: the options.
    """
    after = dict(before)
    for node, slow in now.items():
        streak = before.get(node, 0)
        is_slow = slow.factor >= rule.factor
        after[node] = max(streak, 0) + 1 if is_slow else min(streak, 0) - 1
    return after


def changed(
    streaks: Mapping[str, int], told: Sequence[str], rule: StragglerRule
) -> tuple[list[str], list[str]]:
    """Nodes that have become stragglers, and those that are none any more.

    Args:
        streaks: of all nodes.
        told: nodes that are stragglers so far.
        rule: the options.
    """
    new = [node for node, count in streaks.items() if count >= rule.saves and node not in told]
    over = [node for node in told if streaks.get(node, 0) <= -rule.saves]
    return new, over
