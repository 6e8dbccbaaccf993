"""Nested state without pickle: tensors under dotted paths, everything else as one JSON document.

The document says by itself what it was made of (tuples, integer keys, where a tensor sat), so that reading it
needs no object to compare with: state that an object makes lazily comes back too. Whatever JSON and tensors
cannot hold is refused with its path, before anything is written.

Plain JSON stands for itself. An object with the key ``~`` is one of ours::

    {"~": "tensor"}                          the tensor of this path; "device" when it was not on the CPU
    {"~": "tuple", "of": [...]}
    {"~": "dict", "of": [[key, value], ...]} a dict with integer keys; OrderedDict and Counter likewise

Numbers of NumPy come back as numbers of Python.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate

from ray_ckpt.errors import RestoreError, StateError

Tensors = dict[str, torch.Tensor]

_TAG = "~"
_PLAIN = (int, float, str, bool, type(None))
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}


def pack(value: Mapping[str, Any], item: str) -> tuple[Any, Tensors]:
    """Separates a state into a JSON document and tensors.

    Args:
        value: tensors, numbers, strings, booleans, None, and lists, tuples and dicts of them. Dict keys are
            strings or integers.
        item: whose state it is, for messages.

    Returns:
        The document, and the tensors by dotted path. Tensors are references, not copies.

    Raises:
        StateError: a value that cannot be saved, with its path.
    """
    if not isinstance(value, Mapping):
        raise StateError(
            f"{item}: state_dict() gave a {type(value).__name__}; let it return a dict"
        )
    tensors: Tensors = {}
    return _pack(value, "", item, tensors), tensors


def unpack(document: Any, find: Callable[[str], Any], path: str = "") -> Any:
    """The state that :func:`pack` took apart.

    Args:
        document: as :func:`pack` made it.
        find: gives the tensor of a path.
        path: of the document, when it is a part of one.

    Raises:
        RestoreError: not a document of :func:`pack`.
    """
    if isinstance(document, list):
        return [unpack(each, find, _join(path, i)) for i, each in enumerate(document)]
    if not isinstance(document, dict):
        return document
    tag = document.get(_TAG)
    if tag is None:
        return {key: unpack(each, find, _join(path, key)) for key, each in document.items()}
    if tag == "tensor":
        return find(path)
    if tag == "tuple":
        return tuple(unpack(each, find, _join(path, i)) for i, each in enumerate(document["of"]))
    if tag in _DICTS:
        pairs = [(key, unpack(each, find, _join(path, key))) for key, each in document["of"]]
        return _DICTS[tag](dict(pairs) if tag == "Counter" else pairs)
    raise RestoreError(
        f"the checkpoint holds a value of kind {tag!r} at {path}, which this version does not know. Use the "
        "version that saved it."
    )


def tensor_paths(document: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and kind of device ("cpu", "cuda") of each tensor of a document."""
    if isinstance(document, list):
        for i, each in enumerate(document):
            yield from tensor_paths(each, _join(path, i))
    elif isinstance(document, dict):
        tag = document.get(_TAG)
        if tag == "tensor":
            yield path, document.get("device", "cpu")
        elif tag == "tuple":
            yield from tensor_paths(document["of"], path)
        else:
            for key, each in document["of"] if tag else document.items():
                yield from tensor_paths(each, _join(path, key))


def encode(document: Any) -> torch.Tensor:
    """JSON as uint8 [n]. Floats keep all their bits, dicts their order."""
    text = json.dumps(document, separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(tensor: torch.Tensor) -> dict[str, Any]:
    """Reads what :func:`encode` made.

    Raises:
        RestoreError: not a JSON object.
    """
    try:
        document = json.loads(tensor.numpy().tobytes())
    except ValueError as error:
        raise RestoreError(f"the checkpoint's scalars are not JSON ({error})") from error
    if not isinstance(document, dict):
        raise RestoreError("the checkpoint's scalars are not a JSON object")
    return document


def _pack(value: Any, path: str, item: str, tensors: Tensors) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, path, item, tensors)
    if isinstance(value, dict) and kind in _DICTS.values():
        return _pack_dict(value, path, item, tensors)
    if kind is list:
        return [_pack(each, _join(path, i), item, tensors) for i, each in enumerate(value)]
    if kind is tuple or kind is torch.Size:
        of = [_pack(each, _join(path, i), item, tensors) for i, each in enumerate(value)]
        return {_TAG: "tuple", "of": of}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    raise _refusal(value, path, item)


def _pack_tensor(tensor: torch.Tensor, path: str, item: str, tensors: Tensors) -> dict[str, str]:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise StateError(
            f"{item}.{path}: a tensor of layout {tensor.layout} cannot be saved. Return a dense one."
        )
    if path in tensors:
        raise StateError(
            f"{item}.{path}: two tensors have this name (a key with a dot, or the keys 1 and '1'). Rename one."
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        # Its local parts are addends, which DCP would write as if each were the whole.
        tensor = tensor.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
        )
    tensors[path] = tensor
    device = tensor.device.type
    return {_TAG: "tensor"} if device == "cpu" else {_TAG: "tensor", "device": device}


def _pack_dict(value: dict[Any, Any], path: str, item: str, tensors: Tensors) -> Any:
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise StateError(
                f"{item}.{_join(path, key)}: a key of type {type(key).__name__} cannot be saved. Use strings or "
                "integers as keys."
            )
    packed = {key: _pack(each, _join(path, key), item, tensors) for key, each in value.items()}
    if type(value) is dict and _TAG not in value and all(type(key) is str for key in value):
        return packed
    return {_TAG: type(value).__name__, "of": [[key, each] for key, each in packed.items()]}


def _refusal(value: Any, path: str, item: str) -> StateError:
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        advice = "Return torch.from_numpy(array) from state_dict()."
    elif isinstance(value, bytes | bytearray):
        advice = "Return torch.frombuffer(bytearray(value), dtype=torch.uint8) from state_dict()."
    elif isinstance(value, set | frozenset):
        advice = "Return sorted(value) from state_dict()."
    elif callable(value):
        advice = "Leave functions out of state_dict(), and make them anew when the object is built."
    else:
        advice = (
            "Return tensors, numbers, strings, booleans, None, lists, tuples and dicts from state_dict(), "
            "and rebuild the object in load_state_dict()."
        )
    return StateError(f"{item}.{path}: a {kind} cannot be saved without pickle. {advice}")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
