"""Lost nodes, spares, sizes and tiers: the arrays agree with the witness, and what should help helps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.policy.belief import JOB_MTBF_S, ScalePrior, Seen
from ray_ckpt.policy.contenders import Clairvoyant, Fixed, Online, Plans, Policy, Sight
from ray_ckpt.policy.draws import Failures, exponential, weibull
from ray_ckpt.policy.failures import FailureModel
from ray_ckpt.policy.limits import IntervalLimits
from ray_ckpt.policy.replay import Totals, replay
from ray_ckpt.policy.setting import Fleet, Setting, one_tier, shared_out
from ray_ckpt.policy.tiers import TierCost, plan_intervals
from tests.witness import Witness

DAY_S = 86400.0
LIMITS = IntervalLimits(min_s=1.0, max_s=DAY_S)
NAMES = ("memory", "local", "durable")
PARTS = ("useful", "fewer", "save", "rework", "restart", "wait")


def failures(where: Setting, runs: int, seed: int = 7, shape: float = 1.0) -> Failures:
    rng, kinds = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    draw = exponential(where.mtbf_s, rng) if shape == 1 else weibull(where.mtbf_s, shape, rng)
    return Failures(draw, where.shares, runs=runs, rng=kinds)


class ByWorkers:
    """A plan for each size."""

    def __init__(self, plans: dict[int, tuple[float, Sequence[int]]]) -> None:
        self._plans = plans

    def plans(self, sight: Sight) -> Plans:
        found = [self._plans[int(workers)] for workers in sight.workers]
        return Plans(
            unit_s=np.array([unit_s for unit_s, _ in found]),
            times=np.array([times for _, times in found]).T,
        )


@st.composite
def where_and_plans(draw: st.DrawFn) -> tuple[Setting, dict[int, tuple[float, Sequence[int]]]]:
    num = draw(st.integers(1, 3))
    upload = st.one_of(st.just(0.0), st.floats(1, 4000))
    tiers = tuple(
        TierCost(
            name=NAMES[k],
            stall_s=draw(st.floats(0, 40)) if k == 0 else 0.0,
            upload_s=draw(upload),
            restart_s=draw(st.floats(0, 900)),
        )
        for k in range(num)
    )
    nodes = draw(st.integers(1, 6))
    fleet = Fleet(
        nodes=nodes,
        workers_per_node=draw(st.integers(1, 3)),
        spares=draw(st.integers(0, 2)),
        repair_s=draw(st.one_of(st.just(0.0), st.floats(60, 30000))),
        elastic=draw(st.booleans()),
        least_nodes=draw(st.integers(1, nodes)),
    )
    seen = ((4, draw(st.floats(1, 90))), (16, draw(st.floats(90, 900))))
    where = Setting(
        tiers=tiers,
        mtbf_s=draw(st.floats(900, 20000)),
        job_share=draw(st.floats(0, 1)),
        shares={"worker_error": 0.4, "node_loss": 0.4, "lost": 0.2},
        needs={"worker_error": 0, "node_loss": draw(st.integers(0, num - 1))},
        restarts=draw(st.sampled_from([(), (seen,) * num])),
        fleet=fleet,
    )
    plans = {
        n * fleet.workers_per_node: (
            draw(st.floats(20, 2000)),
            [1, *sorted(draw(st.integers(1, 12)) for _ in range(num - 1))],
        )
        for n in range(1, nodes + 1)
    }
    return where, plans


@settings(max_examples=40, deadline=None)
@given(where_and_plans(), st.integers(0, 1000), st.sampled_from([1.0, 0.6]))
def test_the_arrays_agree_with_the_witness_failure_by_failure(
    case: tuple[Setting, dict[int, tuple[float, Sequence[int]]]], seed: int, shape: float
) -> None:
    where, plans = case
    wall_s, runs = 3 * DAY_S, 3
    drawn = failures(where, runs, seed, shape)
    found = replay(ByWorkers(plans), where, drawn, runs=runs, wall_s=wall_s)

    def of_run(run: int) -> Iterator[tuple[float, str]]:
        for number in itertools.count():
            one, here = np.array([number]), np.array([run])
            kind = int(drawn.kinds(one, here)[0])
            yield float(drawn.gaps_s(one, here)[0]), where.kinds[kind]

    for run in range(runs):
        told = Witness(where, plans.__getitem__, of_run(run), wall_s).play()
        for part in PARTS:
            assert getattr(found, f"{part}_s")[run] == pytest.approx(told[part], abs=1e-3), part
        assert found.failures[run] == told["failures"]
        assert found.wall_s[run] == pytest.approx(wall_s)


class Told(Failures):
    """Failures as they are told: gaps and kinds of one run."""

    def __init__(self, gaps_s: Sequence[float], kinds: Sequence[int]) -> None:
        self._gaps_s, self._kinds = np.array(gaps_s)[:, None], np.array(kinds)[:, None]


def test_a_copy_that_lands_while_a_larger_job_is_started_is_usable() -> None:
    fleet = Fleet(nodes=2, repair_s=500.0, elastic=True)
    where = Setting(
        tiers=(
            TierCost(name="memory", stall_s=10.0, upload_s=20.0, restart_s=60.0),
            TierCost(name="durable", stall_s=0.0, upload_s=400.0, restart_s=60.0),
        ),
        mtbf_s=1e4,
        job_share=1.0,
        shares={"node_loss": 0.5, "lost": 0.5},
        needs={"node_loss": 0},
        restarts=(((1, 150.0), (2, 300.0)),) * 2,
        fleet=fleet,
    )
    # A node is lost at 1000 s, half a job goes on at 1150 s and saves from 1350 to 1360 s. Its copy is durable at
    # 1760 s. The node is back at 1500 s; while the whole job is started, all is lost, at 1800 s.
    failures = Told([1000.0, 800.0, 1e9], [0, 1, 1])
    plans = {1: (100.0, [1, 1]), 2: (100.0, [1, 1])}
    found = replay(ByWorkers(plans), where, failures, runs=1, wall_s=1820.0)
    # The save before the first failure was not usable yet: 110 s of steps. After that of 1350 s there were 140 s.
    assert found.rework_s[0] == pytest.approx(110 + 140)
    assert found.useful_s[0] == pytest.approx(800 + 100)
    assert found.fewer_s[0] == pytest.approx(100)


def test_progress_is_looked_at_when_it_should_be() -> None:
    where = Setting(tiers=one_tier(stall_s=10.0), mtbf_s=1e12)
    found = replay(
        Fixed(where, 90.0),
        where,
        failures(where, 2),
        runs=2,
        wall_s=DAY_S,
        at_s=[1000.0, 43200.0, DAY_S],
    )
    # 90 of every 100 s are useful; between two looks of the policy it is taken as even.
    for at, useful_s in zip((1000.0, 43200.0, DAY_S), found.progress_s, strict=True):
        assert useful_s == pytest.approx([0.9 * at] * 2, abs=10)


def play(policy: Policy, where: Setting, runs: int = 100, days: float = 14) -> Totals:
    return replay(policy, where, failures(where, runs), runs=runs, wall_s=days * DAY_S)


SMALL = Fleet(nodes=32, workers_per_node=8, repair_s=4 * 3600.0)


@pytest.mark.parametrize("repair_s", [3600.0, 12 * 3600.0])
def test_going_on_with_fewer_wastes_less_than_waiting_when_a_repair_is_long(
    repair_s: float,
) -> None:
    fleet = replace(SMALL, repair_s=repair_s)
    waits = Setting(
        tiers=one_tier(stall_s=20.0, upload_s=60.0, restart_s=180.0), mtbf_s=4 * 3600.0, fleet=fleet
    )
    elastic = replace(waits, fleet=replace(fleet, elastic=True))
    prior = ScalePrior(job_mtbf_s=DAY_S)
    waiting, going = (
        play(Online(where, prior, LIMITS), where, runs=60).waste.mean()
        for where in (waits, elastic)
    )
    assert going < 0.8 * waiting


def test_enough_spares_are_as_good_as_nodes_that_are_back_at_once() -> None:
    tiers = one_tier(stall_s=20.0, restart_s=180.0)
    no_wait = Setting(tiers=tiers, mtbf_s=4 * 3600.0, fleet=replace(SMALL, repair_s=0.0))
    spares = replace(no_wait, fleet=replace(SMALL, spares=1000))
    one = replace(no_wait, fleet=replace(SMALL, spares=1))
    none = replace(no_wait, fleet=SMALL)
    best, same, better, worst = (
        play(Fixed(where, 900.0), where, runs=60).waste.mean()
        for where in (no_wait, spares, one, none)
    )
    assert same == pytest.approx(best)
    assert best < better < worst


@pytest.mark.parametrize("elastic", [False, True])
def test_more_tiers_waste_no_more_than_the_durable_one_alone(elastic: bool) -> None:
    durable = one_tier(stall_s=10.0, upload_s=300.0, restart_s=400.0)
    fleet = replace(SMALL, repair_s=1800.0, elastic=elastic)
    alone = Setting(tiers=durable, mtbf_s=3 * 3600.0, fleet=fleet)
    memory = TierCost(name="memory", stall_s=10.0, upload_s=5.0, restart_s=300.0)
    local = TierCost(name="local", stall_s=0.0, upload_s=60.0, restart_s=350.0)
    slow = replace(durable[0], stall_s=0.0)
    two = replace(alone, tiers=(memory, slow), needs={"worker_error": 0, "hang": 0, "node_loss": 0})
    three = replace(
        alone,
        tiers=(memory, local, slow),
        needs={"worker_error": 0, "hang": 0, "node_loss": 0, "lost": 1},
    )
    wastes = [play(Clairvoyant(where, LIMITS), where).waste.mean() for where in (three, two, alone)]
    assert wastes[0] <= 1.01 * wastes[1]
    assert wastes[1] < 0.9 * wastes[2]


def test_the_first_decision_after_a_change_of_size_is_for_the_new_size() -> None:
    asked: list[tuple[int, int, float, float, int]] = []

    class Watched(Online):
        def plans(self, sight: Sight) -> Plans:
            found = super().plans(sight)
            asked.append(
                (
                    int(sight.failures[0]),
                    int(sight.workers[0]),
                    float(sight.exposure_s[0]),
                    float(sight.mean_workers[0]),
                    round(found.unit_s[0]),
                )
            )
            return found

    fleet = Fleet(nodes=4, repair_s=6 * 3600.0, elastic=True)
    where = Setting(
        tiers=one_tier(stall_s=20.0, restart_s=60.0), mtbf_s=3 * 3600.0, job_share=0.0, fleet=fleet
    )
    prior = ScalePrior(job_mtbf_s=float("inf"), per_1000_worker_days=2000.0)
    play(Watched(where, prior, LIMITS), where, runs=1)
    changes = [now for before, now in itertools.pairwise(asked) if before[1] != now[1]]
    assert len(changes) > 10
    for count, workers, exposure_s, mean, unit_s in changes:
        counts = shared_out(count, where.shares)
        seen = Seen(world_size=round(mean), exposure_s=exposure_s, failures=counts)
        model = FailureModel(prior, [seen])
        step_s = 4 / workers

        def steps_for(size: int, model: FailureModel = model, step_s: float = step_s) -> int:
            costs = where.costs(model.rates(size), size)
            return plan_intervals(costs, step_s, LIMITS).every_steps[0]

        # Of a believer in failures that come with the workers: fewer of them, longer intervals.
        assert unit_s == pytest.approx(steps_for(workers), rel=0.03)
        if workers <= 2:
            assert abs(unit_s - steps_for(workers)) < abs(unit_s - steps_for(4))


@pytest.mark.parametrize("mtbf_h", [1.0, 6.0, 48.0])
@pytest.mark.parametrize("elastic", [False, True])
def test_what_a_run_decides_is_never_worse_than_saving_hourly(mtbf_h: float, elastic: bool) -> None:
    where = Setting(
        tiers=one_tier(stall_s=30.0, upload_s=60.0, restart_s=300.0),
        mtbf_s=mtbf_h * 3600,
        fleet=replace(SMALL, elastic=elastic),
    )
    prior = ScalePrior(job_mtbf_s=JOB_MTBF_S)
    runs = 20 if mtbf_h == 1 else 400
    found = play(Online(where, prior, LIMITS), where, runs=runs).waste.mean()
    hourly = play(Fixed(where, 3600.0), where, runs=runs).waste.mean()
    # The same failures for both: the difference is that of the policies. For a failure in two days hourly is the best
    # there is, and learning that costs a little: how much it must, tests/dist/test_regret.py says.
    assert found <= 1.02 * hourly
    if mtbf_h <= 6:
        assert found < 0.9 * hourly


def test_all_policies_meet_the_same_failures() -> None:
    where = Setting(tiers=one_tier(stall_s=30.0, restart_s=300.0), mtbf_s=3600.0, fleet=SMALL)
    early, late = failures(where, 4), failures(where, 4)
    numbers = np.arange(200)
    for run in range(4):
        late.kinds(np.array([150]), np.array([run]))
        runs = np.full(200, run)
        assert (early.gaps_s(numbers, runs) == late.gaps_s(numbers, runs)).all()
        assert (early.kinds(numbers, runs) == late.kinds(numbers, runs)).all()
