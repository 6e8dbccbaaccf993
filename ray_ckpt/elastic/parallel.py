"""Spreading a model over workers whose shares of the batch differ.

The global batch has V micro-batches, and W workers share them, also when W does not divide V. DDP and FSDP2
average gradients over ranks; a micro-batch's mean loss is therefore scaled by ``W/V``, and the average is the mean
over the global batch.

DDP reduces with the last micro-batch of each rank only. FSDP2 communicates in every pass, so all ranks must make
equally many: the shorter ones repeat their last micro-batch with scale 0 (they would wait anyway).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ray_ckpt.elastic.exact import ExactReplicas, ExactShards, deterministic_kernels

Parallel = Literal["ddp", "fsdp"]


class Reducer(Protocol):
    """Turns the passes of all ranks into the gradients of one step.

    Attributes:
        exponent: scale of the fixed-point sums in exact mode, 0 otherwise; part of the training state.
    """

    exponent: int

    @property
    def scale(self) -> float:
        """Factor of each micro-batch's mean loss before ``backward()``."""
        ...

    def one_pass(self, last: bool) -> AbstractContextManager[None]:
        """Context of one forward and backward pass; ``last`` is the rank's last of the step."""
        ...

    def finish(self) -> bool:
        """Ends the passes of a step; False when they must all be made again."""
        ...

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales the gradients down to a global norm; returns the norm before."""
        ...


class Averages:
    """The sums of DDP and FSDP2 themselves: fast, and dependent on the world size in the last bits.

    Args:
        model: wrapped by DDP or sharded by FSDP2.
        addends: V, micro-batches of a global batch.
    """

    def __init__(self, model: torch.nn.Module, addends: int) -> None:
        self._model, self._addends = model, addends
        self.exponent = 0

    @property
    def scale(self) -> float:
        return dist.get_world_size() / self._addends

    @contextmanager
    def one_pass(self, last: bool) -> Iterator[None]:
        if isinstance(self._model, DistributedDataParallel) and not last:
            with self._model.no_sync():
                yield
            return
        if isinstance(self._model, FSDPModule):
            # Unreduced gradients are whole and stay on the rank until the last pass.
            self._model.set_requires_gradient_sync(last)
        yield

    def finish(self) -> bool:
        return True

    def clip_grad_norm(self, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def spread(
    model: torch.nn.Module,
    example: torch.Tensor,
    *,
    parallel: Parallel,
    exact: bool,
    device: torch.device,
    addends: int,
) -> tuple[torch.nn.Module, Reducer]:
    """Spreads a model over all ranks.

    Args:
        model: with the same initial weights on every rank. Its blocks, if it has ``model.layers``, become FSDP
            units.
        example: one input of the model, for a rehearsal of DDP.
        parallel: "ddp" for whole copies, "fsdp" for shards.
        exact: whether gradients are summed so that the world size does not matter.
        device: of this rank.
        addends: V, micro-batches of a global batch.

    Returns:
        The model to train, on ``device``, and what reduces its gradients.
    """
    model = model.to(device)
    if exact:
        deterministic_kernels()
    if parallel == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in getattr(model, "layers", []):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, ExactShards(model, addends) if exact else Averages(model, addends)
    if exact:
        return model, ExactReplicas(model, addends)
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids)
    _rehearse(wrapped, example.to(device))
    return wrapped, Averages(wrapped, addends)


def _rehearse(model: DistributedDataParallel, example: torch.Tensor) -> None:
    """One forward and backward pass without effect.

    DDP lays its buckets out anew after the first backward pass, and where an element sits in a bucket decides
    the order in which three or more ranks are summed. A resumed run would begin with another layout than the
    uninterrupted run has at that step, and differ in the last bit. After a rehearsal both are the same.
    """
    output = model(example)
    (output.float().sum() * 0).backward()
    model.zero_grad(set_to_none=True)


def pads(parallel: Parallel) -> bool:
    """Whether every rank must make equally many passes."""
    return parallel == "fsdp"
