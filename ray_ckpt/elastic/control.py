"""The one small all-reduce at the end of a step.

Everything that the ranks must agree on rides with the sum that the loss needs anyway: so all ranks leave a
step with the same loss, the same digest of the samples, and the same answer to "do we save now?". No rank
ever decides by its own clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from ray_ckpt.data.feed import MicroBatch

_LIMBS = 4  # a 64-bit digest in 16-bit pieces: their sums over 2^36 ranks are exact in float64
_FIXED = 5
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What one rank brings to the end of a step.

    Attributes:
        loss: this rank's part of the global mean loss.
        tokens: tokens it trained on.
        busy: whether a save is in flight on it.
        wants_save: whether the tracker wants a save here; rank 0 alone says so.
        wants_report: whether a commit waits to be told to Ray Train; rank 0 alone says so.
        digest: sum of its micro-batch digests, modulo 2^64.
    """

    loss: float
    tokens: int
    busy: bool
    wants_save: bool
    wants_report: bool
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What all ranks know after the all-reduce.

    Attributes:
        loss: mean loss of the global batch.
        tokens: tokens of the global batch.
        save: save now; somebody wants it and nobody is busy.
        save_waits: a save is wanted and has to wait for the one in flight.
        report: tell Ray Train of the last commit now.
        digest: digest of the global batch's samples in order, 16 hex digits.
    """

    loss: float
    tokens: int
    save: bool
    save_waits: bool
    report: bool
    digest: str


def agree(vote: Vote, device: torch.device) -> Agreement:
    """All-reduces the ranks' votes over the default process group."""
    limbs = [(vote.digest >> (16 * i)) & 0xFFFF for i in range(_LIMBS)]
    numbers = [
        vote.loss,
        float(vote.tokens),
        float(vote.busy),
        float(vote.wants_save),
        float(vote.wants_report),
        *map(float, limbs),
    ]
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    loss, tokens, busy, save, report, *sums = tensor.tolist()
    assert len(numbers) == _FIXED + _LIMBS
    digest = sum(int(limb) << (16 * i) for i, limb in enumerate(sums)) & _MASK
    return Agreement(
        loss=loss,
        tokens=int(tokens),
        save=save > 0 and busy == 0,
        save_waits=save > 0 and busy > 0,
        report=report > 0,
        digest=f"{digest:016x}",
    )


def digest_samples(micro_batches: Iterable[MicroBatch]) -> int:
    """Digest of sample ids that the ranks can add up.

    Each micro-batch is hashed together with its place in the global batch and the order of its samples; the
    sum modulo 2^64 over all micro-batches is the digest of the global batch, whoever held which of them.
    """
    total = 0
    for micro in micro_batches:
        head = int(micro.index).to_bytes(8, "little")
        rows = np.ascontiguousarray(micro.rows, dtype="<i8").tobytes()
        total += xxhash.xxh3_64(head + rows).intdigest()
    return total & _MASK
