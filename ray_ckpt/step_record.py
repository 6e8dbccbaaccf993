"""The record of an executed step: what its line in ``steps.jsonl`` says."""

from __future__ import annotations

import time
from typing import Any

from ray_ckpt.elastic.control import Agreement
from ray_ckpt.state.train_state import Progress


def step_record(
    progress: Progress,
    agreement: Agreement,
    *,
    lr: float,
    grad_norm: float | None,
    world_size: int,
    generation: int,
    segment: int,
    step_time_s: float,
    data_wait_s: float,
    between_s: float,
) -> dict[str, Any]:
    """The line of a step that has just ended; its times are of the rank that makes it.

    Args:
        progress: after the step.
        agreement: of all ranks.
        lr: learning rate of the step.
        grad_norm: norm of the gradients before clipping, None when it is not known.
        world_size: workers.
        generation: of the attempt.
        segment: number of the run's segment.
        step_time_s: how long the step took, seconds.
        data_wait_s: how much of it was spent waiting for data, seconds.
        between_s: how much of it passed before data was asked for, seconds.
    """
    return {
        "step": progress.step,
        "loss": agreement.loss,
        "loss_hex": agreement.loss.hex(),
        "lr": lr,
        "grad_norm": grad_norm,
        "sample_offset": progress.samples,
        "sample_digest": agreement.digest,
        "rng_digest": agreement.rng_digest,
        "tokens": agreement.tokens,
        "world_size": world_size,
        "generation": generation,
        "segment": segment,
        "step_time_s": step_time_s,
        # Parts of the step's time; of rank 0, as all in this line.
        "data_wait_s": data_wait_s,
        "between_s": between_s,
        "time": time.time(),
        "monotonic": time.monotonic(),
        "save_waits": agreement.save_waits,
    }
