"""The nodes of many simulated runs: how many are up, how many stand by, and when those in repair are back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ray_ckpt.policy.setting import Fleet, Floats, Ints


class Machines:
    """Nodes of each run.

    Args:
        fleet: as all of them begin.
        runs: how many.
    """

    def __init__(self, fleet: Fleet, runs: int) -> None:
        self._fleet = fleet
        self.up = np.full(runs, fleet.nodes)
        self._spares = np.full(runs, fleet.spares)
        self._back_s = np.full((1, runs), np.inf)  # each node in repair has a row, others are inf

    @property
    def next_back_s(self) -> Floats:
        """When the next node is back: [runs]; inf where none is away."""
        return self._back_s.min(axis=0)

    def lose(self, runs: Ints, now_s: Floats) -> None:
        """A node of each of these runs is gone; a spare takes its place if there is one."""
        if not self._fleet.repair_s or not len(runs):
            return  # another one is there at once
        free = np.isinf(self._back_s[:, runs])
        if not free.any(axis=0).all():
            self._back_s = np.vstack([self._back_s, np.full((1, self._back_s.shape[1]), np.inf)])
            free = np.isinf(self._back_s[:, runs])
        self._back_s[free.argmax(axis=0), runs] = now_s[runs] + self._fleet.repair_s
        has_spare = self._spares[runs] > 0
        self._spares[runs] -= has_spare
        self.up[runs] -= ~has_spare

    def take_back(self, who: NDArray[np.bool_], now_s: Floats) -> None:
        """Repaired nodes take the places that are empty, then stand by."""
        back = (self._back_s <= now_s) & who
        if not back.any():
            return
        self._back_s[back] = np.inf
        count = back.sum(axis=0)
        joined = np.minimum(count, self._fleet.nodes - self.up)
        self.up += joined
        self._spares += count - joined
