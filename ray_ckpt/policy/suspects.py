"""Which worker is to blame when none goes on, by where each of them is. Pure.

Workers wait for each other in collectives, so that one that is stuck soon stops all. It is the one that is not where
the others wait: the one that does not answer, the one that is behind. Where all are at the same place nobody can tell,
and a wrong guess would put a good node under suspicion: then nobody is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_ckpt.policy.phases import PHASES, Whereabouts

# Where a worker may be waiting for others: whoever is elsewhere is by itself.
WAITING = frozenset({"forward", "backward", "reduce", "optimizer", "agree", "save", "validate"})
# Phases that may take as long as the program likes: they are not measured by the time of a step.
LONG = frozenset({"start", "restore", "between", "validate", "hold", "close", "done"})

_PASSES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """Who is to blame.

    Attributes:
        ranks: those suspected, in order; empty when nobody can tell.
        why: in words.
    """

    ranks: tuple[int, ...]
    why: str


def suspects(found: Mapping[int, Whereabouts | None]) -> Suspicion:
    """Names the suspects of a hang.

    Args:
        found: rank to where it is, of all ranks; None for one that did not answer.
    """
    silent = [rank for rank, where in sorted(found.items()) if where is None]
    there = {rank: where for rank, where in found.items() if where is not None}
    if silent and there:
        return Suspicion(
            ranks=tuple(silent), why=f"{_ranks(silent)} did not answer, the others did"
        )
    if silent:
        return Suspicion(ranks=(), why="no rank answered: what they hang in cannot be told")
    steps = {where.step for where in there.values()}
    if len(steps) > 1:
        late = [rank for rank, where in sorted(there.items()) if where.step == min(steps)]
        return _behind(late, there, f"at step {min(steps)}, the others at {max(steps)}")
    places = {rank: _place(where) for rank, where in there.items()}
    first = min(places.values(), default=())
    late = [rank for rank, place in sorted(places.items()) if place == first]
    others = [where for rank, where in there.items() if rank not in late]
    if others and all(where.phase in WAITING for where in others):
        return _behind(late, there, "the others wait further on")
    return Suspicion(ranks=(), why="all ranks are at the same place")


def _behind(late: list[int], there: Mapping[int, Whereabouts], why: str) -> Suspicion:
    if 2 * len(late) > len(there):
        # More than half cannot all be to blame: what they wait for is not among them, nor known.
        return Suspicion(ranks=(), why=f"{_ranks(late)} are behind ({why}): too many to suspect")
    where = there[late[0]]
    verb = "is" if len(late) == 1 else "are"
    return Suspicion(
        ranks=tuple(late),
        why=f"{_ranks(late)} {verb} in {where.phase!r} of step {where.step}, {why}",
    )


def _place(where: Whereabouts) -> tuple[int, int, int]:
    """How far a rank is in its step; passes are counted from the end, as ranks may have different numbers of them."""
    order = PHASES.index(where.phase)
    if where.phase in _PASSES:
        return PHASES.index("forward"), -where.left, order
    return order, 0, order


def needs_long(found: Mapping[int, Whereabouts | None]) -> bool:
    """Whether some rank does what may take longer than a step: then the others wait for it with reason.

    Args:
        found: rank to where it is; None for one that did not answer.
    """
    return any(where is not None and where.phase in LONG for where in found.values())


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
