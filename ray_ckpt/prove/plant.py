"""What a proof changes inside a worker: a gate to stop at, or a fault that must be found.

Both are put around :class:`ray_ckpt.session.Session` in the worker's own process, before its training function
starts. Nothing of this is in a run that is not a proof.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ray_ckpt.batch import Batch, MicroStep
from ray_ckpt.elastic.control import Agreement
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import global_order
from ray_ckpt.session import Session
from ray_ckpt.state import rng
from ray_ckpt.state.train_state import TrainState

GATE_POLL_S = 0.02
GATE_TIMEOUT_S = 300.0


def gate_path(folder: Path, step: int) -> Path:
    """The file whose presence keeps a run from going beyond a step."""
    return folder / f"step-{step}"


def reached_path(folder: Path, step: int) -> Path:
    """The file that a run puts there when it stands at a gate, and none of its saves is under way."""
    return folder / f"step-{step}-reached"


def plant_gates(folder: Path) -> None:
    """Makes rank 0 wait at the end of each step that has a gate, until the gate is gone.

    A request for a save is served: then one more step is made, which saves.
    """
    step_end = Session.step_end

    @functools.wraps(step_end)
    def gated(self: Session, **kwargs: Any) -> Agreement:
        agreement = step_end(self, **kwargs)
        path = gate_path(folder, self.progress.step)
        if self.rank == 0 and path.exists():
            self._saving.wait(GATE_TIMEOUT_S)  # what is under way at an event is not up to chance
            deadline = time.monotonic() + GATE_TIMEOUT_S
            self._steward.exchange(flush=True)
            # The line of the step may have been written before the save was done: it is no sign that all is at rest.
            reached_path(folder, self.progress.step).touch()
            while path.exists() and not self._steward.asked and time.monotonic() < deadline:
                time.sleep(GATE_POLL_S)
                self._steward.exchange(flush=True)
            self._seen = time.monotonic()
        return agreement

    Session.step_end = gated  # type: ignore[method-assign]


def plant_fault(name: str) -> None:
    """Breaks one thing in every attempt that resumes from a checkpoint.

    Args:
        name: one of :data:`FAULTS`.
    """
    if name not in FAULTS:
        raise ConfigError(f"--break {name!r}: there are {', '.join(FAULTS)}")
    FAULTS[name]()


def _after_restore(change: Callable[[Session, TrainState], None]) -> None:
    """Calls ``change`` after a restore from a checkpoint."""
    restore = Session.restore

    @functools.wraps(restore)
    def broken(self: Session, state: TrainState) -> TrainState:
        restore(self, state)
        if state.progress.step > 0:
            change(self, state)
        return state

    Session.restore = broken  # type: ignore[method-assign]


def _rng() -> None:
    def change(session: Session, state: TrainState) -> None:
        rng.seed_all(session.config.seed + 1, 0, session.rank)
        # Exact mode derives its numbers for every pass: there the seed is what can be wrong.
        wrong = replace(session.config, seed=session.config.seed + 1)

        def before(micro: MicroStep) -> None:
            if wrong.exact:
                rng.seed_all(wrong.seed, session.progress.step, micro.source.index)

        session._before_pass = before  # type: ignore[method-assign]

    _after_restore(change)


def _data_order() -> None:
    def change(session: Session, state: TrainState) -> None:
        session.order = global_order(replace(session.config, seed=session.config.seed + 1))

    _after_restore(change)


def _scheduler() -> None:
    load = TrainState.load_state_dict

    @functools.wraps(load)
    def broken(self: TrainState, state_dict: dict[str, Any]) -> None:
        fresh = {name: part.state_dict() for name, part in self._parts.items()}
        groups = [group for optimizer in _optimizers(self) for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        load(self, state_dict)
        for name, part in self._parts.items():
            part.load_state_dict(fresh[name])
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = lr

    TrainState.load_state_dict = broken  # type: ignore[method-assign]


def _optimizer() -> None:
    def change(session: Session, state: TrainState) -> None:
        for optimizer in _optimizers(state):
            for values in optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        value.zero_()

    _after_restore(change)


def _optimizers(state: TrainState) -> list[torch.optim.Optimizer]:
    one = state.optimizer
    return [one] if isinstance(one, torch.optim.Optimizer) else list(one)


def _batch() -> None:
    def change(session: Session, state: TrainState) -> None:
        make = session._make_batch

        def doubled(micro_batches: list[Any]) -> Batch:
            # The first micro-batch of rank 0 is trained on twice, its last one not at all.
            if session.rank == 0 and len(micro_batches) > 1:
                first, last = micro_batches[0], micro_batches[-1]
                micro_batches = [*micro_batches[:-1], replace(first, index=last.index)]
            return make(micro_batches)

        session._make_batch = doubled  # type: ignore[method-assign]

    _after_restore(change)


def _sample_skip() -> None:
    def change(session: Session, state: TrainState) -> None:
        feed = session._feed()

        class Skipping:
            def steps(self, start_step: int, stop_step: int) -> Iterator[Any]:
                yield from feed.steps(start_step + 1, stop_step + 1)

        session._feed = Skipping  # type: ignore[method-assign]

    _after_restore(change)


FAULTS: dict[str, Callable[[], None]] = {
    "rng": _rng,
    "data-order": _data_order,
    "scheduler": _scheduler,
    "optimizer": _optimizer,
    "batch": _batch,
    "sample-skip": _sample_skip,
}

# The quantity in which each fault must show, and how many steps after the resume at the latest.
SHOWS = {
    "rng": ("rng_digest", 1),
    "data-order": ("sample_digest", 1),
    "scheduler": ("lr", 1),
    "optimizer": ("loss_hex", 2),
    "batch": ("sample_digest", 1),
    "sample-skip": ("sample_digest", 1),
}
