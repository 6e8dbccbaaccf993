"""Spreading a model over workers whose shares of the batch differ.

The global batch has V micro-batches, and W workers share them, also when W does not divide V. Both wrappers
average gradients over ranks; a micro-batch's loss is therefore scaled by ``W/V`` (``MicroStep.scale``), and the
average is the mean over the global batch.

DDP reduces with the last micro-batch of each rank only. FSDP2 communicates in every pass, so all ranks must
make equally many: the shorter ones repeat their last micro-batch with scale 0 (they would wait anyway).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


def spread(
    model: torch.nn.Module,
    parallel: Literal["ddp", "fsdp"],
    device: torch.device,
    example: torch.Tensor,
) -> torch.nn.Module:
    """Wraps a model, the same on every rank, for training on all of them.

    Args:
        model: with its initial weights. Its blocks, if it has ``model.layers``, become FSDP units.
        parallel: "ddp" for whole copies, "fsdp" for shards.
        device: of this rank.
        example: one input of the model, for a rehearsal of DDP.

    Returns:
        The wrapped model, on ``device``.
    """
    model = model.to(device)
    if parallel == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in getattr(model, "layers", []):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids)
    _rehearse(wrapped, example.to(device))
    return wrapped


def _rehearse(model: DistributedDataParallel, example: torch.Tensor) -> None:
    """One forward and backward pass without effect.

    DDP lays its buckets out anew after the first backward pass, and where an element sits in a bucket decides
    the order in which three or more ranks are summed. A resumed run would begin with another layout than the
    uninterrupted run has at that step, and differ in the last bit. After a rehearsal both are the same.
    """
    output = model(example)
    (output.float().sum() * 0).backward()
    model.zero_grad(set_to_none=True)


@contextmanager
def accumulate(model: torch.nn.Module, last: bool) -> Iterator[None]:
    """Context of one forward and backward pass; gradients are reduced in the ``last`` of a step."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        # Unreduced gradients are whole and stay on the rank until the last pass.
        model.set_requires_gradient_sync(last)
    yield


def pads(model_parallel: str) -> bool:
    """Whether every rank must make equally many passes."""
    return model_parallel == "fsdp"


def full_tensor(value: Any) -> torch.Tensor:
    """A tensor that is the same on every rank, from a plain or a distributed one (a collective)."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value
