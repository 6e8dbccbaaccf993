"""What the interval between saves may not overstep, and how a time becomes whole steps inside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A quotient that should be whole may miss it by the last bit.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalLimits:
    """What a decision may not overstep.

    Attributes:
        fixed_steps: save every so many steps and compute nothing, whatever the limits; 0 computes.
        min_s: least time between saves, seconds.
        max_s: most time between saves, seconds.
        first_steps: steps before the first save, while nothing is measured.
    """

    fixed_steps: int = 0
    min_s: float = 1.0
    max_s: float = 3600.0
    first_steps: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.min_s <= self.max_s < math.inf:
            raise ValueError(
                f"need 0 < policy.min-interval-s <= policy.max-interval-s, both finite, got {self.min_s} "
                f"and {self.max_s}"
            )
        if self.fixed_steps < 0 or self.first_steps < 1:
            raise ValueError(
                "policy.interval-steps must be 0 (computed) or more, policy.first-save-steps at least 1"
            )

    def steps(self, step_s: float, upload_s: float = 0.0) -> tuple[int, int]:
        """Fewest and most steps between saves, both at least 1; the fewest may be more than the most.

        Args:
            step_s: time of a step, seconds.
            upload_s: a save that starts before the last one is safe would only wait for it.
        """
        step_s = max(step_s, 1e-9)
        least = math.ceil(max(self.min_s, upload_s) / step_s * (1 - ROUNDING))
        most = math.floor(self.max_s / step_s * (1 + ROUNDING))
        return max(1, least), max(1, most)
