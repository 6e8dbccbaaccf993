"""What a simulated job lives with: rates and speeds that follow its size, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.failures import PRIOR_SHARES
from ray_ckpt.policy.setting import (
    Fleet,
    Setting,
    one_tier,
    restart_line,
    shared_out,
    table_of_restarts,
)
from ray_ckpt.policy.tiers import TierCost

WHERE = Setting(
    tiers=one_tier(stall_s=10.0, restart_s=60.0),
    mtbf_s=3600.0,
    job_share=0.25,
    fleet=Fleet(nodes=16, workers_per_node=4),
)


@settings(max_examples=30)
@given(st.integers(1, 64), st.floats(0, 1))
def test_failures_come_at_a_rate_of_a_plus_b_w_and_work_at_one_of_w(
    workers: int, job_share: float
) -> None:
    where = replace(WHERE, job_share=job_share)
    a, b = job_share / 3600.0, (1 - job_share) / 3600.0 / 64
    assert 1 / where.mtbf_at(workers) == pytest.approx(a + b * workers)
    assert sum(where.true_rates(workers).values()) == pytest.approx(a + b * workers)
    assert float(where.speed(workers)) == workers / 64


def test_each_kind_of_failure_is_counted_for_the_tier_that_outlives_it() -> None:
    memory = TierCost(name="memory", stall_s=1.0)
    where = replace(
        WHERE,
        tiers=(memory, TierCost(name="durable", stall_s=0.0)),
        needs={"worker_error": 0, "node_loss": 0},
    )
    fast, slow = where.costs({"worker_error": 3.0, "node_loss": 2.0, "meteor": 1.0}, 64)
    assert (fast.failures_per_s, slow.failures_per_s) == (5.0, 1.0)


@settings(max_examples=30)
@given(st.integers(1, 64), st.floats(1, 100), st.floats(1, 1000))
def test_the_line_of_restarts_is_what_they_take(workers: int, small: float, large: float) -> None:
    where = replace(WHERE, restarts=(((8, small), (64, large)),))
    one, more = restart_line(where, 0)
    assert one + more * (workers - 1) == pytest.approx(where.restart_s(0, workers))


def test_a_tier_without_restarts_by_scale_takes_as_long_at_any_size() -> None:
    assert WHERE.restart_s(0, 1) == WHERE.restart_s(0, 10**6) == 60.0


@given(st.integers(0, 3000))
def test_failures_are_shared_out_whole(failures: int) -> None:
    counts = shared_out(failures)
    assert sum(counts.values()) == failures
    assert min(counts.values()) >= 0


def test_restarts_by_scale_are_read_or_refused_by_row() -> None:
    assert table_of_restarts([{"gpus": "8", "recovery_s": "12.5"}]) == ((8, 12.5),)
    assert table_of_restarts([{"workers": "8", "recovery_s": "1"}]) == ((8, 1.0),)
    for rows, words in (
        ([], "no rows"),
        ([{"gpus": "8"}], "row 1"),
        ([{"gpus": "8", "recovery_s": "1"}, {"gpus": "x", "recovery_s": "1"}], "row 2"),
        ([{"gpus": "0", "recovery_s": "1"}], "row 1"),
        ([{"gpus": "8", "recovery_s": "nan"}], "row 1"),
    ):
        with pytest.raises(ValueError, match=words):
            table_of_restarts(rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tiers": ()}, "1 tier"),
        ({"tiers": (TierCost(name="a", stall_s=1), TierCost(name="b", stall_s=1))}, "has a stall"),
        ({"tiers": (TierCost(name="a", stall_s=1, slowdown=0.1),)}, "slow the steps"),
        ({"mtbf_s": 0.0}, "MTBF"),
        ({"job_share": 1.1}, "job share"),
        ({"shares": {"lost": 0.9}}, "sum to 1"),
        ({"restarts": ((), ())}, "each of the 1 tiers"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(WHERE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"nodes": 0}, {"spares": -1}, {"repair_s": -1.0}, {"least_nodes": 17}]
)
def test_machines_that_cannot_be_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        replace(WHERE.fleet, **changes)  # type: ignore[arg-type]


def test_the_shares_of_a_setting_are_those_that_a_run_believes_in() -> None:
    assert dict(WHERE.shares) == dict(PRIOR_SHARES)
