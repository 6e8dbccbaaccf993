"""Exact mode: the same gradient bits for every number of workers, from 1 to the number of micro-batches.

Three things make a training step depend on the world size: the order of samples (solved by the global order), the
random numbers (derived from seed, step and micro-batch in this mode), and the sum of gradients. Here the gradient
of each micro-batch goes into a 64-bit fixed-point accumulator under a scale that all ranks share (see
:mod:`ray_ckpt.elastic.fixed`), so the sum is the same for any grouping of micro-batches.

The scale comes from the largest gradient of the step before, which is the same for every world size, because a
maximum does not care about order. When the present step does not fit, all ranks learn it from one maximum
all-reduce, and make the step's passes again with a scale that fits. The first step of a run is always made twice.

- :class:`ExactReplicas`: whole copies (DDP). One maximum and one integer all-reduce per step: 8 bytes an element
  where float32 takes 4.
- :class:`ExactShards`: FSDP2. Each pass reduce-scatters integers through FSDP2's own hooks; the accumulator is as
  large as the shard, 8 bytes an element.

Gradients that are not finite make every gradient of the step NaN, on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ray_ckpt.elastic import fixed

# Too fine for any gradient: the first step of a run finds its scale by being made twice.
FIRST_EXPONENT = 200


def deterministic_kernels() -> None:
    """Asks torch for kernels that give the same bits each time; one that cannot raises an error."""
    torch.use_deterministic_algorithms(True)
    # It would also fill all fresh memory, which costs time and shows nothing here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


class _Exact:
    """What both kinds share: the scale, the maximum, the decision to repeat, clipping.

    Args:
        model: its parameters.
        addends: V, micro-batches of a global batch.
        group: of all ranks, that sums and maxima go over; None for the default one.
    """

    def __init__(
        self, model: torch.nn.Module, addends: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self.addends, self._group = model, addends, group
        self.exponent = FIRST_EXPONENT
        self._largest: torch.Tensor | None = None
        self._step_largest = 0.0

    @property
    def scale(self) -> float:
        """Factor of each micro-batch's mean loss: their sum is the global mean, for any world size."""
        return 1.0 / self.addends

    def _see(self, tensors: list[torch.Tensor]) -> None:
        largest = fixed.largest_magnitude(tensors)
        seen = self._largest
        self._largest = largest if seen is None else torch.maximum(seen, largest.to(seen.device))

    def _agree(self) -> float:
        """Greatest magnitude of the step, over all ranks and micro-batches."""
        device = next(self.model.parameters()).device
        largest = torch.zeros(1, device=device)
        if self._largest is not None:
            largest[0] = self._largest
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        self._largest = None
        return float(largest)

    def finish(self) -> bool:
        """Ends the passes of a step; False when they must all be made again, with another scale."""
        largest = self._agree()
        self._step_largest = largest
        if not math.isfinite(largest):
            self._spoil()
            return True
        if not fixed.fits(largest, self.exponent, self.addends):
            self._forget()
            self.exponent = fixed.exponent_for(largest, self.addends)
            return False
        self._deliver()
        if largest > 0.0:
            self.exponent = fixed.exponent_for(largest, self.addends)
        return True

    def _spoil(self) -> None:
        self._forget()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, math.nan)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales all gradients down to a global norm; the norm is the same bits for every world size.

        Returns:
            The norm before clipping.
        """
        grads = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        bound = self._step_largest * self.addends
        if not math.isfinite(bound):
            return math.nan
        _, power = math.frexp(bound or 1.0)
        exponent = fixed.NORM_BITS - power
        words = torch.zeros(2, dtype=torch.int64, device=next(self.model.parameters()).device)
        for grad in grads:
            words += fixed.square_sum_words(grad, exponent)
        if self._sharded():
            dist.all_reduce(words, group=self._group)
        norm = math.sqrt(fixed.square_sum_value(words, exponent))
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            for grad in grads:
                grad.mul_(factor)
        return norm

    def _sharded(self) -> bool:
        return False

    def _forget(self) -> None:
        raise NotImplementedError

    def _deliver(self) -> None:
        raise NotImplementedError


class ExactReplicas(_Exact):
    """Whole copies of the model; gradients are taken from a plain module, and summed here."""

    def __init__(
        self, model: torch.nn.Module, addends: int, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, addends, group)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in self._parameters]
        device = self._parameters[0].device
        self._sum = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._parts = list(self._sum.split(sizes))

    @contextmanager
    def one_pass(self, last: bool) -> Iterator[None]:
        """Context of a forward and backward pass; takes the gradients away at its end."""
        yield
        found = [
            (p, s) for p, s in zip(self._parameters, self._parts, strict=True) if p.grad is not None
        ]
        self._see([p.grad for p, _ in found if p.grad is not None])
        for parameter, part in found:
            assert parameter.grad is not None
            part += fixed.to_fixed(parameter.grad, self.exponent).view(-1)
            parameter.grad = None

    def _deliver(self) -> None:
        dist.all_reduce(self._sum, group=self._group)
        values = fixed.from_fixed(self._sum, self.exponent)
        for parameter, part in zip(
            self._parameters, values.split([p.numel() for p in self._parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        self._sum.zero_()

    def _forget(self) -> None:
        self._sum.zero_()


class ExactShards(_Exact):
    """FSDP2: integers are reduce-scattered in every pass, and turned into gradients in the last."""

    def __init__(
        self, model: torch.nn.Module, addends: int, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, addends, group)
        self._last = False
        self._units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._sums: list[_ShardSum] = []
        for unit in self._units:
            shard_sum = _ShardSum(self)
            # Its base class has a private home; what counts is the two methods.
            unit.set_custom_reduce_scatter(shard_sum)  # type: ignore[arg-type]
            unit.set_all_reduce_hook(shard_sum.deliver)
            self._sums.append(shard_sum)

    @contextmanager
    def one_pass(self, last: bool) -> Iterator[None]:
        """Context of a forward and backward pass, the same number of them on every rank."""
        self._last = last
        yield

    def _deliver(self) -> None:
        # Each unit's hook has done it, in the last pass.
        self._forget_sums()

    def _forget(self) -> None:
        self._forget_sums()
        for parameter in self.model.parameters():
            parameter.grad = None

    def _forget_sums(self) -> None:
        for shard_sum in self._sums:
            shard_sum.sum = None

    def _sharded(self) -> bool:
        return True


class _ShardSum:
    """Integer sum of one FSDP unit's shard; stands in for FSDP2's reduce-scatter and its hook.

    FSDP2 adds the hook's output to ``param.grad`` in every pass: it is zero in all passes but the last.
    """

    def __init__(self, owner: ExactShards) -> None:
        self._owner = owner
        self._scattered: torch.Tensor | None = None
        self.sum: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatters the gradients of one pass as integers; FSDP2 calls it with more than one rank."""
        self._owner._see([input_tensor])
        whole = fixed.to_fixed(input_tensor, self._owner.exponent)
        self._scattered = torch.empty(output_tensor.shape, dtype=torch.int64, device=whole.device)
        dist.reduce_scatter_tensor(self._scattered, whole, group=group)

    def deliver(self, output: torch.Tensor) -> None:
        """Adds this pass to the sum; puts the gradient into ``output`` in the last pass, zeros before."""
        part, self._scattered = self._scattered, None
        if part is None:  # one rank: FSDP2 copies instead of communicating
            self._owner._see([output])
            part = fixed.to_fixed(output, self._owner.exponent)
        self.sum = part if self.sum is None else self.sum + part
        if self._owner._last:
            output.copy_(fixed.from_fixed(self.sum, self._owner.exponent))
        else:
            output.zero_()


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
