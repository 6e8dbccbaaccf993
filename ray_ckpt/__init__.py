"""Fault-tolerant, elastic PyTorch training on Ray.

The names below are the public API; they are loaded when first used, so that the command line does not wait for
torch and Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_ckpt.config import Config
    from ray_ckpt.joining import attach
    from ray_ckpt.session import Session
    from ray_ckpt.state.train_state import TrainState
    from ray_ckpt.state.weights import load_weights
    from ray_ckpt.trainer import resolve, run

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "Session": "session",
    "TrainState": "state.train_state",
    "attach": "joining",
    "load_weights": "state.weights",
    "resolve": "trainer",
    "run": "trainer",
}

__all__ = ["Config", "Session", "TrainState", "attach", "load_weights", "resolve", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ray_ckpt.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ray_ckpt' has no attribute {name!r}")
