"""The formulas for the interval: the figures that were published, and what must hold for all numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.gamma import gamma_quantile
from ray_ckpt.policy.interval import (
    daly,
    daly_first,
    efficiency,
    ettr,
    exact,
    growth,
    overhead,
    rfo,
    save_cost,
    waste,
    young,
)

seconds = st.floats(min_value=1e-3, max_value=1e7)
stalls = st.floats(min_value=1e-3, max_value=1e4)
shares = st.floats(0, 1)
factors = st.floats(1.001, 100)

# Aupy, Robert, Vivien and Zaidouni 2013, table 2: periods in seconds for a save and a recovery of 600 s and a downtime
# of 60 s. M, Young, Daly's first order, RFO, the optimum that a search found, and the exact one.
TABLE_2 = [
    (3_849_609, 68567, 68573, 67961, 68240, 68168),
    (962_402, 34584, 34595, 33972, 34189, 34185),
    (240_601, 17592, 17615, 16968, 17194, 17194),
    (60_150, 9096, 9142, 8449, 8701, 8701),
    (15_038, 4848, 4940, 4154, 4458, 4458),
]


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: f"M={row[0]}")
def test_the_periods_of_aupy_2013_table_2(row):
    mtbf, by_young, by_daly, by_rfo, searched, by_lambert = row
    # M is printed without its decimals: half a second of it moves the period by at most 0.1 s.
    assert young(600, mtbf) + 600 == pytest.approx(by_young, abs=0.6)
    assert daly_first(600, mtbf, 660) + 600 == pytest.approx(by_daly, abs=0.6)
    assert rfo(600, mtbf, 660) + 600 == pytest.approx(by_rfo, abs=0.6)
    assert exact(600, mtbf) + 600 == pytest.approx(by_lambert, abs=0.6)
    # Their search on the first row stopped about 0.1 % off.
    assert exact(600, mtbf) + 600 == pytest.approx(searched, rel=0.0011)
    assert daly(600, mtbf) + 600 == pytest.approx(by_lambert, rel=2e-4)


def test_the_interval_of_llama_3():
    mtbf = 54 * 24 * 60 / 419
    assert 54 * 24 * 60 == 77_760
    assert mtbf == pytest.approx(185.6, abs=0.05)
    assert young(60, mtbf * 60) / 60 == pytest.approx(19.3, abs=0.05)
    # A restart of 10 min costs 5.4 % and moves nothing: saving and rework stay equal.
    interval = young(60, mtbf * 60)
    assert waste(interval, 60, mtbf * 60, 600) - waste(interval, 60, mtbf * 60) == pytest.approx(
        10 / mtbf
    )


def test_the_goodput_of_kokolis_2024():
    nodes, rate = 12_000 / 8, 6.50 / 1000 / 86400
    mtbf = 1 / (nodes * rate)
    assert ettr(7.0 * 60, 10, mtbf, 5 * 60) == pytest.approx(0.9205, abs=5e-5)
    # Their estimate is first order: the exact one is a little better.
    assert efficiency(7.0 * 60, 10, mtbf, 5 * 60) == pytest.approx(0.9205, abs=2e-3)
    # Pure 1/N scaling at 1,024 GPUs, and the other cluster's rate.
    assert 1 / (1024 / 8 * rate) / 3600 == pytest.approx(28.8, abs=0.05)
    assert ettr(420, 10, mtbf * 6.50 / 2.34, 300) > ettr(420, 10, mtbf, 300)


# ---- exact ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(stalls, seconds)
def test_the_exact_optimum_solves_the_lambert_equation(stall, mtbf):
    # w exp(w) = -exp(-C/M - 1) on the branch above -1, in logarithms: no digits are lost there.
    share = exact(stall, mtbf) / mtbf
    assert 0 < share <= 1
    if share < 1:
        left = math.log1p(-share) + share
        lost = 4e-16 / (1 - share)  # digits that a share next to 1 does not have
        assert left == pytest.approx(-stall / mtbf, rel=1e-6, abs=1e-15 + lost)


@settings(max_examples=40, deadline=None)
@given(stalls, seconds, st.floats(0, 1e3), st.floats(0, 1e3), shares, st.floats(1.01, 100))
def test_no_other_interval_wastes_less_than_the_exact_one(
    stall, mtbf, restart, upload, slowdown, factor
):
    def lost(interval: float) -> float:
        return overhead(interval, stall, mtbf, restart, upload=upload, slowdown=slowdown)

    best = exact(save_cost(stall, upload, slowdown), mtbf)
    assert lost(best) <= lost(best * factor) * (1 + 1e-12)
    assert lost(best) <= lost(best / factor) * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-12, 100), seconds)
def test_all_formulas_agree_where_a_save_is_short_beside_the_mtbf(share, mtbf):
    stall = share * mtbf
    best = exact(stall, mtbf)
    # Young's is the leading term, and the error of each is of the order that its authors say.
    assert abs(young(stall, mtbf) / mtbf - best / mtbf) <= share
    assert daly(stall, mtbf) == pytest.approx(best, rel=0.07)
    if share <= 0.5:
        assert daly(stall, mtbf) == pytest.approx(best, rel=0.006)
    if share <= 0.01:
        assert rfo(stall, mtbf) == pytest.approx(best, rel=0.6 * math.sqrt(share) + 1e-9)
        assert daly_first(stall, mtbf, stall) == pytest.approx(best, rel=math.sqrt(share) + 1e-9)


@settings(max_examples=40, deadline=None)
@given(stalls, seconds, factors)
def test_a_longer_stall_or_rarer_failures_save_more_rarely(stall, mtbf, factor):
    for formula in (young, exact):
        assert formula(stall * factor, mtbf) >= formula(stall, mtbf)
        assert formula(stall, mtbf * factor) > formula(stall, mtbf)
    assert young(stall * 4, mtbf) == pytest.approx(2 * young(stall, mtbf))


def test_a_save_longer_than_the_mtbf_still_has_an_interval():
    assert daly(200, 100) == 100
    assert exact(200, 100) == pytest.approx(94.75, abs=0.01)
    assert rfo(200, 100) == 0
    assert exact(1e9, 1) == pytest.approx(1)


# ---- waste ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(stalls, seconds, st.floats(0, 1e5), factors)
def test_waste_is_least_at_young(stall, mtbf, restart, factor):
    best = young(stall, mtbf)
    least = waste(best, stall, mtbf, restart)
    for other in (best * factor, best / factor):
        assert waste(other, stall, mtbf, restart) >= least * (1 - 1e-12)
    # At the optimum, saving and rework cost the same: sqrt(2 C / M) together.
    assert least - restart / mtbf == pytest.approx(math.sqrt(2 * stall / mtbf), rel=1e-6, abs=1e-12)


def test_an_upload_is_paid_in_rework_and_its_slow_down_in_saving():
    plain = waste(100, 2, 1000)
    assert waste(100, 2, 1000, upload=30) - plain == pytest.approx(30 / 1000)
    assert waste(100, 2, 1000, upload=30, slowdown=0.1) - plain == pytest.approx(0.03 + 0.03)
    assert save_cost(2, 30, 0.1) == pytest.approx(5)
    # Restart time is lost whatever the interval is.
    assert waste(10, 1, 100, restart=20) - waste(10, 1, 100) == pytest.approx(0.2)


@settings(max_examples=40, deadline=None)
@given(st.floats(1, 1e4), st.floats(1e-6, 1e-2), st.floats(0, 1), st.floats(0, 1), shares)
def test_first_order_and_exact_waste_meet_where_failures_are_rare(
    interval, share, restart, upload, slowdown
):
    mtbf = interval / share
    numbers = (interval, interval / 50, mtbf, restart * interval)
    options = {"upload": upload * interval, "slowdown": slowdown}
    first, all_orders = waste(*numbers, **options), overhead(*numbers, **options)
    assert all_orders >= first * (1 - 1e-9)
    # Beyond first order: products of two of the shares lost.
    assert all_orders - first <= 2 * (first + share) ** 2
    assert efficiency(*numbers, **options) == pytest.approx(1 / (1 + all_orders))


@settings(max_examples=40, deadline=None)
@given(stalls, st.floats(1, 1e6), st.floats(0, 100), st.floats(1e-3, 0.5))
def test_the_estimate_of_kokolis_is_never_above_the_exact_efficiency(stall, mtbf, restart, share):
    interval = share * mtbf
    assert ettr(interval, stall, mtbf, restart) <= efficiency(interval, 0, mtbf, restart) / (
        1 + stall / interval
    ) * (1 + 1e-9)


@pytest.mark.parametrize("shape", [0.5, 1, 3, 20])
@pytest.mark.parametrize("stall", [1.0, 60.0])
def test_the_best_interval_for_the_mean_rate_is_the_best_for_all_that_is_believed(shape, stall):
    # Rates as they are believed in: a gamma distribution, in slices of the same probability.
    mean = 1 / (2 * 86400.0)
    rates = [mean / shape * gamma_quantile(shape, (k + 0.5) / 200) for k in range(200)]

    def expected(interval: float) -> float:
        return sum(growth(interval, stall, rate, 300.0) - 1 for rate in rates) / len(rates)

    chosen = exact(stall, 1 / (sum(rates) / len(rates)))
    least = min(expected(chosen * factor) for factor in (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25))
    assert expected(chosen) <= least * 1.001


def test_limits_of_the_formulas():
    for formula in (young, daly, exact):
        assert formula(0, 100) == 0
        assert formula(0, math.inf) == 0
        assert formula(1, math.inf) == math.inf
    assert waste(10, 0, 100) == pytest.approx(0.05)
    assert overhead(10, 2, math.inf, 50) == pytest.approx(0.2)
    assert overhead(1e6, 1, 1.0) == math.inf
    assert efficiency(1e6, 1, 1.0) == 0
    assert growth(10, 0, 0, 0) == 1


@pytest.mark.parametrize(
    ("stall", "mtbf"), [(-1, 10), (1, 0), (1, -5), (math.nan, 10), (1, math.nan)]
)
def test_impossible_times_are_refused(stall, mtbf):
    over_time = [lambda c, m, f=f: f(1, c, m) for f in (waste, overhead, efficiency, ettr)]
    for formula in (young, daly_first, daly, rfo, exact, *over_time):
        with pytest.raises(ValueError, match="stall >= 0 s and mtbf > 0 s"):
            formula(stall, mtbf)


def test_other_impossible_times_are_refused():
    for formula in (waste, overhead, efficiency, ettr):
        with pytest.raises(ValueError, match="interval must be more than 0 s"):
            formula(0, 1, 10)
        with pytest.raises(ValueError, match="restart must not be negative"):
            formula(1, 1, 10, -1)
    with pytest.raises(ValueError, match="restart < mtbf"):
        rfo(1, 10, 10)
    with pytest.raises(ValueError, match="upload must not be negative"):
        save_cost(1, -1)
