"""The copy of a state that a save is made of, in buffers that are made once.

Two modes:

- *blocking*: training stands still for one memory copy;
- *overlapped*: what only the optimizer's step changes (parameters and the optimizer's own tensors) is copied beside
  the next forward and backward pass, by a thread, on a GPU through a stream of its own. The rest (buffers of the
  model, which a forward pass changes, counters, averaged weights, the user's items) is copied at once: it is small
  where it matters. The optimizer's step waits for what is left of the copy.

In the second mode nothing but the optimizer may change parameters in place between a save and the optimizer's next
step. A change is found by the version counters of the tensors, and fails the save; one through ``parameter.data`` has
no such counter and is not found.

torch's ``DefaultStager`` does the copying, into storages that it keeps (pinned where there is a GPU). A fresh one
costs several copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_ckpt.config import StagingMode
from ray_ckpt.errors import StateError

Tree = dict[str, Any]


class StagedCopy:
    """One copy under way; made by :meth:`Stager.begin`.

    ``finish()`` is called once, by the thread that writes; ``wait()`` by the optimizer's step.
    """

    def __init__(self, stager: DefaultStager, now: Tree, later: Tree) -> None:
        self._stager = stager
        self._later = later
        self._versions = _versions(later)
        # Copied here and now, by the caller's thread, after everything that it has queued on its stream.
        self._copy = cast("Tree", stager.stage(now))
        self._ready = _recorded() if later else None
        self._done = threading.Event()
        self._problem: str | None = None
        self._finished_at = 0.0
        self._wait_began: float | None = None
        if not later:
            self._done.set()

    def finish(self) -> Tree:
        """Copies what is left, and returns the whole copy; the optimizer's step may go on.

        Raises:
            StateError: a tensor was changed while it was copied.
        """
        if self._later:
            try:
                with _side_stream(self._ready):
                    rest = cast("Tree", self._stager.stage(self._later))
                changed = [
                    path
                    for path, version in _versions(self._later).items()
                    if self._versions[path] != version
                ]
            finally:
                self._finished_at = time.monotonic()
                self._done.set()
            if changed:
                raise StateError(
                    f"{changed[0]} was changed while it was copied, by something other than the optimizer's step, so "
                    "that the copy is of no step. Change it after the optimizer's step, or use --saving.staging "
                    "blocking."
                )
            _merge(self._copy, rest)
            self._later = {}
        return self._copy

    def wait(self) -> None:
        """Waits until the state may change."""
        if self._done.is_set():
            return
        self._wait_began = time.monotonic()
        self._done.wait()

    @property
    def waited_s(self) -> float:
        """How long the optimizer's step had to wait, seconds; after ``finish()``."""
        began = self._wait_began
        return 0.0 if began is None else max(0.0, self._finished_at - began)


class Stager:
    """Copies states of one shape; one copy at a time.

    Args:
        mode: blocking, or overlapped with the next forward and backward pass.
        optimizers: whose steps wait for an overlapped copy.
    """

    def __init__(
        self, mode: StagingMode = "blocking", optimizers: Iterable[Optimizer] = ()
    ) -> None:
        self._stager = DefaultStager(_options())
        self._optimizers = tuple(optimizers)
        self._copy: StagedCopy | None = None
        # One copy after the other, before its first step: a hook costs a step nothing when no copy is under way.
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step)
            for optimizer in (self._optimizers if mode == "overlapped" else ())
        ]

    def begin(self, state: Tree) -> StagedCopy:
        """Copies what must be copied at once; ``finish()`` of the result does the rest.

        Args:
            state: nested dictionaries of tensors.
        """
        now, later = _split(state, self._held()) if self._hooks else (state, {})
        self._copy = StagedCopy(self._stager, now, later)
        return self._copy

    def prepare(self, state: Tree) -> None:
        """Makes the buffers, so that the first copy costs what the tenth costs."""
        # Both halves as they will be copied: the buffers are kept by storage.
        self.begin(state).finish()

    def close(self) -> None:
        """Gives the buffers back, and lets the optimizers go."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._stager.close()

    def _before_step(self, *_: Any) -> None:
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def _held(self) -> set[int]:
        """Addresses of what nothing but a step of the optimizers changes."""
        tensors = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return {address for tensor in tensors if (address := _address(tensor))}


def size_bytes(state: Mapping[str, Any]) -> int:
    """Bytes that this rank's part of a state takes; a storage that several tensors share counts once."""
    storages = {}
    for tensor in _leaves(state).values():
        storage = _local(tensor).untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def _split(tree: Tree, held: set[int]) -> tuple[Tree, Tree]:
    now: Tree = {}
    later: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            now[key], below = _split(value, held)
            if below:
                later[key] = below
        elif _address(value) in held:
            later[key] = value
        else:
            now[key] = value
    return now, later


def _merge(into: Tree, other: Tree) -> None:
    for key, value in other.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found |= _leaves(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return found


def _versions(tree: Tree) -> dict[str, int]:
    return {path: _local(tensor)._version for path, tensor in _leaves(tree).items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # Not to_local(): that is a new view under autograd.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 of an empty one."""
    return _local(tensor).untyped_storage().data_ptr()


def _recorded() -> torch.cuda.Event | None:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _side_stream(after: torch.cuda.Event | None) -> AbstractContextManager[Any]:
    """A stream beside training's, behind an event of training's; the copies on it wait for themselves alone."""
    if after is None:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_event(after)
    return torch.cuda.stream(stream)


def _options() -> StagingOptions:
    # Each copy waits for itself, on the stream that it is on. With use_non_blocking_copy the stager would wait for
    # the whole device instead, which is training's next passes too.
    return StagingOptions(
        use_pinned_memory=torch.cuda.is_available(),
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
