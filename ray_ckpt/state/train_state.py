"""Everything that decides how training goes on, as one DCP ``Stateful`` made of tensors.

Tensors only: DCP pickles whatever is not a tensor, and nothing here is to be unpickled from storage.
What is naturally a number or a word (the optimizer's hyper-parameters, the scheduler, the scaler) goes
into one JSON document, kept as a uint8 tensor under ``scalars``.

Layout of the state dict (DCP joins the names with dots)::

    model.<fqn>                       parameters and persistent buffers
    optimizer.state.<fqn>.exp_avg     optimizer tensors, by parameter name
    progress.step|samples|tokens|...  int64 scalars
    scalars                           uint8 [n], JSON

Keys are names of parameters, never positions, and DCP stores global tensors: a checkpoint of any world
size and of DDP or FSDP2 loads into any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ray_ckpt.errors import RestoreError

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SCALARS = "scalars"


class HasState(Protocol):
    """A scheduler, scaler or the like whose state is numbers, words, lists and dicts."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far the run is. Counts what was trained, never what was fetched.

    Attributes:
        step: finished optimizer steps.
        samples: the sample offset.
        tokens: tokens that gave a loss.
        grad_exponent: scale of the next step's gradient sums in exact mode, 0 otherwise.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    grad_exponent: int = 0


class TrainState:
    """Model, optimizer, scheduler, scaler and progress of a run.

    Args:
        model: plain, wrapped by DDP, or sharded by FSDP2.
        optimizer: its optimizer.
        scheduler: optional; stepped by the training function.
        scaler: optional gradient scaler.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: HasState | None = None,
        scaler: HasState | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.progress = Progress()
        self._parts: dict[str, HasState] = {}
        if scheduler is not None:
            self._parts["scheduler"] = scheduler
        if scaler is not None:
            self._parts["scaler"] = scaler

    def state_dict(self) -> dict[str, Any]:
        """The state as nested dictionaries of tensors; model tensors are references, not copies."""
        tensors, numbers = _split(
            get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        )
        scalars: dict[str, Any] = {"optimizer": numbers}
        scalars |= {name: part.state_dict() for name, part in self._parts.items()}
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": tensors,
            "progress": {k: torch.tensor(v) for k, v in asdict(self.progress).items()},
            SCALARS: encode_scalars(scalars),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts a state back.

        Raises:
            RestoreError: the saved numbers are not those of the parts that are here.
        """
        saved = decode_scalars(state_dict[SCALARS])
        expected, found = {"optimizer", *self._parts}, set(saved)
        if expected != found:
            raise RestoreError(
                f"the checkpoint holds the state of {sorted(found)}, the training function has "
                f"{sorted(expected)}: give TrainState the same parts as the run that saved it."
            )
        set_model_state_dict(self.model, state_dict["model"])
        self._load_optimizer(state_dict["optimizer"], saved["optimizer"])
        for name, part in self._parts.items():
            part.load_state_dict(_like(part.state_dict(), saved[name]))
        self.progress = Progress(**{k: int(v) for k, v in state_dict["progress"].items()})

    def _load_optimizer(self, tensors: dict[str, Any], numbers: dict[str, Any]) -> None:
        _, present = _split(get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT))
        missing, surplus = sorted(set(present) - set(numbers)), sorted(set(numbers) - set(present))
        if missing or surplus:
            raise RestoreError(
                "the optimizer's settings differ from the saved ones: not in the checkpoint "
                f"{missing[:4]}, only in the checkpoint {surplus[:4]}. Use the same optimizer, with "
                "the same parameter groups."
            )
        flat = {**tensors, **{key: _like(present[key], value) for key, value in numbers.items()}}
        set_optimizer_state_dict(self.model, self.optimizer, flat, options=_FLAT)


def _split(flat: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Separates tensors from plain values."""
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {key: value for key, value in flat.items() if key not in tensors}


def _like(template: Any, value: Any) -> Any:
    """Gives a JSON value the types of a template: tuples are tuples again, keys integers."""
    if isinstance(template, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(template, dict) and isinstance(value, dict):
        by_text = {str(key): key for key in template}
        return {
            by_text.get(k, k): _like(template.get(by_text.get(k, k)), v) for k, v in value.items()
        }
    return value


def encode_scalars(values: Mapping[str, Any]) -> torch.Tensor:
    """JSON as uint8 [n]. Floats keep all their bits.

    Raises:
        RestoreError: a value that JSON cannot hold, with its place.
    """
    try:
        text = json.dumps(values, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise RestoreError(
            f"the state of the optimizer, scheduler or scaler holds a value that is not a number, word, "
            f"list or dict ({error}): lambdas and objects cannot be saved without pickle."
        ) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode_scalars(tensor: torch.Tensor) -> dict[str, Any]:
    """Reads what :func:`encode_scalars` made."""
    try:
        values = json.loads(tensor.numpy().tobytes())
    except ValueError as error:
        raise RestoreError(f"the checkpoint's scalars are not JSON ({error})") from error
    if not isinstance(values, dict):
        raise RestoreError("the checkpoint's scalars are not a JSON object")
    return values
