"""Learning rate schedules whose state is numbers."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR


class _WarmupCosine:
    """Factor of the learning rate at a step; an object, so that a scheduler's state holds its numbers."""

    def __init__(self, warmup_steps: int, total_steps: int, min_ratio: float) -> None:
        self.warmup_steps, self.total_steps, self.min_ratio = warmup_steps, total_steps, min_ratio

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def warmup_cosine(
    optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, min_ratio: float
) -> LambdaLR:
    """Linear warm-up to the optimizer's learning rate, then cosine decay to ``min_ratio`` of it.

    Args:
        optimizer: its learning rate is the highest.
        warmup_steps: steps of warm-up, may be 0.
        total_steps: step at which the lowest rate is reached.
        min_ratio: lowest rate over highest, 0 to 1.
    """
    return LambdaLR(optimizer, _WarmupCosine(warmup_steps, total_steps, min_ratio))
