"""A dataset of the training function's own: its order, its loader, and what a loader may do wrong."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ray_ckpt.batch import MicroStep
from ray_ckpt.config import Config
from ray_ckpt.data import BatchPlan, GlobalOrderSampler, dataset_order
from ray_ckpt.data.index import DataError
from ray_ckpt.data.own import OwnFeed, OwnIndex
from ray_ckpt.elastic.nested import tensors_in, to_device
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import global_order, index_of
from ray_ckpt.trainer import resolve

G, B = 12, 3


class Numbers(torch.utils.data.Dataset[int]):
    """Its items are their own indices."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def feed(count: int, world_size: int = 1, rank: int = 0, **changes: Any) -> OwnFeed:
    return OwnFeed(
        order=dataset_order(count, global_batch=G, micro_batch=B, seed=3),
        plan=BatchPlan(global_batch=G, micro_batch=B, world_size=world_size, rank=rank),
        make=changes.get("make", lambda sampler: DataLoader(Numbers(count), batch_sampler=sampler)),
    )


@given(count=st.integers(G, 500), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_an_epoch_of_a_dataset_has_each_sample_once_but_for_what_fills_no_batch(count, seed):
    order = dataset_order(count, global_batch=G, micro_batch=B, seed=seed)
    epoch = order.rows_at(np.arange(order.steps_per_epoch * G))
    assert max(Counter(epoch.tolist()).values()) == 1
    assert len(epoch) == count // G * G
    assert set(epoch.tolist()) <= set(range(count))


def test_a_small_dataset_is_shuffled_over_all_of_it():
    """Sorted data is common (images by class): a batch must not be of neighbours."""
    order = dataset_order(12_000, global_batch=60, micro_batch=30, seed=1)
    first = order.rows_at(np.arange(30)) // 1200  # ten classes, sorted
    assert len(set(first.tolist())) >= 8


@given(world_size=st.integers(1, 4), cut=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_the_loader_gives_what_the_order_says_for_any_workers_and_from_any_step(world_size, cut):
    count, stop = 100, 10
    order = dataset_order(count, global_batch=G, micro_batch=B, seed=3)
    found = np.full((stop, G), -1)
    for rank in range(world_size):
        for step, batch in enumerate(feed(count, world_size, rank).steps(cut, stop), start=cut):
            for micro in batch:
                assert micro.rows.tolist() == micro.data.tolist(), (
                    "the rows on record are those of the loader"
                )
                assert micro.positions.tolist() == list(
                    range(step * G + micro.index * B, step * G + (micro.index + 1) * B)
                )
                found[step, micro.index * B : (micro.index + 1) * B] = micro.rows
    wanted = order.rows_at(np.arange(cut * G, stop * G)).reshape(-1, G)
    assert (found[cut:] == wanted).all()


def test_a_loader_that_shuffles_itself_is_refused():
    wrong = feed(50, make=lambda sampler: DataLoader(Numbers(50), batch_size=B, shuffle=True))
    with pytest.raises(DataError, match=r"without asking the sampler.*batch_sampler=sampler"):
        next(wrong.steps(0, 4))


def test_a_dataset_of_another_length_is_refused_before_its_first_sample():
    wrong = feed(50, make=lambda sampler: DataLoader(Numbers(49), batch_sampler=sampler))
    with pytest.raises(DataError, match="dataset has 49 samples, --samples says 50"):
        next(wrong.steps(0, 4))


def test_a_loader_that_ends_early_is_named_with_its_step():
    def short(sampler: GlobalOrderSampler) -> Iterator[int]:
        batches = iter(sampler)
        for _ in range(6):
            yield len(next(batches))

    steps = feed(50, make=short).steps(2, 9)
    next(steps)
    with pytest.raises(DataError, match="the loader ended at step 3, micro-batch 2"):
        next(steps)


def test_a_run_knows_its_own_dataset_by_its_length(tmp_path):
    config = Config(storage=str(tmp_path), samples=100, global_batch=G, micro_batch=B, seed=3)
    config = resolve(config)
    assert config.data == (), "the default text is not read beside it"
    assert index_of(config) == OwnIndex(num_rows=100)
    assert index_of(config).fingerprint != OwnIndex(num_rows=101).fingerprint
    plain = dataset_order(100, global_batch=G, micro_batch=B, seed=3)
    assert (global_order(config).rows_at(range(40)) == plain.rows_at(range(40))).all()
    with pytest.raises(ConfigError, match=r"--samples 100 with --data x: .*one of the two"):
        Config(samples=100, data="x")
    with pytest.raises(ConfigError, match="--samples -1: must be at least 0"):
        Config(samples=-1)
    with pytest.raises(ConfigError, match=r"5 rows, less than one global batch of 12"):
        dataset_order(5, global_batch=G, micro_batch=B)
    with pytest.raises(ConfigError, match="at least 1"):
        dataset_order(0, global_batch=G, micro_batch=B)


def test_tokens_of_a_loaders_batch_are_refused_by_name():
    (micro,) = next(feed(50, world_size=4, rank=1).steps(0, 1))
    step = MicroStep(data=micro.data, company=False, last=True, source=micro)
    with pytest.raises(RuntimeError, match=r"micro\.tokens: .*use micro\.data"):
        _ = step.tokens


Pair = namedtuple("Pair", "image label")


@dataclass
class Output:
    loss: torch.Tensor
    more: Any = None


def test_tensors_are_moved_wherever_they_are():
    class Movable(dict[str, torch.Tensor]):
        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    one = torch.ones(2)
    moved = to_device(
        {"a": [one, "x"], "b": Pair(one, 3), "c": (one, None), "d": Movable(a=one)},
        torch.device("meta"),
    )
    assert moved["a"][0].is_meta
    assert moved["a"][1] == "x"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].image.is_meta
    assert moved["b"].label == 3
    assert moved["c"][1] is None
    assert moved["d"] == "moved to meta"
    assert len(list(tensors_in({"a": [one, (one,)], "b": Output(one, {"c": one}), "c": 1}))) == 4
