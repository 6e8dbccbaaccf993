"""A staged copy is of the step that it was asked for, whatever training does next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ray_ckpt.checkpoint.staging import Stager, size_bytes
from ray_ckpt.errors import StateError
from ray_ckpt.state.train_state import TrainState


class _Training:
    """A small training: a forward pass changes buffers, a step changes parameters and optimizer."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.optimizer = make(self.model.parameters())
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, ema=self.ema)
        self.step()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(32, 8)).square().mean().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.ema.update_parameters(self.model)
        self.state.progress.step += 1


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _snapshot(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in _flat(state.state_dict()).items()}


def _equal(copy: Any, expected: dict[str, torch.Tensor]) -> None:
    found = _flat(copy)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("make", [_adam, _momentum])
def test_an_overlapped_copy_is_of_the_step_it_was_asked_for(make: Any) -> None:
    training = _Training(make)
    stager = Stager("overlapped", training.state.optimizers)
    for _ in range(3):
        expected = _snapshot(training.state)
        copy = stager.begin(training.state.state_dict())
        held = threading.Event()
        found: list[Any] = []

        def write(copy: Any = copy, held: Any = held, found: Any = found) -> None:
            held.wait(10)
            found.append(copy.finish())

        thread = threading.Thread(target=write)
        thread.start()
        training.forward_backward()  # changes buffers and gradients, before a byte of the rest is copied
        began = time.monotonic()
        timer = threading.Timer(0.05, held.set)
        timer.start()
        training.optimizer.step()
        assert time.monotonic() - began >= 0.05, "the step did not wait for the copy"
        training.ema.update_parameters(training.model)
        training.step()
        thread.join()
        _equal(found[0], expected)
        assert 0.0 < copy.waited_s < 5.0


def test_a_step_does_not_wait_for_a_copy_that_is_done() -> None:
    training = _Training(_adam)
    stager = Stager("overlapped", training.state.optimizers)
    copy = stager.begin(training.state.state_dict())
    copy.finish()
    training.step()
    assert copy.waited_s == 0.0


def test_a_blocking_copy_is_done_when_it_is_begun() -> None:
    training = _Training(_adam)
    stager = Stager("blocking", training.state.optimizers)
    expected = _snapshot(training.state)
    copy = stager.begin(training.state.state_dict())
    with torch.no_grad():
        for tensor in _flat(training.state.state_dict()).values():
            tensor.zero_()
    _equal(copy.finish(), expected)


def _weight(training: _Training) -> torch.Tensor:
    return training.model[0].weight


def _moment(training: _Training) -> torch.Tensor:
    found: torch.Tensor = training.optimizer.state[training.model[0].weight]["exp_avg"]
    return found


@pytest.mark.parametrize("which", [_weight, _moment])
def test_a_change_by_another_hand_fails_the_save_and_names_the_tensor(which: Any) -> None:
    training = _Training(_adam)
    stager = Stager("overlapped", training.state.optimizers)
    copy = stager.begin(training.state.state_dict())
    with torch.no_grad():
        which(training).mul_(2.0)
    with pytest.raises(StateError, match=r"weight.*was changed while it was copied"):
        copy.finish()
    training.step()  # and nothing waits for it any more
    expected = _snapshot(training.state)
    _equal(stager.begin(training.state.state_dict()).finish(), expected)


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_buffers_are_made_once(mode: Any) -> None:
    training = _Training(_adam)
    stager = Stager(mode, training.state.optimizers)
    stager.prepare(training.state.state_dict())
    names = {n for n in _flat(training.state.state_dict()) if n.startswith(("model", "optimizer"))}
    addresses: set[tuple[int, ...]] = set()
    for _ in range(4):
        copy = _flat(stager.begin(training.state.state_dict()).finish())
        addresses.add(tuple(copy[name].data_ptr() for name in sorted(names)))
        training.step()
    assert len(addresses) == 1


def test_closing_lets_the_optimizers_go() -> None:
    training = _Training(_adam)
    stager = Stager("overlapped", training.state.optimizers)
    stager.begin(training.state.state_dict())
    stager.close()
    # Nobody finishes that copy any more: a step that still waited for it would wait for ever.
    step = threading.Thread(target=training.step, daemon=True)
    step.start()
    step.join(10)
    assert not step.is_alive()


@given(
    shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    shared=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_the_size_of_a_state_is_that_of_its_storages(
    shapes: list[tuple[int, int]], shared: bool
) -> None:
    tensors = {f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    expected = sum(4 * a * b for a, b in shapes)
    tree: dict[str, Any] = {"model": tensors}
    if shared:
        tree["tied"] = {"again": tensors["t0"].view(-1)}
    assert size_bytes(tree) == expected
