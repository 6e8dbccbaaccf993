"""The kinds of things a training state is made of: modules, and objects with ``state_dict()``.

A part is packed into a JSON document and tensors, says which tensors its saved state is to be loaded into, and takes
it back. Names in a module's state do not know how it is wrapped: DDP, ``torch.compile``, activation checkpointing and
``AveragedModel`` each add to the names, and what one of them saved, another can load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ray_ckpt.errors import RestoreError, StateError
from ray_ckpt.state.codec import Tensors, pack, tensor_paths, unpack

_WRAPPERS = (DistributedDataParallel, DataParallel, AveragedModel)  # keep the inner one as "module"
_MARKS = ("_orig_mod", "_checkpoint_wrapped_module")
TIED = "~tied"  # in the document of a module: its other names of a parameter, and the first one


class HasState(Protocol):
    """An object whose state is tensors, numbers, words, lists, tuples and dicts."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @staticmethod
    def of(tensor: torch.Tensor) -> Entry:
        """What a checkpoint would say of a tensor; of a sharded one, of the whole."""
        return Entry(tuple(tensor.shape), tensor.dtype)


class Part(Protocol):
    """A part of a training state."""

    def pack(self) -> tuple[Any, Tensors]:
        """A JSON document and tensors (references, not copies) by dotted path."""
        ...

    def targets(self, document: Any, saved: Mapping[str, Entry], device: torch.device) -> Tensors:
        """Tensors to load a saved state into, by dotted path.

        Args:
            document: of the saved state.
            saved: its tensors.
            device: of this rank.
        """
        ...

    def load(self, document: Any, tensors: Tensors) -> None:
        """Puts a saved state back."""
        ...


class ObjectPart:
    """An object with ``state_dict()`` and ``load_state_dict()``.

    Args:
        name: for messages.
        item: the object.
    """

    def __init__(self, name: str, item: HasState) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                raise StateError(
                    f"{name}: a {type(item).__name__} has no {method}(). Give it state_dict() and load_state_dict()."
                )
        self._name, self._item = name, item

    def pack(self) -> tuple[Any, Tensors]:
        return pack(self._item.state_dict(), self._name)

    def targets(self, document: Any, saved: Mapping[str, Entry], device: torch.device) -> Tensors:
        fresh = self.pack()[1]
        found: Tensors = {}
        for path, kind in tensor_paths(document):
            entry, present = saved.get(path), fresh.get(path)
            if isinstance(present, DTensor):
                # Sharded as it is here; a shape that differs is found by who compares.
                same = entry is not None and entry.shape == tuple(present.shape)
                found[path] = (
                    torch.empty_like(present, dtype=entry.dtype) if entry and same else present
                )
            else:
                found[path] = empty_as_saved(entry, kind, device)
        return found

    def load(self, document: Any, tensors: Tensors) -> None:
        state = unpack(document, finder(tensors, self._name))
        try:
            self._item.load_state_dict(state)
        except Exception as error:
            raise RestoreError(
                f"{self._name}: load_state_dict() failed on the saved state ({type(error).__name__}: {error}). Use "
                "the object of the run that saved it."
            ) from error


