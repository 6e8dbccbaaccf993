"""Fault-tolerant, elastic PyTorch training on Ray.

The public API, in the order of its use; names are loaded when first used, so that the command line does not wait for
torch and Ray:

- ``Config``: every option of a run; a frozen dataclass, to be subclassed for options of your own.
- ``resolve(config)``: fills in what depends on the machine. ``run(config, train)``: trains until the last step.
- ``attach(config)``: inside the training function, gives its ``Session``: ``spread``, ``validate_with``, ``restore``,
  ``batches``, ``clip_grad_norm``, ``step_end``, ``close``, ``progress``.
- ``TrainState``: model, optimizer and whatever else a resume goes on from.
- ``load_weights(model, path)``: weights of safetensors, by name.
- ``GlobalOrderSampler``: what a loader of your own is given to follow.
- ``Checkpoints``: saves, verifies and restores in a folder, without any of the rest.

Usable alone as well: ``ray_ckpt.policy`` (the interval, from numbers), ``ray_ckpt.data`` (the order of samples, for any
loader), ``ray_ckpt.elastic.exact`` with ``ray_ckpt.elastic.passes`` (sums of gradients that do not depend on the number
of workers), ``ray_ckpt.prove.prove`` and ``ray_ckpt.drill.drill``. README.md shows each. All other names may change.

Errors that are raised on purpose are in ``ray_ckpt.errors``; wrong use of a session is a ``RuntimeError``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_ckpt.checkpoints import Checkpoints
    from ray_ckpt.config import Config
    from ray_ckpt.data.sampler import GlobalOrderSampler
    from ray_ckpt.joining import attach
    from ray_ckpt.session import Session
    from ray_ckpt.state.train_state import TrainState
    from ray_ckpt.state.weights import load_weights
    from ray_ckpt.trainer import resolve, run

__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": "checkpoints",
    "Config": "config",
    "GlobalOrderSampler": "data.sampler",
    "Session": "session",
    "TrainState": "state.train_state",
    "attach": "joining",
    "load_weights": "state.weights",
    "resolve": "trainer",
    "run": "trainer",
}

__all__ = [
    "Checkpoints",
    "Config",
    "GlobalOrderSampler",
    "Session",
    "TrainState",
    "attach",
    "load_weights",
    "resolve",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ray_ckpt.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ray_ckpt' has no attribute {name!r}")
