"""The one small sum over all ranks at the end of a step.

Everything that the ranks must agree on rides with the sum that the loss needs anyway: so all ranks leave a
step with the same loss, the same digest of the samples, and the same answer to "do we save now?". No rank
ever decides by its own clock.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from ray_ckpt.data.feed import MicroBatch

# Losses are summed in units of 2^-32, as integers: the sum is the same for any division over ranks.
LOSS_BITS = 32
# Three 64-bit numbers go as 16-bit pieces: their sums over 2^36 ranks are exact in float64.
_WHOLE, _PIECES = struct.Struct("<3Q"), struct.Struct("<12H")
_SHEET = struct.Struct("22d")
# So many ranks on CPUs send their numbers to each other and add them up themselves. The sum of gloo goes around a ring
# in pieces, 2 (W - 1) hops one after the other, and takes more than twice as long for three numbers as for two.
# On two cores, in ms, this way and with gloo's sum: 0.4 and 0.6 for 2 ranks, 1.7 and 2.7 for 3, 4 and 14 for 8.
PAIRWISE = 32
_ROW = np.dtype("<i8")
_MASK = (1 << 64) - 1


class Vote(NamedTuple):  # of each step: a frozen dataclass takes several times as long to make
    """What one rank brings to the end of a step: the wide numbers first, then the others in the order they are sent.

    Attributes:
        loss: sum of the mean losses of its micro-batches, in units of 2^-32.
        digest: sum of its micro-batches' sample digests, modulo 2^64.
        rng_digest: sum of the digests of its random generator, modulo 2^64.
        bad_losses: how many of them were not finite.
        tokens: tokens it trained on.
        busy: whether a save is in flight on it.
        wants_save: whether the tracker wants a save here; rank 0 alone says so.
        wants_report: whether a commit waits to be told to Ray Train; rank 0 alone says so.
        trouble: whether it knows that the run is no longer finite.
        wants_direct: whether a save goes straight to the durable folder; rank 0 alone says so.
        wants_leave: whether the attempt is to end here: its process got SIGTERM, or on rank 0 the tracker says so.
        unsaved: whether no save is to begin before that; rank 0 alone says so.
        wants_hold: whether the ranks are to stand still after the save; rank 0 alone says so.
    """

    loss: int
    digest: int
    rng_digest: int
    bad_losses: int
    tokens: int
    busy: bool
    wants_save: bool
    wants_report: bool
    trouble: bool = False
    wants_direct: bool = False
    wants_leave: bool = False
    unsaved: bool = False
    wants_hold: bool = False


class Agreement(NamedTuple):
    """What all ranks know when a step ends.

    Attributes:
        loss: mean loss of the global batch; the same bits for any number of workers, given the same losses.
        tokens: tokens of the global batch.
        save: save now; somebody wants it, or wants to leave, and nobody is busy.
        save_waits: a save is wanted and has to wait for the one in flight.
        report: tell Ray Train of the last commit now.
        digest: digest of the global batch's samples in order, 16 hex digits.
        rng_digest: digest of the random generators after each micro-batch, 16 hex digits.
        trouble: some rank knows that the run is no longer finite.
        direct: a save goes straight to the durable folder.
        leave: the attempt ends here, once this step is safe.
        unsaved: it ends without a save.
        hold: all stand still after the save, until the attempt ends or it is clear that it does not.
    """

    loss: float
    tokens: int
    save: bool
    save_waits: bool
    report: bool
    digest: str
    rng_digest: str
    trouble: bool = False
    direct: bool = False
    leave: bool = False
    unsaved: bool = False
    hold: bool = False


def agree(
    vote: Vote,
    device: torch.device,
    num_micro_batches: int,
    group: dist.ProcessGroup | None = None,
) -> Agreement:
    """Adds up the ranks' votes, in one collective.

    Args:
        vote: of this rank.
        device: that the process group reduces on.
        num_micro_batches: V, of the global batch.
        group: to reduce over; None for the default one.
    """
    loss, digest, rng_digest, *small = vote
    whole = _WHOLE.pack(loss & _MASK, digest & _MASK, rng_digest & _MASK)
    sheet = _SHEET.pack(*small, *_PIECES.unpack(whole))
    bad, tokens, busy, save, report, trouble, direct, leave, unsaved, hold, *sums = _summed(
        sheet, device, group
    )
    save = 0 if unsaved else save + leave
    loss, digest, rng_digest = _joined(*sums[:4]), _joined(*sums[4:8]), _joined(*sums[8:])
    signed = loss - (1 << 64) if loss >> 63 else loss
    return Agreement(
        loss=math.nan if bad else signed / (num_micro_batches << LOSS_BITS),
        tokens=int(tokens),
        save=save > 0 and busy == 0,
        save_waits=save > 0 and busy > 0,
        report=report > 0,
        digest=f"{digest:016x}",
        rng_digest=f"{rng_digest:016x}",
        trouble=trouble > 0,
        direct=direct > 0,
        leave=leave > 0,
        unsaved=unsaved > 0,
        hold=hold > 0,
    )


def _summed(sheet: bytes, device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """The sheets of all ranks, added up number by number; they are integers that float64 adds up exactly."""
    world_size = dist.get_world_size(group)
    if device.type == "cpu" and world_size <= PAIRWISE:
        mine = _numbers(sheet * world_size)
        sheets = torch.empty_like(mine)
        dist.all_to_all_single(sheets, mine, group=group)
        return [sum(column) for column in zip(*sheets.view(world_size, -1).tolist(), strict=True)]
    tensor = _numbers(sheet).to(device)
    dist.all_reduce(tensor, group=group)
    found: list[float] = tensor.tolist()
    return found


def _numbers(packed: bytes) -> torch.Tensor:
    """By way of bytes: a tensor of a list takes several times as long."""
    return torch.frombuffer(bytearray(packed), dtype=torch.float64)


def _joined(a: float, b: float, c: float, d: float) -> int:
    """A 64-bit number from the sums of its pieces, the lowest first."""
    return int(a) + (int(b) << 16) + (int(c) << 32) + (int(d) << 48) & _MASK


def agree_to_leave(
    *, wants_leave: bool, unsaved: bool, group: dist.ProcessGroup
) -> tuple[bool, bool]:
    """What all ranks know of a wish to leave, between two steps: ``leave`` and ``unsaved`` of an `Agreement`."""
    tensor = torch.tensor([float(wants_leave), float(unsaved)], dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    leave, unsaved_too = tensor.tolist()
    return leave > 0, unsaved_too > 0


def digest_samples(micro_batches: Iterable[MicroBatch]) -> int:
    """Digest of sample ids that the ranks can add up.

    Each micro-batch is hashed together with its place in the global batch and the order of its samples; the
    sum modulo 2^64 over all micro-batches is the digest of the global batch, whoever held which of them.
    """
    total = 0
    for micro in micro_batches:
        head = int(micro.index).to_bytes(8, "little")
        rows = micro.rows.astype(_ROW, copy=False).tobytes()
        total += xxhash.xxh3_64_intdigest(head + rows)
    return total & _MASK
