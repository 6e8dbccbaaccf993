"""The loss of a step is an integer sum of those of its passes, whoever made which of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.batch import Batch, MicroStep
from ray_ckpt.data.feed import MicroBatch
from ray_ckpt.elastic.control import LOSS_BITS


class Averages:
    """A reducer that has every round but the last made again."""

    scale, exponent = 1.0, 0

    def __init__(self, rounds: int = 1) -> None:
        self._rounds = rounds

    @contextmanager
    def one_pass(self, last: bool) -> Iterator[None]:
        yield

    def finish(self) -> bool:
        self._rounds -= 1
        return self._rounds <= 0

    def clip_grad_norm(self, max_norm: float) -> float:
        return 0.0


class Nobody:
    """No other rank is waited for."""

    def judge(self, error: RuntimeError, call: str, since_s: float) -> None:
        raise AssertionError("nothing fails here")


def batch_of(count: int, rounds: int = 1, company: int = 0, exact: bool = False) -> Batch:
    rows = np.arange(2)
    passes = [
        MicroStep(
            data=torch.zeros(2, 5, dtype=torch.int64),
            company=number >= count,
            last=False,
            source=MicroBatch(index=number, tokens=rows, rows=rows, positions=rows),
        )
        for number in range(count + company)
    ]
    cpu = torch.device("cpu")
    return Batch(passes, Averages(rounds), lambda micro: None, cpu, Nobody(), step=1, exact=exact)


def run(batch: Batch, losses: list[float]) -> tuple[int, int]:
    for micro in batch:
        value = losses[min(micro.source.index, len(losses) - 1)]
        batch.backward(micro, torch.tensor(value, requires_grad=True))
    return batch.loss


losses = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6)


@settings(max_examples=30)
@given(losses, st.integers(0, 6))
def test_the_sum_does_not_know_who_made_which_pass(values: list[float], cut: int) -> None:
    whole = run(batch_of(len(values)), values)
    parts = [part for part in (values[:cut], values[cut:]) if part]
    shares = [run(batch_of(len(part)), part) for part in parts]
    assert whole == (sum(total for total, _ in shares), 0)
    assert whole[0] / 2**LOSS_BITS == pytest.approx(math.fsum(values), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_not_added(bad: float) -> None:
    assert run(batch_of(3), [1.5, bad, 2.0]) == (int(3.5 * 2**LOSS_BITS), 1)


def test_a_round_that_is_made_again_and_a_pass_for_company_add_nothing() -> None:
    once = run(batch_of(2), [1.0, 2.0])
    assert run(batch_of(2, rounds=3), [1.0, 2.0]) == once
    assert run(batch_of(2, company=2), [1.0, 2.0]) == once


def test_a_loss_that_is_overwritten_by_the_next_pass_was_seen() -> None:
    batch, same = batch_of(3), torch.zeros(())
    for micro in batch:
        same.requires_grad_(False).fill_(micro.source.index + 1).requires_grad_()
        batch.backward(micro, same)
    assert batch.loss == (6 << LOSS_BITS, 0)


def test_in_exact_mode_the_generator_is_looked_at_after_each_pass_whoever_makes_it() -> None:
    def digest(numbers: range) -> int:
        batch = batch_of(4, exact=True)
        batch._micro_steps = [batch._micro_steps[number] for number in numbers]
        for micro in batch:
            torch.manual_seed(micro.source.index)
            torch.rand(micro.source.index + 1)
            batch.backward(micro, torch.ones((), requires_grad=True))
        return batch.rng_digest

    assert digest(range(4)) == digest(range(2)) + digest(range(2, 4))
    assert digest(range(1)) != digest(range(1, 2))
    assert batch_of(2).rng_digest == 0


def test_a_number_more_or_less_in_any_pass_is_seen_in_the_digest_of_the_generator() -> None:
    def digest(draws: list[int], exact: bool) -> int:
        torch.manual_seed(0)
        batch = batch_of(len(draws), exact=exact)
        for micro, count in zip(batch, draws, strict=True):
            torch.rand(count)
            batch.backward(micro, torch.ones((), requires_grad=True))
        return batch.rng_digest

    for exact in (False, True):
        found = [digest(draws, exact) for draws in ([2, 2, 2], [2, 2, 2], [3, 2, 2], [2, 2, 1])]
        assert found[0] == found[1]
        assert len({*found}) == 3


@settings(max_examples=30)
@given(st.lists(st.floats(width=32), max_size=6))
def test_losses_on_another_device_are_taken_there_and_add_up_alike(values: list[float]) -> None:
    here, there = batch_of(0), batch_of(0)
    here._losses = list(values)
    there._losses = [torch.tensor(value) for value in values]
    assert here.loss == there.loss


def test_a_rank_that_only_keeps_company_has_no_loss() -> None:
    assert run(batch_of(0, company=1), [1.0]) == (0, 0)
