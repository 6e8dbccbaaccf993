"""What is believed about failures: stated at first, then learned, and carried to another number of workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.belief import (
    FAILURES_PER_1000_WORKER_DAYS,
    FailureBelief,
    ScalePrior,
    Seen,
)
from ray_ckpt.policy.failures import OTHER_SHARE, PRIOR_SHARES, FailureModel
from ray_ckpt.policy.gamma import gamma_cdf, gamma_quantile
from ray_ckpt.policy.restart import restart_at

HOUR, DAY = 3600.0, 86400.0
PRIOR = ScalePrior(job_mtbf_s=DAY)

# Unexpected interruptions of Llama 3 405B in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5).
LLAMA_3 = {
    "worker_error": {
        "Faulty GPU": 148,
        "GPU HBM3 memory": 72,
        "GPU SRAM memory": 19,
        "GPU system processor": 17,
        "Silent data corruption": 6,
        "GPU thermal interface and sensor": 6,
        "Software bug": 54,
        "Dependency": 2,
    },
    "node_loss": {
        "Network switch/cable": 35,
        "Host maintenance": 32,
        "NIC": 7,
        "Power supply": 3,
        "Server chassis": 2,
        "IO expansion board": 2,
        "CPU": 2,
        "System memory": 2,
    },
    "hang": {"NCCL watchdog timeouts": 7},
    "storage": {"SSD": 3},
}


def seen(world_size: int, exposure_s: float, **failures: int) -> Seen:
    return Seen(world_size=world_size, exposure_s=exposure_s, failures=failures)


# ---- the gamma distribution -----------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.floats(1e-3, 800))
def test_for_whole_shapes_it_is_the_poisson_distribution(shape, x):
    logs = [k * math.log(x) - x - math.lgamma(k + 1) for k in range(shape)]
    assert gamma_cdf(shape, x) == pytest.approx(1 - math.fsum(map(math.exp, logs)), abs=1e-11)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 30))
def test_for_shape_a_half_it_is_the_error_function(x):
    assert gamma_cdf(0.5, x) == pytest.approx(math.erf(math.sqrt(x)), abs=1e-13)


@pytest.mark.parametrize(
    ("degrees", "probability", "value"),
    [
        (1, 0.95, 3.841458820694124),
        (1, 0.05, 0.003932140000019522),
        (2, 0.5, 2 * math.log(2)),
        (10, 0.05, 3.940299136076),
        (10, 0.95, 18.307038053275),
        (100, 0.95, 124.342113404),
    ],
)
def test_the_quantiles_are_those_of_tables_of_chi_squared(degrees, probability, value):
    assert 2 * gamma_quantile(degrees / 2, probability) == pytest.approx(value, rel=1e-10)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.02, 1e5), st.floats(0.001, 0.999))
def test_a_quantile_is_the_inverse(shape, probability):
    assert gamma_cdf(shape, gamma_quantile(shape, probability)) == pytest.approx(
        probability, abs=1e-9
    )


def test_the_ends_of_the_gamma_distribution():
    assert (gamma_cdf(2, 0), gamma_cdf(2, -1), gamma_cdf(2, math.inf)) == (0, 0, 1)
    assert gamma_quantile(1e-3, 0.05) == 0  # below the smallest number there is
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="shape must be more than 0"):
            gamma_cdf(wrong, 1)
    for wrong in (0, 1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            gamma_quantile(1, wrong)


# ---- the prior ------------------------------------------------------------------------------------


def test_what_failed_in_llama_3_is_where_the_shares_come_from():
    by_kind = {kind: sum(causes.values()) for kind, causes in LLAMA_3.items()}
    assert sum(by_kind.values()) == 419
    total = sum(by_kind.values()) + by_kind["hang"]  # a cluster that is lost: as rare as a hang
    for kind, count in by_kind.items():
        assert PRIOR_SHARES[kind] == pytest.approx(count / total)
    assert sum(PRIOR_SHARES.values()) == pytest.approx(1)


@settings(max_examples=40, deadline=None)
@given(st.floats(10, 1e8), st.floats(0, 100), st.floats(0.1, 50), st.integers(1, 20_000))
def test_the_belief_starts_at_the_prior(mtbf, per_1000_days, weight, workers):
    prior = ScalePrior(job_mtbf_s=mtbf, per_1000_worker_days=per_1000_days, weight=weight)
    stated = 1 / mtbf + workers * per_1000_days / (1000 * DAY)
    belief = FailureModel(prior).at(workers)
    assert belief.mtbf_s == pytest.approx(1 / stated)
    assert belief.low_s < belief.mtbf_s
    assert belief.failures == 0
    assert belief.describe().startswith("prior, no failure yet, 90 %: ")


def test_the_prior_of_the_workers_is_the_rate_of_kokolis_2024():
    # 6.50 per 1,000 node-days of 8 GPUs: 28.8 h at 1,024 GPUs if nothing failed but machines.
    machines = ScalePrior(job_mtbf_s=math.inf)
    assert machines.per_1000_worker_days == FAILURES_PER_1000_WORKER_DAYS
    assert FailureModel(machines).at(1024).mtbf_s / HOUR == pytest.approx(28.8, abs=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"job_mtbf_s": 0},
        {"job_mtbf_s": math.nan},
        {"weight": -1},
        {"weight": math.nan},
        {"weight": math.inf},
        {"per_1000_worker_days": -1},
        {"per_1000_worker_days": math.nan},
        {"job_mtbf_s": math.inf, "per_1000_worker_days": 0},
    ],
)
def test_an_impossible_prior_is_refused(wrong):
    with pytest.raises(ValueError, match=r"policy\.prior-"):
        ScalePrior(**{"job_mtbf_s": 10.0, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [{"world_size": 0}, {"exposure_s": -1}, {"exposure_s": math.nan}, {"failures": {"x": -1}}],
)
def test_impossible_observations_are_refused(wrong):
    with pytest.raises(ValueError, match=r"exposure|negative"):
        Seen(**{"world_size": 1, "exposure_s": 1.0, "failures": {}, **wrong})


# ---- learning -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1e7), st.integers(0, 40)), max_size=4),
    st.integers(1, 1000),
    st.sampled_from([*PRIOR_SHARES, "something new"]),
)
def test_a_failure_lowers_the_mtbf_at_its_size_and_quiet_time_raises_it(rows, workers, kind):
    past = [seen(w, s, **{kind: n}) for w, s, n in rows]
    now = FailureModel(PRIOR, past).at(workers).mtbf_s
    # Only at its own size: one more of a small job speaks for a part that comes with the job, and so
    # against the part of the machines, which is what counts in a large one.
    assert FailureModel(PRIOR, [*past, seen(workers, 0.0, **{kind: 1})]).at(workers).mtbf_s < now
    calm = FailureModel(PRIOR, [*past, seen(workers, DAY)]).at(workers).mtbf_s
    assert calm > now


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 600), st.floats(1e4, 1e6), st.integers(0, 12)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 600),
)
def test_the_mixture_is_the_posterior_that_a_grid_gives(rows, workers):
    prior = ScalePrior(job_mtbf_s=DAY, per_1000_worker_days=100.0, weight=5.0)
    past = [seen(w, s, worker_error=n) for w, s, n in rows]
    model = FailureModel(prior, past)
    # The same, by brute force: log posterior over a and b.
    shape = prior.weight * PRIOR_SHARES["worker_error"]
    job_s, worker_s = prior.weight * DAY, prior.weight * 1000 * DAY / 100.0
    total_s, total_ws = (sum(f(w) * s for w, s, _ in rows) for f in (lambda w: 1, lambda w: w))
    failures = sum(n for *_, n in rows)
    grid = (np.arange(700) + 0.5) / 700
    a = grid * (shape + failures + 9 * math.sqrt(shape + failures)) / (job_s + total_s)
    b = grid * (shape + failures + 9 * math.sqrt(shape + failures)) / (worker_s + total_ws)
    log = (shape - 1) * np.log(a)[:, None] - (job_s + total_s) * a[:, None]
    log = log + ((shape - 1) * np.log(b) - (worker_s + total_ws) * b)[None, :]
    for w, _, n in rows:
        log += n * np.log(a[:, None] + b[None, :] * w)
    weight = np.exp(log - log.max())
    rate = a[:, None] + b[None, :] * workers
    assert model.rates(workers)["worker_error"] == pytest.approx(
        float((weight * rate).sum() / weight.sum()), rel=2e-3
    )


def test_the_interval_holds_the_true_rate_as_often_as_it_says():
    rng = np.random.default_rng(5)
    inside, rounds = 0, 600
    for _ in range(rounds):
        # Truth from the prior of each kind; then a run at 512 workers, at 64, and the question for 128.
        rates = {
            kind: (
                rng.gamma(share) / DAY,
                rng.gamma(share) * FAILURES_PER_1000_WORKER_DAYS / (1000 * DAY),
            )
            for kind, share in PRIOR_SHARES.items()
        }
        past = []
        for workers in (512, 64):
            days = rng.uniform(0, 20) * DAY
            counts = {k: int(rng.poisson((a + b * workers) * days)) for k, (a, b) in rates.items()}
            past.append(seen(workers, days, **counts))
        belief = FailureModel(PRIOR, past).at(128)
        truth = 1 / sum(a + 128 * b for a, b in rates.values())
        inside += belief.low_s <= truth <= belief.high_s
    # Three standard deviations of the count are 3.7 %; the gamma of two moments may cost a few more.
    assert inside / rounds == pytest.approx(0.9, abs=0.05)


def test_the_ends_of_the_interval_are_those_of_the_mixture():
    rng = np.random.default_rng(2)
    past = [seen(512, 30 * DAY, worker_error=20), seen(64, 10 * DAY, worker_error=4)]
    model = FailureModel(PRIOR, past)
    part = model._parts["worker_error"]
    draws = 200_000
    k = rng.choice(len(part._weights), size=draws, p=part._weights)
    rates = rng.gamma(part._shape + k) / part._job_s
    rates += 100 * rng.gamma(part._shape + part.failures - k) / part._worker_s
    belief = model.at(100, kinds=["worker_error"])
    low, high = np.quantile(1 / rates, [0.05, 0.95])
    assert belief.low_s == pytest.approx(low, rel=0.1)
    assert belief.high_s == pytest.approx(high, rel=0.15)
    assert belief.mtbf_s == pytest.approx(1 / rates.mean(), rel=0.01)


def test_both_parts_are_learned_where_small_jobs_fail_more_than_their_machines():
    # 7.9 h at 1,024 GPUs where 1/N scaling gives 28.8 h; what is above it comes with the job.
    job, machine = 1 / (7.9 * HOUR) - 1 / (28.8 * HOUR), 1 / (28.8 * HOUR) / 1024
    sizes = (256, 1024, 8192)
    past = [seen(size, 400 / (job + machine * size), worker_error=400) for size in sizes]
    model = FailureModel(PRIOR, past)
    for size in (*sizes, 64, 16_384):
        truth = 1 / (job + machine * size)
        belief = model.at(size)
        assert belief.mtbf_s == pytest.approx(truth, rel=0.1)
        assert belief.low_s < truth < belief.high_s
    assert model.at(1024).mtbf_s / HOUR == pytest.approx(7.9, rel=0.05)
    # A model that scales by 1/N alone is three times too confident of a small job.
    assert (
        FailureModel(ScalePrior(job_mtbf_s=math.inf), past).at(64).mtbf_s > 3 * model.at(64).mtbf_s
    )


def test_a_run_that_moves_to_fewer_workers_knows_its_rate_at_once():
    machine = FAILURES_PER_1000_WORKER_DAYS * 4 / (1000 * DAY)
    past = [seen(512, 60 / (machine * 512), worker_error=60)]
    model = FailureModel(ScalePrior(job_mtbf_s=100 * DAY, per_1000_worker_days=1.0), past)
    large, small = model.at(512), model.at(64)
    assert large.mtbf_s == pytest.approx(1 / (machine * 512), rel=0.15)
    assert 3 * large.mtbf_s < small.mtbf_s < 8.5 * large.mtbf_s
    # What is not known is said: the part that came with the job may be none or much.
    assert small.high_s / small.low_s > large.high_s / large.low_s


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.integers(1, 1000))
def test_kinds_add_up_and_can_be_asked_for_alone(counts, workers):
    kinds = ("worker_error", "node_loss", "lost")
    model = FailureModel(PRIOR, [seen(32, DAY, **dict(zip(kinds, counts, strict=True)))])
    rates = model.rates(workers)
    whole = model.at(workers)
    assert sum(rates.values()) == pytest.approx(1 / whole.mtbf_s)
    assert whole.failures == sum(counts)
    for kind, count in zip(kinds, counts, strict=True):
        alone = model.at(workers, kinds=[kind])
        assert alone.failures == count
        assert 1 / alone.mtbf_s == pytest.approx(rates[kind])
        assert alone.mtbf_s > whole.mtbf_s
    with pytest.raises(ValueError, match="no kind of failure named"):
        model.at(workers, kinds=["nonsense"])


def test_a_kind_that_nobody_thought_of_counts():
    model = FailureModel(PRIOR, [seen(4, DAY, flood=3)])
    assert model.rates(4)["flood"] > 1 / DAY
    assert "flood" not in PRIOR_SHARES
    assert min(PRIOR_SHARES.values()) == OTHER_SHARE


def test_a_prior_of_one_part_gives_all_failures_to_it():
    job = ScalePrior(job_mtbf_s=1000.0, per_1000_worker_days=0, weight=3)
    past = [seen(8, 600.0, worker_error=3)]
    # A prior worth n failures weighs as much as n failures that came at its rate.
    for size in (1, 8, 1000):
        assert FailureModel(job, past).at(size).mtbf_s == pytest.approx((3 * 1000 + 600) / 6)
    machines = ScalePrior(job_mtbf_s=math.inf, per_1000_worker_days=1000.0)
    rates = [1 / FailureModel(machines, past).at(size).mtbf_s for size in (1, 8)]
    assert rates[1] == pytest.approx(8 * rates[0])


def test_thousands_of_failures_are_no_trouble():
    belief = FailureModel(PRIOR, [seen(w, 1e7, worker_error=700) for w in (8, 64, 512)]).at(64)
    assert belief.failures == 2100
    assert belief.low_s < belief.mtbf_s < belief.high_s < math.inf


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((3.1, 1.6, 7.2, 7), "7 failures seen, 90 %: 1.6 to 7.2 h"),
        ((2.0, 0.6, 9.4, 1), "1 failure seen, 90 %: 36 min to 9.4 h"),
        ((24.0, 8.0, 24 * 19.0, 0), "prior, no failure yet, 90 %: 8 h to 19 d"),
        ((24.0, 8.0, math.inf, 0), "prior, no failure yet, 90 %: more than 8 h"),
    ],
)
def test_a_belief_says_where_it_comes_from_and_how_sure_it_is(values: Any, words: str):
    mtbf, low, high, failures = values
    belief = FailureBelief(
        mtbf_s=mtbf * HOUR, low_s=low * HOUR, high_s=high * HOUR, failures=failures
    )
    assert belief.describe() == words


@pytest.mark.parametrize(
    "wrong", [{"mtbf_s": 0}, {"mtbf_s": math.nan}, {"low_s": 9}, {"failures": -1}]
)
def test_an_impossible_belief_is_refused(wrong):
    with pytest.raises(ValueError, match="need mtbf_s > 0"):
        FailureBelief(**{"mtbf_s": 5.0, "low_s": 1.0, "high_s": 8.0, **wrong})


# ---- restarts -------------------------------------------------------------------------------------

# Cold recovery of a whole job (arXiv 2602.00277): GPUs, seconds.
COLD_RECOVERY = [(16_384, 200.0), (22_528, 300.0), (65_536, 600.0), (98_304, 900.0)]


def test_published_recoveries_lie_on_the_line_that_is_fitted():
    for size, seconds in COLD_RECOVERY:
        assert restart_at(size, COLD_RECOVERY) == pytest.approx(seconds, rel=0.11)
    # What one size would not have told: the largest from the two smallest and the next.
    assert restart_at(98_304, COLD_RECOVERY[:3]) == pytest.approx(900, rel=0.05)
    assert restart_at(98_304, COLD_RECOVERY[:1]) == 200


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.floats(0, 1e4)), min_size=1, max_size=6),
    st.integers(1, 10**5),
    st.integers(1, 10**5),
)
def test_a_restart_is_never_negative_and_never_quicker_with_more_workers(rows, one, other):
    few, many = sorted((one, other))
    assert 0 <= restart_at(few, rows) <= restart_at(many, rows) * (1 + 1e-9) + 1e-9
    assert restart_at(one, []) is None
    assert restart_at(one, rows[:1]) == pytest.approx(rows[0][1])


def test_an_impossible_restart_is_refused():
    for wrong in ((0, [(1, 1.0)]), (1, [(0, 1.0)]), (1, [(1, -1.0)])):
        with pytest.raises(ValueError, match="1 worker or more"):
            restart_at(*wrong)
