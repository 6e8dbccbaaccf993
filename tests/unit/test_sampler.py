"""The sampler gives the feed's order to a StatefulDataLoader, and its state is what was trained."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from ray_ckpt.data import GlobalOrderSampler, sample_offset
from ray_ckpt.data.mixture import Order, mixed_order, split_ids
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.errors import ConfigError

V, B = 5, 3
G = V * B


def order_of(groups: list[int], **more: Any) -> GlobalOrder:
    return GlobalOrder(
        row_group_sizes=np.array(groups, dtype=np.int64), global_batch=G, micro_batch=B, **more
    )


ORDER = order_of([7, 0, 12, 5, 1, 30, 4, 11], seed=4, window_groups=2)  # 70 rows: 4 steps an epoch


def plan(world_size: int = 1, rank: int = 0) -> BatchPlan:
    return BatchPlan(global_batch=G, micro_batch=B, world_size=world_size, rank=rank)


class Rows:
    """A map-style dataset whose items are their own indices."""

    def __len__(self) -> int:
        return ORDER.num_rows

    def __getitem__(self, row: int) -> int:
        return row


def loader_of(sampler: GlobalOrderSampler, num_workers: int, **more: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Rows(), batch_sampler=sampler, num_workers=num_workers, **more)


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def by_step(order: Order, worlds: list[tuple[int, int, int]]) -> list[list[int]]:
    """Rows of each global batch, from (world size, first step, last step) one after the other."""
    steps = []
    for world_size, start, stop in worlds:
        ranks = []
        for rank in range(world_size):
            own = plan(world_size, rank)
            sampler = GlobalOrderSampler(order, own, sample_offset=start * G, stop_step=stop)
            batches = list(sampler)
            assert len(batches) == len(sampler)
            share = len(own.micro_batches)
            ranks.append([joined(batches[i : i + share]) for i in range(0, len(batches), share)])
        steps += [joined(parts) for parts in zip(*ranks, strict=True)]
    return steps


def expected(order: GlobalOrder, start: int, stop: int) -> list[list[int]]:
    return order.rows_at(np.arange(start * G, stop * G)).reshape(-1, G).tolist()


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=12),
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(1, V), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_any_history_of_worlds_is_the_global_order(groups, start, parts, window):
    order = order_of([*groups, G], seed=1, window_groups=window)
    worlds, at = [], start
    for world_size, steps in parts:
        worlds.append((world_size, at, at + steps))
        at += steps
    assert by_step(order, worlds) == expected(order, start, at)


SIZES = ([7, 0, 12, 5], [30, 4], [11, 9, 2])
MIXTURE = mixed_order(
    [np.array(sizes, dtype=np.int64) for sizes in SIZES],
    names=["web", "code", "books"],
    weights=[5, 2, 1],
    global_batch=G,
    micro_batch=B,
    seed=4,
    window_groups=2,
)


def test_indices_of_a_mixture_are_those_of_its_datasets_one_after_another() -> None:
    """In any world, from any offset, over many epochs of the smallest source."""
    starts = np.cumsum([0, *(sum(sizes) for sizes in SIZES[:-1])])
    sources, rows = split_ids(MIXTURE.rows_at(np.arange(40 * G)))
    wanted = (starts[sources] + rows).reshape(40, G).tolist()
    for worlds in ([(1, 0, 40)], [(2, 0, 13), (5, 13, 14), (3, 14, 40)], [(3, 7, 40)]):
        first = worlds[0][1]
        steps = by_step(MIXTURE, worlds)
        assert [sorted(step) for step in steps] == [sorted(step) for step in wanted[first:]]
        if worlds[0][0] == 1:
            assert steps == wanted[first:]


def test_a_state_of_a_mixture_is_not_for_another_one() -> None:
    iterator = iter(GlobalOrderSampler(MIXTURE, plan()))
    next(iterator)
    state = iterator.state_dict()
    other = dataclasses.replace(MIXTURE, weights=(4, 3, 1))
    with pytest.raises(ConfigError, match="another order"):
        iter(GlobalOrderSampler(other, plan())).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_is_of_what_was_handed_out_not_of_what_was_fetched(num_workers):
    own = plan(2, 1)  # 3 of 5 micro-batches
    everything = list(GlobalOrderSampler(ORDER, own, stop_step=12))
    loader = loader_of(GlobalOrderSampler(ORDER, own, stop_step=12), num_workers)
    rows = iter(loader)
    done = [next(rows).tolist() for _ in range(6)]  # two steps
    state = loader.state_dict()
    assert sample_offset(state) == 2 * G
    again = loader_of(GlobalOrderSampler(ORDER, own, stop_step=12), num_workers)
    again.load_state_dict(state)
    rows = iter(again)
    done += [next(rows).tolist() for _ in range(4)]  # into the middle of a step
    state = again.state_dict()
    with pytest.raises(ConfigError, match="inside step 3, after 1 of 3"):
        sample_offset(state)
    last = loader_of(GlobalOrderSampler(ORDER, own, stop_step=12), num_workers)  # a second resume
    last.load_state_dict(state)
    done += [batch.tolist() for batch in last]
    assert done == everything


@pytest.mark.parametrize(
    ("num_workers", "worlds"),
    [(0, [(2, 3), (5, 2), (1, 1), (3, 4)]), (2, [(2, 3), (1, 7)])],  # over an epoch's end
)
def test_a_loader_goes_on_in_another_world_from_its_offset(num_workers, worlds):
    found = []
    offset = 0
    for world_size, steps in worlds:
        stop = offset // G + steps
        parts, offsets = [], set()
        for rank in range(world_size):
            own = plan(world_size, rank)
            sampler = GlobalOrderSampler(ORDER, own, sample_offset=offset, stop_step=99)
            loader = loader_of(sampler, num_workers)
            rows = iter(loader)
            share = len(own.micro_batches)
            parts.append([joined(next(rows).tolist() for _ in range(share)) for _ in range(steps)])
            offsets.add(sample_offset(loader.state_dict()))
        found += [joined(step) for step in zip(*parts, strict=True)]
        assert offsets == {stop * G}
        offset = stop * G
    assert found == expected(ORDER, 0, 10)


def test_snapshots_of_some_steps_give_the_same_offset():
    sampler = GlobalOrderSampler(ORDER, plan(), stop_step=9)
    loader = loader_of(sampler, 2, snapshot_every_n_steps=4)
    rows = iter(loader)
    for _ in range(3 * V):
        next(rows)
    assert sample_offset(loader.state_dict()) == 3 * G


def test_the_state_before_the_first_batch_is_the_start():
    loader = loader_of(GlobalOrderSampler(ORDER, plan(), sample_offset=7 * G, stop_step=9), 0)
    assert sample_offset(loader.state_dict()) == 7 * G


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="not a whole number of global batches"):
        GlobalOrderSampler(ORDER, plan(), sample_offset=G + 1)
    with pytest.raises(ConfigError, match="make both from the same options"):
        GlobalOrderSampler(ORDER, BatchPlan(global_batch=G, micro_batch=1, world_size=1, rank=0))
    with pytest.raises(ConfigError, match="no GlobalOrderSampler"):
        sample_offset({"_snapshot": {"_main_snapshot": {}}})
    with pytest.raises(TypeError, match="stop_step"):
        len(GlobalOrderSampler(ORDER, plan()))
    walk = iter(GlobalOrderSampler(ORDER, plan(2, 0)))
    next(walk)
    inside = walk.state_dict()
    with pytest.raises(ConfigError, match="inside step 0 by rank 0 of 2"):
        iter(GlobalOrderSampler(ORDER, plan(3, 0))).load_state_dict(inside)
    other = order_of([70], seed=4, window_groups=2)
    with pytest.raises(ConfigError, match="another order"):
        iter(GlobalOrderSampler(other, plan(2, 0))).load_state_dict(inside)


def test_a_whole_step_loads_into_another_world():
    walk = iter(GlobalOrderSampler(ORDER, plan(2, 0)))
    for _ in range(4):
        next(walk)
    one = iter(GlobalOrderSampler(ORDER, plan()))
    one.load_state_dict(walk.state_dict())
    assert joined(next(one) for _ in range(V)) == expected(ORDER, 2, 3)[0]
