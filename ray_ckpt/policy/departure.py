"""When the workers of a node that will be taken away save and leave: as late as is safe.

Until the save begins the node still trains. It begins when what is left until the deadline is what a save needs until
it is where the node's end cannot reach it, and a margin. When that is more than what is left, no save is begun that
could not finish: the last committed checkpoint stands, and the sooner the workers leave, the less is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["wait", "save", "leave"]

# How long an order is on its way from the tracker to rank 0, which asks twice a second within a long step, seconds.
ORDER_S = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTimes:
    """What a save takes until its checkpoint survives the node, as measured.

    Attributes:
        step_s: longest of the last steps: the one that runs is ended first; None when no step was told yet.
        in_flight_s: longest that the save before it may still take; 0 when none is in flight.
        stall_s: longest of the last stalls.
        upload_s: longest of the last uploads; None when there was no save yet.
        copy_s: from the commit to copies elsewhere; 0 when the commit is where the node's end cannot reach it,
            None when that was not measured yet.
    """

    step_s: float | None
    in_flight_s: float
    stall_s: float
    upload_s: float | None
    copy_s: float | None

    @property
    def needed_s(self) -> float | None:
        """From the order to a checkpoint that survives, seconds; None when a part of it is not known."""
        if self.step_s is None or self.upload_s is None or self.copy_s is None:
            return None
        return ORDER_S + self.step_s + self.in_flight_s + self.stall_s + self.upload_s + self.copy_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """What to do about a node that will be taken away.

    Attributes:
        action: "wait"; "save", then leave; or "leave" without a save, because it could not finish.
        reason: in words.
    """

    action: Action
    reason: str


def decide_departure(left_s: float | None, times: SaveTimes, margin_s: float) -> Departure:
    """Decides whether it is time to save and leave.

    Args:
        left_s: until the node's end, seconds; None when nobody said when that is.
        times: what a save takes.
        margin_s: how much sooner than the last moment, seconds.
    """
    needed_s = times.needed_s
    if left_s is None:
        return Departure(action="save", reason="nobody said how long the node stays: saved at once")
    if left_s <= 0:
        return Departure(action="leave", reason="the deadline has passed, and no save was begun")
    if needed_s is None:
        return Departure(
            action="save",
            reason=f"{left_s:.0f} s are left and no save was measured yet: saved at once",
        )
    if left_s < needed_s:
        return Departure(
            action="leave",
            reason=f"{left_s:.1f} s are left and a save needs {needed_s:.1f} s: none is begun that could not "
            "finish, the last committed checkpoint stands",
        )
    if left_s <= needed_s + margin_s:
        return Departure(
            action="save",
            reason=f"{left_s:.1f} s are left and a save needs {needed_s:.1f} s, with a margin of {margin_s:g} s",
        )
    return Departure(
        action="wait",
        reason=f"{left_s:.0f} s are left and a save needs {needed_s:.1f} s: the node still trains",
    )
