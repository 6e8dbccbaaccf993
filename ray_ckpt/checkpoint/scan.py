"""Looks at every value of a staged state: the edge of the guard that touches tensors.

It runs in the background thread of a save, on the copy that is being written, while it is being written: neither
training nor the upload waits for it. A tensor is looked at in chunks of :data:`CHUNK` values, so that it needs a
MiB or so whatever the size of the state.

Every rank looks at all that it holds, also at values that others hold too: which of the copies is written is up to
DCP. For the norm each value counts once: of sharded tensors every rank counts its shard, of whole ones rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ray_ckpt.checkpoint.guard import BadTensor, Scan

CHUNK = 1 << 16  # values: 512 KiB in float64, which stays in a cache of the processor
PARTS = (
    "model",
    "optimizer",
    "ema",
)  # what an item of the user's own may hold is not ours to judge
_WEIGHTS = "model."


@torch.no_grad()
def scan_state(state: Mapping[str, Any], *, rank: int, ignore: Sequence[str] = ()) -> Scan:
    """Looks at the floating tensors of model, optimizer and averaged weights.

    Args:
        state: a state dict that nobody changes meanwhile.
        rank: of this process.
        ignore: tensors that may hold anything, by the first parts of their names.
    """
    started = time.monotonic()
    bad: list[BadTensor] = []
    names: set[str] = set()
    square_sum = 0.0
    for name, tensor in _tensors({part: state[part] for part in PARTS if part in state}):
        if not (tensor.is_floating_point() or tensor.is_complex()) or _is_below(name, ignore):
            continue
        names.add(name)
        values, counts = _own(tensor, rank)
        num_bad, squares = look(values, squares=name.startswith(_WEIGHTS) and counts)
        if num_bad:
            bad.append(BadTensor(name=name, bad=num_bad, values=values.numel()))
        square_sum += squares
    return Scan(
        rank=rank,
        bad=tuple(bad),
        square_sum=square_sum,
        names=frozenset(names),
        seconds=time.monotonic() - started,
    )


def look(tensor: torch.Tensor, *, squares: bool) -> tuple[int, float]:
    """How many values are not finite, and the sum of the squares in float64 (0 when it is not asked for)."""
    num_bad, total = 0, 0.0
    size = min(CHUNK, tensor.numel() * 2)  # of a complex number two
    buffer = torch.empty(size, dtype=torch.float64, device=tensor.device)
    for chunk in _chunks(torch.view_as_real(tensor) if tensor.is_complex() else tensor):
        if squares:
            wide = buffer[: chunk.numel()].copy_(chunk)
            signal = float(torch.dot(wide, wide))
            total += signal
        else:
            # A sum over a NaN or an infinity is not finite; one that overflows is looked at again.
            signal = float((chunk if chunk.itemsize > 1 else chunk.float()).sum(dtype=_wide(chunk)))
        if not math.isfinite(signal):
            num_bad += int((~torch.isfinite(chunk.double())).sum())
    return num_bad, total


def _wide(chunk: torch.Tensor) -> torch.dtype:
    return torch.float64 if chunk.dtype == torch.float64 else torch.float32


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All values in flat pieces, in any order, without a copy of the whole."""
    if not tensor.is_contiguous():
        # Transposed weights are dense in another order of their dimensions.
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    if not tensor.is_contiguous():
        for part in tensor.unbind(0):
            yield from _chunks(part)
        return
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK]


def _own(tensor: torch.Tensor, rank: int) -> tuple[torch.Tensor, bool]:
    """What this rank holds of a tensor, and whether it is the one to count it."""
    if not isinstance(tensor, DTensor):
        return tensor, rank == 0
    place: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    # Over a dimension of the mesh that holds copies, the first of them counts.
    copies = [
        index for index, each in zip(place, tensor.placements, strict=False) if not each.is_shard()
    ]
    return tensor.to_local(), not any(copies)


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


def _is_below(name: str, tops: Sequence[str]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)
