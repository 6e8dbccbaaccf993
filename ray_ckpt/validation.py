"""The loss on a few fixed rows, measured at each save: what a restored model must reproduce.

Checksums say that the bytes are those that were written. They do not say that these were the right bytes, nor that
today's code makes of them the model that was saved. The loss does: it is in the manifest, with a digest of the rows
it was measured on, and a drill (:mod:`ray_ckpt.drill`) measures it again.

Measuring changes nothing: no gradients, evaluation mode, and afterwards each module's mode and the random
generators are what they were. It costs a forward pass over the rows at each save, on every rank: FSDP gathers its
shards together, and under DDP the others would wait for rank 0 in the next step anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ray_ckpt.data.fixed import Tokens, token_digest
from ray_ckpt.state import rng

METRIC = "validation_loss"
"""Name of the loss among a manifest's metrics."""

LossFunction = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""From a model and int64 [rows, seq_len] to the rows' mean loss, a scalar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """A loss, and how it was measured; kept in the manifest as ``validation``.

    Attributes:
        loss: mean over the rows, with 64 bits.
        digest: of the rows' tokens.
        rows: how many.
        rows_per_pass: so many went through the model at a time.
        device: kind of the device.
        seconds: how long it took.
    """

    loss: float
    digest: str
    rows: int
    rows_per_pass: int
    device: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest; the loss a second time with all its bits in sight."""
        return {**asdict(self), "loss_hex": self.loss.hex()}


class Validation:
    """Measures a loss on rows that stay the same.

    Args:
        loss: of a model on some rows.
        tokens: int64 [rows, seq_len].
        rows_per_pass: so many go through the model at a time.
        device: of this rank.
    """

    def __init__(
        self, loss: LossFunction, tokens: Tokens, *, rows_per_pass: int, device: torch.device
    ) -> None:
        self._loss, self._device = loss, device
        self._tokens = torch.from_numpy(tokens)
        self._digest, self._rows_per_pass = token_digest(tokens), rows_per_pass

    def measure(self, model: torch.nn.Module) -> Validated:
        """Measures; every rank calls it, with the model as it is trained.

        Raises:
            ValueError: the function gave something else than one number.
        """
        started = time.monotonic()
        total, rows = 0.0, len(self._tokens)
        with _unchanged(model, self._device):
            for part in self._tokens.split(self._rows_per_pass):
                total += len(part) * self._number(inner(model), part)
        return Validated(
            loss=total / rows,
            digest=self._digest,
            rows=rows,
            rows_per_pass=self._rows_per_pass,
            device=self._device.type,
            seconds=time.monotonic() - started,
        )

    def _number(self, model: torch.nn.Module, tokens: torch.Tensor) -> float:
        loss = self._loss(model, tokens.to(self._device))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"the function of validate_with() gave {shape}, it must give one number: the mean loss of the rows"
            )
        return float(loss.double())


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model without DDP around it, whose forward pass talks to the other ranks; FSDP's must."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def _unchanged(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation without gradients, and without a trace."""
    modes = {module: module.training for module in model.modules()}
    generators = rng.capture(device)
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training  # one by one: a frozen part of a model stays in its own mode
            if isinstance(module, FSDPModule):
                module.reshard()  # the outermost stays whole after a forward pass, for a backward that never comes
        rng.apply(generators, device)
