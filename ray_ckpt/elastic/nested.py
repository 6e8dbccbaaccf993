"""Tensors inside of whatever a loader or a model gives: dicts, lists, tuples, and objects made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def to_device(data: Any, device: torch.device) -> Any:
    """The same with its tensors on ``device``; what is no tensor stays.

    A mapping that is no plain dict becomes one, unless it has a method ``to(device)`` of its own.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    return data


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor in there, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_in(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from tensors_in(value)
    elif is_dataclass(data):
        for field in fields(data):
            yield from tensors_in(getattr(data, field.name))
