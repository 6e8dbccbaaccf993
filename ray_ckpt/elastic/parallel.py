"""Spreading a model over workers whose shares of the batch differ.

The global batch has V micro-batches, and W workers share them, also when W does not divide V. DDP and FSDP2
average gradients over ranks; a micro-batch's mean loss is therefore scaled by ``W/V``, and the average is the mean
over the global batch.

DDP reduces with the last micro-batch of each rank only. FSDP2 communicates in every pass, so all ranks must make
equally many: the shorter ones repeat their last micro-batch with scale 0 (they would wait anyway).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ray_ckpt.elastic.exact import ExactReplicas, ExactShards, deterministic_kernels
from ray_ckpt.elastic.nested import tensors_in, to_device
from ray_ckpt.errors import StateError

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
        self._model = model
        # Once, and not in each pass: what kind of model it is.
        self._whole = model if isinstance(model, DistributedDataParallel) else None
        self._shards = model if isinstance(model, FSDPModule) else None
        self.scale = dist.get_world_size() / addends
        self.exponent = 0

    def one_pass(self, last: bool) -> AbstractContextManager[None]:
        if self._whole is not None and not last:
            found: AbstractContextManager[None] = self._whole.no_sync()
            return found
        if self._shards is not None:
            # Unreduced gradients are whole and stay on the rank until the last pass.
            self._shards.set_requires_gradient_sync(last)
        return nullcontext()

    def finish(self) -> bool:
        return True

    def clip_grad_norm(self, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def spread(
    model: torch.nn.Module,
    example: Any,
    *,
    parallel: Parallel,
    exact: bool,
    device: torch.device,
    addends: int,
    units: Iterable[torch.nn.Module] | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.nn.Module, Reducer]:
    """Spreads a model over all ranks.

    Args:
        model: the same on every rank. With whole copies all ranks begin with rank 0's weights; sharded, their initial
            weights must be the same.
        example: one input of the model, for a rehearsal of DDP: a tensor, a tuple of arguments or a dict of named ones.
        parallel: "ddp" for whole copies, "fsdp" for shards.
        exact: whether gradients are summed so that the world size does not matter.
        device: of this rank.
        addends: V, micro-batches of a global batch.
        units: modules that become FSDP units; None for those in ``model.layers``, if it has that.
        group: that whole copies are reduced over; None for the default one. Shards stay with the default one.

    Returns:
        The model to train, on ``device``, and what reduces its gradients.

    Raises:
        StateError: the model gives no tensor that depends on its parameters.
    """
    model = model.to(device)
    if exact:
        deterministic_kernels()
    if parallel == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in getattr(model, "layers", []) if units is None else units:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, ExactShards(model, addends, group) if exact else Averages(model, addends)
    if exact:
        _share_weights(model, group)
        return model, ExactReplicas(model, addends, group)
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, process_group=group)
    _rehearse(wrapped, to_device(example, device))
    return wrapped, Averages(wrapped, addends)


def _share_weights(model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Rank 0's weights and buffers for all, as DDP does it: copies that begin apart stay apart, and nobody sees it."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, group=group, group_src=0)


def _rehearse(model: DistributedDataParallel, example: Any) -> None:
    """One forward and backward pass without effect.

    DDP lays its buckets out anew after the first backward pass, and where an element sits in a bucket decides
    the order in which three or more ranks are summed. A resumed run would begin with another layout than the
    uninterrupted run has at that step, and differ in the last bit. After a rehearsal both are the same.
    """
    buffers = [
        (buffer, buffer.clone()) for buffer in model.buffers()
    ]  # BatchNorm counts what it sees
    outputs = [t for t in tensors_in(_call(model, example)) if t.requires_grad]
    if not outputs:
        raise StateError(
            "spread(model, example): the model gave no tensor that depends on its parameters. Give an example like the "
            "inputs of training: a tensor, a tuple of arguments, or a dict of named ones."
        )
    total = sum(
        (output.float().sum() for output in outputs), torch.zeros((), device=outputs[0].device)
    )
    (total * 0).backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _call(model: torch.nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def pads(parallel: Parallel) -> bool:
    """Whether every rank must make equally many passes."""
    return parallel == "fsdp"