class ModulePart:
    """A module, by clean names; its tensors are loaded in place.

    Args:
        name: for messages.
        module: plain, wrapped by DDP or the like, or sharded by FSDP2.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name, self._module = name, module
        self._clean: dict[str, str] = {}
        self._names: dict[torch.nn.Parameter, str] = {}

    def pack(self) -> tuple[Any, Tensors]:
        tensors: Tensors = {}
        other: dict[str, Any] = {}  # what get_extra_state() gives may be anything
        for name, value in self._state().items():
            (tensors if isinstance(value, torch.Tensor) else other)[name] = value
        document, more = pack(other, self._name) if other else ({}, {})
        if tied := self.tied_names():
            # DCP writes each name in full: without this nobody could tell them from equal tensors.
            document = {**document, TIED: tied}
        return document, {**tensors, **more}

    def targets(self, document: Any, saved: Mapping[str, Entry], device: torch.device) -> Tensors:
        state = {k: v for k, v in self._state().items() if isinstance(v, torch.Tensor)}
        extra = {
            p: empty_as_saved(saved.get(p), kind, device) for p, kind in tensor_paths(document)
        }
        return {**extra, **state}

    def load(self, document: Any, tensors: Tensors) -> None:
        state = self._state()
        document = {key: value for key, value in document.items() if key != TIED}
        saved = {**tensors, **unpack(document, finder(tensors, self._name))}
        state |= {name: value for name, value in saved.items() if name in state}
        self._module.load_state_dict({raw: state[clean] for raw, clean in self._clean.items()})

    def parameter_names(self) -> Mapping[torch.nn.Parameter, str]:
        """Clean name of each parameter; the first one, when it has several."""
        parameters = list(self._module.parameters())
        if len(parameters) != len(self._names) or any(p not in self._names for p in parameters):
            named = dict(self._module.named_parameters())
            clean = _clean_names(self._module, named)
            self._names = {parameter: clean[key] for key, parameter in named.items()}
        return self._names

    def tied_names(self) -> dict[str, str]:
        """Clean names of parameters that have several, each with the first one."""
        first: dict[torch.nn.Parameter, str] = {}
        tied: dict[str, str] = {}
        for raw, parameter in self._module.named_parameters(remove_duplicate=False):
            if parameter in first:
                tied[raw] = first[parameter]
            else:
                first[parameter] = raw
        clean = _clean_names(self._module, {**tied, **dict.fromkeys(tied.values())})
        return {clean[name]: clean[other] for name, other in tied.items()}

    def tensors(self) -> Tensors:
        """Parameters and persistent buffers by clean name: references, to be changed in place."""
        return {
            name: value
            for name, value in self._state().items()
            if isinstance(value, torch.Tensor) and not is_extra(name)
        }

    def _state(self) -> dict[str, Any]:
        raw = self._module.state_dict()
        if raw.keys() != self._clean.keys():
            self._clean = _clean_names(self._module, raw)
        return {self._clean[key]: value for key, value in raw.items()}


def is_extra(name: str) -> bool:
    """Whether a module's name is of what ``get_extra_state()`` gives, or of a tensor in it."""
    return "_extra_state" in name.split(".")


def make_part(name: str, item: torch.nn.Module | HasState) -> Part:
    """The part for an object."""
    return ModulePart(name, item) if isinstance(item, torch.nn.Module) else ObjectPart(name, item)


def finder(tensors: Tensors, name: str) -> Any:
    """Looks tensors up by path; says which one is missing."""

    def find(path: str) -> torch.Tensor:
        if path not in tensors:
            raise RestoreError(
                f"{name}.{path} was not loaded, although the checkpoint speaks of it. Set the checkpoint aside and "
                "start again: an older one will be used."
            )
        return tensors[path]

    return find


def empty_as_saved(entry: Entry | None, kind: str, device: torch.device) -> torch.Tensor:
    """Room for a whole tensor on the kind of device that it was saved from."""
    where = device if kind == device.type else torch.device("cpu")
    if entry is None:  # its name is reported as missing
        return torch.empty(0, device=where)
    return torch.empty(entry.shape, dtype=entry.dtype, device=where)


def _clean_names(module: torch.nn.Module, names: Mapping[str, Any]) -> dict[str, str]:
    wrapped = {
        f"{path}.module" if path else "module"
        for path, inner in module.named_modules()
        if isinstance(inner, _WRAPPERS)
    }
    return {name: _clean(name, wrapped) for name in names}


def _clean(name: str, wrapped: set[str]) -> str:
    parts = name.split(".")
    return ".".join(
        part
        for i, part in enumerate(parts)
        if part not in _MARKS and ".".join(parts[: i + 1]) not in wrapped
    )
