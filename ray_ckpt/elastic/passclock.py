"""How long a rank takes by itself: the time of a forward pass, which waits for nobody.

Everything after the forward pass may wait for other ranks, so that all take the same time for a step, and the slow one
cannot be told by it. Ranks may have different numbers of passes: one of each step is measured, the first. Shards
(FSDP2) are gathered in the forward pass too, where a slow rank is waited for: there the others look nearly as slow.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class PassClock:
    """Measures one forward pass of each step.

    On a GPU the pass is timed by the device itself: its kernels run long after they were asked for.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._marks: list[Any] = []
        self._sum_s, self._count = 0.0, 0

    def begin(self) -> None:
        """The first pass of a step begins."""
        self._marks = [self._mark()]

    def end(self) -> None:
        """A forward pass is over; only the first of a step is measured."""
        if len(self._marks) == 1:
            self._marks.append(self._mark())

    def settle(self, *, counts: bool = True) -> None:
        """The step is over, and everything that the device was asked for in it is done.

        Args:
            counts: False for a step that says nothing, such as the first one, which compiles.
        """
        marks, self._marks = self._marks, []
        if len(marks) < 2 or not counts:
            return
        begin, end = marks
        self._sum_s += begin.elapsed_time(end) / 1e3 if self._device else end - begin
        self._count += 1

    def take(self) -> float | None:
        """The mean since it was last taken, seconds; None for no step."""
        mean_s = self._sum_s / self._count if self._count else None
        self._sum_s, self._count = 0.0, 0
        return mean_s

    def _mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
