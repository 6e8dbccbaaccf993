"""`ray-ckpt plan`: published figures, the split of the waste, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt import cli
from ray_ckpt.policy.interval import waste
from ray_ckpt.policy.plan import Costs, Plan, mtbf_of

SEED = ["plan", "--mtbf", "186m", "--stall", "15s,1m,5m", "--restart", "10m,2m"]


def call(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main([*argv])
    out, err = capsys.readouterr()
    return code, out, err


def rows(capsys, *argv: str) -> dict[tuple[float, float], dict]:
    code, out, _ = call(capsys, *argv, "--json")
    assert code == 0
    return {(row["stall_s"], row["restart_s"]): row for row in json.loads(out)}


def test_the_questions_of_llama_3_are_answered(capsys):
    found = rows(capsys, *SEED)
    assert len(found) == 6
    minute = found[60, 600]
    assert minute["interval_s"] == pytest.approx(19.3 * 60, rel=0.01)
    assert minute["interval_s"] == pytest.approx(minute["exact_s"], rel=0.05)
    assert minute["daly_s"] == pytest.approx(minute["exact_s"], rel=0.01)
    # At Young's interval saves and rework cost the same, and an hourly save does far more again.
    assert minute["waste"]["save"] == pytest.approx(minute["waste"]["rework"])
    assert minute["waste"]["restart"] == pytest.approx(600 / (186 * 60))
    assert minute["naive"]["interval_s"] == 3600
    assert minute["naive"]["waste"]["total"] > 1.4 * minute["waste"]["total"]
    quarter = found[15, 600]
    assert quarter["interval_s"] == pytest.approx(minute["interval_s"] / 2)
    assert quarter["waste"]["save"] == pytest.approx(minute["waste"]["save"] / 2)
    assert found[60, 120]["waste"]["restart"] == pytest.approx(minute["waste"]["restart"] / 5)
    assert found[60, 120]["interval_s"] == minute["interval_s"]  # a restart moves no interval


def test_people_see_all_combinations_and_what_helps_most(capsys):
    code, out, _ = call(capsys, *SEED)
    lines = out.splitlines()
    table = [line for line in lines if "%" in line]
    assert code == 0
    assert len(table) == 6
    assert "19.3 min" in table[2]
    assert table[0].split()[-3] == "restart"  # a cheap save and a restart of ten minutes
    assert table[5].split()[-3] == "stall"


@settings(max_examples=40)
@given(
    mtbf=st.floats(60, 1e7),
    stall=st.floats(0.01, 600),
    restart=st.floats(0, 3600),
    upload=st.floats(0, 3600),
    naive=st.floats(10, 1e5),
)
def test_the_parts_sum_to_the_published_formula_and_young_is_best(
    mtbf, stall, restart, upload, naive
):
    plan = Plan(
        costs=Costs(mtbf_s=mtbf, stall_s=stall, restart_s=restart, upload_s=upload), naive_s=naive
    )
    for interval, found in ((plan.costs.interval_s, plan.waste), (naive, plan.naive)):
        assert found.total == pytest.approx(waste(interval, stall, mtbf, restart, upload=upload))
    assert plan.waste.total <= plan.naive.total * (1 + 1e-9)
    assert all(saved >= -1e-12 for saved in plan.halved().values())
    assert plan.halved()["restart"] == pytest.approx(restart / 2 / mtbf, abs=1e-9)
    assert 0 <= plan.goodput(plan.exact_s) <= 1
    assert plan.goodput(plan.exact_s) >= plan.goodput(naive) - 1e-9


def test_workers_and_their_rate_give_the_mtbf(capsys):
    # Kokolis et al. 2024: 12,000 GPUs are 1,500 nodes at 6.5 failures per 1,000 node-days.
    assert mtbf_of(1500, 6.5) == pytest.approx(1000 / (1500 * 6.5) * 86400)
    argv = ["plan", "--workers", "1500", "--rate-per-1000-node-days", "6.5"]
    found = rows(capsys, *argv, "--stall", "10s", "--restart", "5m")
    assert found[10, 300]["mtbf_s"] == pytest.approx(8861.5, rel=1e-4)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--mtbf", "186m", "--stall", "1 week", "--restart", "1m"], "--stall"),
        (["--mtbf", "186m", "--stall", "0s", "--restart", "1m"], "stall must be more than 0"),
        (["--mtbf", "0", "--stall", "1s", "--restart", "1m"], "mtbf"),
        (["--mtbf", "1h", "--stall", "1s", "--restart", "1m", "--naive", "0"], "naive"),
        (["--mtbf", "1h", "--stall", "1s", "--restart", "1m", "--naive", "1m,2m"], "--naive"),
        (["--stall", "1s", "--restart", "1m"], "--mtbf"),
        (["--workers", "5", "--stall", "1s", "--restart", "1m"], "--rate-per-1000-node-days"),
        (["--mtbf", "1h", "--workers", "5", "--stall", "1s", "--restart", "1m"], "either"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(capsys, argv, named):
    code, _, err = call(capsys, "plan", *argv)
    assert code == 2
    assert named in err
