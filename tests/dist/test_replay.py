"""Policies over weeks of failures: the arrays agree with the event by event simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.contenders import Clairvoyant, Fixed
from ray_ckpt.policy.draws import Failures, exponential, trace, weibull
from ray_ckpt.policy.interval import waste
from ray_ckpt.policy.limits import IntervalLimits
from ray_ckpt.policy.replay import Totals, replay
from ray_ckpt.policy.setting import Setting, one_tier

DAY_S = 86400.0
LIMITS = IntervalLimits(min_s=1.0, max_s=6 * 3600.0)


def setting(mtbf_s: float, **costs: float) -> Setting:
    return Setting(tiers=one_tier(**costs), mtbf_s=mtbf_s)


def run(interval_s: float, where: Setting, *, runs: int, wall_s: float) -> Totals:
    draw = exponential(where.mtbf_s, np.random.default_rng(7))
    failures = Failures(draw, where.shares, runs=runs, rng=np.random.default_rng(8))
    return replay(Fixed(where, interval_s), where, failures, runs=runs, wall_s=wall_s)


@settings(max_examples=15, deadline=None)
@given(
    st.floats(0.1, 60),
    st.floats(0, 300),
    st.floats(0, 600),
    st.floats(2000, 1e5),
    st.floats(50, 5000),
)
def test_the_time_of_a_run_adds_up(
    stall_s: float, upload_s: float, restart_s: float, mtbf_s: float, interval_s: float
) -> None:
    where = setting(mtbf_s, stall_s=stall_s, upload_s=upload_s, restart_s=restart_s)
    found = run(interval_s, where, runs=5, wall_s=5 * DAY_S)
    for part in (found.useful_s, found.save_s, found.rework_s, found.restart_s):
        assert (part >= -1e-6).all()
    assert found.wall_s == pytest.approx(np.full(5, 5 * DAY_S))


def test_for_rare_failures_it_is_the_first_order_formula() -> None:
    where = setting(1e5, stall_s=5.0, restart_s=60.0)
    found = run(1000.0, where, runs=200, wall_s=60 * DAY_S)
    assert found.waste.mean() == pytest.approx(waste(1000.0, 5.0, 1e5, 60.0), rel=0.05)


def test_the_clairvoyant_interval_is_not_beaten_by_others() -> None:
    where = setting(7200.0, stall_s=30.0, upload_s=60.0, restart_s=300.0)
    (best_s,) = Clairvoyant(where, LIMITS).steps(1)
    found = run(best_s, where, runs=200, wall_s=20 * DAY_S).waste.mean()
    for factor in (0.4, 0.7, 1.5, 2.5):
        other = run(best_s * factor, where, runs=200, wall_s=20 * DAY_S)
        assert found <= other.waste.mean() * 1.005


def test_draws_have_the_mean_they_should() -> None:
    rng = np.random.default_rng(1)
    for draw in (
        exponential(100.0, rng),
        weibull(100.0, 0.7, rng),
        trace(np.array([50.0, 150.0]), rng),
    ):
        assert draw(200_000).mean() == pytest.approx(100.0, rel=0.02)
