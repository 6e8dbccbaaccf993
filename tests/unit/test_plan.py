"""Every micro-batch has one rank, for every world size; the global batch never changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.data.plan import BatchPlan, check_batch
from ray_ckpt.errors import ConfigError


def plans(v: int, b: int, w: int) -> list[BatchPlan]:
    return [BatchPlan(global_batch=v * b, micro_batch=b, world_size=w, rank=r) for r in range(w)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 64), st.data())
def test_the_ranks_share_the_global_batch_whole_in_order_and_evenly(v, b, data):
    w = data.draw(st.integers(1, v))
    world = plans(v, b, w)
    assert [j for plan in world for j in plan.micro_batches] == list(range(v))
    shares = [len(plan.micro_batches) for plan in world]
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1
    assert {plan.max_share for plan in world} == {max(shares)}


def test_every_world_size_up_to_v_works_divisor_or_not():
    for v in range(1, 30):
        for w in range(1, v + 1):
            assert [j for p in plans(v, 2, w) for j in p.micro_batches] == list(range(v))


@pytest.mark.parametrize("w", [0, -1, 13])
def test_a_world_that_does_not_fit_is_refused_with_the_way_out(w):
    with pytest.raises(ConfigError) as caught:
        BatchPlan(global_batch=24, micro_batch=2, world_size=w, rank=0)
    for word in (f"world size {w}", "12 micro-batches", "--workers", "--micro-batch"):
        assert word in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 3, 4])
def test_a_rank_outside_its_world_is_refused(rank):
    with pytest.raises(ConfigError, match=f"rank {rank} is not in a world of 3"):
        BatchPlan(global_batch=24, micro_batch=2, world_size=3, rank=rank)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_micro_batch_fits_or_is_refused_with_sizes_that_do(global_batch, micro_batch):
    if global_batch % micro_batch == 0:
        check_batch(global_batch, micro_batch)
        return
    with pytest.raises(ConfigError) as caught:
        check_batch(global_batch, micro_batch)
    text = str(caught.value)
    assert f"--micro-batch {micro_batch}" in text
    assert f"--global-batch {global_batch}" in text
    offered = [int(word) for word in text.rsplit("fit: ", 1)[1].rstrip(".").split(", ")]
    assert offered == sorted(offered)
    assert all(global_batch % size == 0 for size in offered)


@pytest.mark.parametrize(("global_batch", "micro_batch"), [(0, 1), (1, 0), (-4, 2), (4, -2)])
def test_sizes_below_one_are_refused(global_batch, micro_batch):
    with pytest.raises(ConfigError, match=r"--global-batch and --micro-batch .* at least 1"):
        check_batch(global_batch, micro_batch)
