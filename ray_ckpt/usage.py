"""Whether a training function uses its session as it is meant: what is wrong is said where it is done, at once.

Mistakes that only this rank can see are found here, by looking at objects that are there anyway; nothing is sent, and
what costs a walk over the model is done at saves alone. Those between ranks are :mod:`ray_ckpt.rollcall`'s and
:mod:`ray_ckpt.alike`'s.
"""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ray_ckpt.errors import StateError
from ray_ckpt.state.parts import Entry
from ray_ckpt.state.train_state import TrainState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Standing:
    """What is to be told when a session goes."""

    steps: int
    step: int = 0
    closed: bool = False


class Usage:
    """Looks after one attempt on one rank, from its restore on.

    Args:
        state: that is trained.
        steps: of the whole run.
    """

    def __init__(self, state: TrainState, steps: int) -> None:
        self._state = state
        self._parameters = dict(state.model.named_parameters())
        self._entries = _entries(state.model)
        self._stepped = state.is_scaled  # a scaler leaves out the steps it likes
        self._hooks = [o.register_step_post_hook(self._note_step) for o in state.optimizers]
        self._standing = _Standing(steps=steps)
        weakref.finalize(self, _tell, self._standing)

    def check_optimizer(self, step: int, *, loss: float, grad_norm: float | None) -> None:
        """Checks that an optimizer has made a step since the restore.

        Args:
            step: that ends.
            loss: of all ranks; training functions may leave out steps that are not finite.
            grad_norm: likewise, None when it is not known.

        Raises:
            RuntimeError: none has, on every rank.
        """
        if not self._stepped and math.isfinite(loss) and math.isfinite(grad_norm or 0.0):
            raise RuntimeError(
                f"step_end() of step {step}: no optimizer of TrainState made a step since restore(). Call "
                "optimizer.step() once for each batch, before step_end(), and give TrainState the optimizer that you "
                "step (all of them, where there are several): the state of another one is not saved."
            )
        if self._stepped and self._hooks:
            self._let_go()

    def step_ended(self, step: int) -> None:
        """Notes that a step came to its end."""
        self._standing.step = step

    def check_model(self) -> None:
        """Checks that the model is the one that was restored: the same parameters, of the same shape and type.

        Raises:
            StateError: it is not; names the first difference.
        """
        now, parameters = _entries(self._state.model), dict(self._state.model.named_parameters())
        names = [*self._entries, *(name for name in now if name not in self._entries)]
        for name in names:
            before, after = self._entries.get(name, "not there"), now.get(name, "not there")
            if before != after:
                raise StateError(_changed(f"{name} was {before} and is {after}"))
            if self._parameters.get(name) is not parameters.get(name):
                raise StateError(
                    _changed(f"{name} is a new tensor, which the optimizer does not know")
                )

    def closed(self) -> None:
        """Notes that the session was closed."""
        self._standing.closed = True
        self._let_go()

    @property
    def is_closed(self) -> bool:
        """Whether it was."""
        return self._standing.closed

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _entries(model: torch.nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: str(Entry.of(tensor)) for name, tensor in tensors}


def _changed(what: str) -> str:
    return (
        f"the model is another model than at restore(): {what}. Build the whole model before spread(), and convert it "
        "there: what is saved must be what the next attempt builds."
    )


def _tell(standing: _Standing) -> None:
    """When the session goes, or the process: a run that reached its end and was not closed is not finished."""
    if standing.step >= standing.steps and not standing.closed:
        logger.error(
            "close() was not called after the last step %d: its save was not waited for, and the run is not marked as "
            "finished. Call session.close() after the loop, on every rank.",
            standing.step,
        )
