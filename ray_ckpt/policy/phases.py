"""Where a worker can be in its training, and how that is said. Pure."""

from __future__ import annotations

from typing import NamedTuple

PHASES = (
    "start",  # the program begins: data, model
    "restore",
    "between",  # from the end of a step to the question for the next batch: the program's own code
    "data",
    "forward",
    "backward",
    "reduce",  # what is left of adding up gradients
    "optimizer",  # from the last pass to the end of the step
    "agree",
    "save",
    "validate",
    "hold",  # somebody is about to end the attempt
    "close",
    "done",
)
"""Every phase there is; within a step in this order, but for the passes, each of which has a forward and a backward."""


class Whereabouts(NamedTuple):
    """Where a process is.

    Attributes:
        step: that it works on, counted from 1; 0 before it has restored.
        phase: one of :data:`PHASES`.
        left: passes of the step that come after the present one.
        since_s: when it came there, by its own steady clock, seconds.
        step_since_s: when it began the step.
    """

    step: int
    phase: str
    left: int
    since_s: float
    step_since_s: float
