"""State of one or several optimizers, by names of parameters.

``torch.distributed.checkpoint.state_dict`` is not used: it makes lazily made state by a step with zero gradients,
which a fresh run then has taken (AdamW corrects its bias for one step too many, momentum with dampening starts from
a zero buffer, the user's step hooks run), it invents state for parameters without a gradient so far and for plain
SGD (pytorch#192225), and it loses the settings of groups without parameters (pytorch#143828).

What is saved is what the optimizer has, no more; what is restored is what was saved::

    state.<parameter>.<key>     tensors; numbers are in the document
    groups.<i>.<key>            settings that are tensors; the others, and the parameters' names, are in the document
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Adam, AdamW, Optimizer

from ray_ckpt.errors import StateError
from ray_ckpt.state.codec import Tensors, pack, tensor_paths, unpack
from ray_ckpt.state.fit import Allowed, Difference
from ray_ckpt.state.parts import Entry, ModulePart, empty_as_saved, finder

# Their first step makes zeros and nothing else, so that making them earlier changes nothing.
_EAGER = (Adam, AdamW)
# Put into groups by schedulers: whether there is one is the business of their item.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})


class OptimizerPart:
    """State of the optimizers of a model.

    Args:
        model: whose parameters they have.
        optimizers: one or several; no parameter is in two of them.

    Raises:
        StateError: an optimizer has a parameter that is not the model's, or is in another optimizer too.
    """

    def __init__(self, model: ModulePart, optimizers: tuple[Optimizer, ...]) -> None:
        self._model, self.optimizers = model, optimizers
        seen: set[str] = set()
        for optimizer in optimizers:
            own = set(self._names(optimizer))
            if own & seen:
                raise StateError(
                    f"optimizer.state.{min(own & seen)}: two optimizers have this parameter. Give each parameter to "
                    "one optimizer."
                )
            seen |= own

    def make_early(self) -> None:
        """Makes the state that Adam and AdamW would make in their first step.

        So the buffers for staging are made before the first step too, and the first save costs what the tenth
        costs. Other optimizers make theirs in the first step, as ever.
        """
        for optimizer in self.optimizers:
            if type(optimizer) not in _EAGER:
                continue
            without = [p for p in _parameters(optimizer) if p.requires_grad and p.grad is None]
            try:
                for parameter in without:
                    parameter.grad = parameter.detach()  # takes no memory: only its presence counts
                for group in optimizer.param_groups:
                    optimizer._init_group(group, [], [], [], [], [], [])  # type: ignore[attr-defined]
            finally:
                for parameter in without:
                    parameter.grad = None

    def pack(self) -> tuple[Any, Tensors]:
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        extra: list[dict[str, Any]] = []
        for optimizer in self.optimizers:
            names, saved = self._names(optimizer), optimizer.state_dict()
            by_index = saved["state"]
            state |= {name: by_index[i] for i, name in enumerate(names) if by_index.get(i)}
            for group in saved["param_groups"]:
                settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                groups.append({**settings, "params": [names[i] for i in group["params"]]})
            extra.append({k: v for k, v in saved.items() if k not in ("state", "param_groups")})
        return pack({"state": state, "groups": groups, "extra": extra}, "optimizer")

    def targets(self, document: Any, saved: Mapping[str, Entry], device: torch.device) -> Tensors:
        """Tensors sharded as the parameters are; the existing ones, where they fit.

        State of parameters that are not here is left out.
        """
        found: Tensors = {}
        for optimizer in self.optimizers:
            names = self._names(optimizer)
            for name, parameter in zip(names, _parameters(optimizer), strict=True):
                prefix = f"state.{name}"
                present = optimizer.state.get(parameter, {})
                for path, kind in tensor_paths(document["state"].get(name), prefix):
                    entry, old = saved.get(path), present.get(path[len(prefix) + 1 :])
                    if (
                        entry is not None
                        and isinstance(old, torch.Tensor)
                        and Entry.of(old) == entry
                    ):
                        found[path] = old
                    else:
                        found[path] = _empty(parameter, entry, kind, device)
        for part in ("groups", "extra"):
            for path, kind in tensor_paths(document[part], part):
                found[path] = empty_as_saved(saved.get(path), kind, device)
        return found

    def load(self, document: Any, tensors: Tensors) -> None:
        """Puts a state back. Parameters without saved state have none, as before their first step."""
        names = [self._names(optimizer) for optimizer in self.optimizers]
        ours = {name for each in names for name in each}
        known = {name: each for name, each in document["state"].items() if name in ours}
        saved = unpack({**document, "state": known}, finder(tensors, "optimizer"))
        groups, extra = iter(saved["groups"]), iter(saved["extra"])
        for optimizer, own in zip(self.optimizers, names, strict=True):
            state = {i: saved["state"][name] for i, name in enumerate(own) if name in known}
            param_groups = [
                {**group, **next(groups), "params": group["params"]}
                for group in optimizer.state_dict()["param_groups"]
            ]
            optimizer.load_state_dict({**next(extra), "state": state, "param_groups": param_groups})
            if type(optimizer).load_state_dict is Optimizer.load_state_dict:
                _undo_casts(optimizer, state)

    def compare(self, document: Any, difference: Difference) -> None:
        """Notes groups, their parameters and their settings that only one side has.

        A parameter of the model that may start fresh may do so here as well.
        """
        here: set[str] = set()
        there = {f"optimizer.groups.{i}" for i in range(len(document["groups"]))}
        number = 0
        for optimizer in self.optimizers:
            names = iter(self._names(optimizer))
            for group in optimizer.param_groups:
                prefix, number = f"optimizer.groups.{number}", number + 1
                ours = {next(names) for _ in group["params"]}
                here.add(prefix)
                if prefix not in there:
                    continue
                saved = document["groups"][number - 1]
                theirs = set(saved["params"])
                settings = {key for key in group if key in optimizer.defaults}
                strange = set(saved) - set(group) - _OF_SCHEDULERS
                here |= _below(prefix, settings, ours - _may_differ(ours - theirs, difference))
                there |= _below(prefix, settings & set(saved), strange)
                there |= _below(prefix, theirs - _may_differ(theirs - ours, difference))
        difference.compare("tensors and settings", here, there)

    def strangers(self, document: Any) -> set[str]:
        """Saved tensors of parameters that are not here; :meth:`compare` says it of the parameters."""
        ours = {name for optimizer in self.optimizers for name in self._names(optimizer)}
        return {
            path
            for name, each in document["state"].items()
            if name not in ours
            for path, _ in tensor_paths(each, f"state.{name}")
        }

    def _names(self, optimizer: Optimizer) -> list[str]:
        known = self._model.parameter_names()
        parameters = list(_parameters(optimizer))
        for parameter in parameters:
            if parameter not in known:
                raise StateError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that the model does not have. "
                    "Make the optimizer of the parameters of the model that spread() returned, and after it."
                )
        return [known[parameter] for parameter in parameters]


def fits(optimizer: OptimizerPart, document: Any, allowed: Allowed) -> bool:
    """Whether a saved state fits without the optimizer's own allowance to start fresh as a whole."""
    rest = Difference(Allowed(tuple(name for name in allowed.names if name != "optimizer")))
    optimizer.compare(document, rest)
    return not rest.found


def _parameters(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _may_differ(names: set[str], difference: Difference) -> set[str]:
    return {name for name in names if f"model.{name}" in difference.allowed}


def _below(prefix: str, *names: set[str]) -> set[str]:
    return {f"{prefix}.{name}" for each in names for name in each}


def _empty(
    parameter: torch.Tensor, entry: Entry | None, kind: str, device: torch.device
) -> torch.Tensor:
    if entry is None or not entry.shape:
        return empty_as_saved(entry, kind, device)
    if entry.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
    whole = empty_as_saved(entry, kind, device)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole


def _undo_casts(optimizer: Optimizer, state: Mapping[int, Any]) -> None:
    """torch casts loaded state to the parameter's type: float32 state of a bfloat16 parameter would lose bits."""
    for i, parameter in enumerate(_parameters(optimizer)):
        if i in state:
            optimizer.state[parameter] = _as_saved(state[i], optimizer.state[parameter])


def _as_saved(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _as_saved(value, loaded[key]) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_as_saved(a, b) for a, b in zip(saved, loaded, strict=True))
    return saved
