"""A node that is slow at several saves in a row is a straggler, whoever is on it, until it is not for as many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_tracker_core import OPTIONS, Run

from ray_ckpt.config import ElasticConfig
from ray_ckpt.elastic import passclock
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.stragglers import StragglerRule, slowest, streaks
from ray_ckpt.view.story import tell

RULE = StragglerRule(factor=1.5, saves=3)


@given(st.lists(st.floats(0.9, 1.1), min_size=2, max_size=8), st.floats(2.0, 9.0), st.data())
def test_one_slow_rank_is_told_with_its_node_and_factor(
    times_s: list[float], slow: float, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(times_s) - 1))
    times_s[rank] = slow
    found = slowest([(f"node-{r}", s) for r, s in enumerate(times_s)])
    over = {node for node, each in found.items() if each.factor >= RULE.factor}
    assert over == {f"node-{rank}"}
    assert found[f"node-{rank}"].factor == pytest.approx(slow, rel=0.12)


def test_a_node_is_as_slow_as_its_slowest_rank_and_what_is_not_known_is_left_out() -> None:
    found = slowest([("a", 1.0), ("a", 3.0), ("b", 1.0), ("c", None)])
    assert found["a"].rank == 1
    assert "c" not in found
    assert slowest([("a", 1.0)]) == {}
    assert slowest([("a", 1.0), ("b", None)]) == {}


@given(st.lists(st.booleans(), max_size=12))
def test_a_streak_counts_what_came_last(history: list[bool]) -> None:
    counts: dict[str, int] = {}
    for is_slow in history:
        counts = streaks(counts, slowest([("a", 2.0 if is_slow else 1.0), ("b", 1.0)]), RULE)
    run = 0
    for is_slow in reversed(history):
        if is_slow != history[-1]:
            break
        run += 1
    assert counts.get("a", 0) == (run if history and history[-1] else -run)


def run_of(folder: Path) -> Run:
    run = Run(folder, replace(OPTIONS, stragglers=RULE))
    run.begin()
    return run


def save(run: Run, **paces: float) -> list[str]:
    """A save; returns what was told of stragglers."""
    before = len(run.journal("straggler", "straggler_over"))
    run.train(1)
    run.save(paces=list(paces.items()))
    events = run.journal("straggler", "straggler_over")[before:]
    return [f"{event['event']} {event['node']} rank {event['rank']}" for event in events]


def test_a_straggler_is_told_once_and_its_end_once(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert [save(run, a=1.0, b=2.0, c=1.0) for _ in range(4)] == [
        [],
        [],
        ["straggler b rank 1"],
        [],
    ]
    assert run.core.memory.stragglers == {"b": 2.0}
    assert [save(run, a=1.0, b=1.0, c=1.0) for _ in range(4)] == [
        [],
        [],
        ["straggler_over b rank 1"],
        [],
    ]
    assert run.core.memory.stragglers == {}
    lines = [tell(event) for event in run.journal("straggler", "straggler_over")]
    assert "rank 1 on node b takes 2.00 times as long" in str(lines[0])
    assert "node b is no straggler any more" in str(lines[1])


def test_one_fast_save_in_between_begins_the_count_anew(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for b in (2.0, 2.0, 1.0, 2.0, 2.0):
        assert save(run, a=1.0, b=b) == []
    assert save(run, a=1.0, b=2.0) == ["straggler b rank 1"]


def test_the_count_goes_by_node_when_the_group_changes(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    save(run, a=1.0, b=2.0)
    run.core.interruption("resize", "more room")
    run.begin(3)
    save(run, b=2.0, c=1.0, a=1.0)
    run.core.interruption("resize", "less room")
    run.begin(2)
    assert save(run, a=1.0, c=1.0) == []
    run.core.interruption("resize", "more room")
    run.begin(2)
    assert save(run, c=1.0, b=2.0) == ["straggler b rank 1"]


def test_a_tracker_that_starts_again_knows_who_was_told(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for _ in range(3):
        save(run, a=1.0, b=2.0)
    run.open()
    assert all(save(run, a=1.0, b=2.0) == [] for _ in range(4))
    assert [save(run, a=1.0, b=1.0) for _ in range(3)][-1] == ["straggler_over b rank 1"]


def test_workers_without_nodes_are_told_by_rank_and_a_factor_of_0_looks_at_nothing(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path)
    for _ in range(3):
        run.train(1)
        run.save(paces=[("", 1.0), ("", 5.0)])
    (event,) = run.journal("straggler")
    assert event["node"] == "rank 1"
    off = Run(tmp_path / "off", replace(OPTIONS, stragglers=StragglerRule(factor=0)))
    off.begin()
    assert not any(save(off, a=1.0, b=9.0) for _ in range(5))


def test_wrong_options_are_refused() -> None:
    for wrong in (
        {"straggler_factor": 1.0},
        {"straggler_saves": 0},
        {"hang_factor": 0.5},
        {"hang_min_s": 0},
    ):
        with pytest.raises(ConfigError, match=r"--elastic\."):
            ElasticConfig(**wrong)  # type: ignore[arg-type]
    assert not ElasticConfig(hang_factor=0).hang_rule().watches


def test_the_clock_of_passes_measures_the_first_forward_pass_of_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(passclock.time, "perf_counter", lambda: now[0])
    clock = passclock.PassClock(torch.device("cpu"))
    assert clock.take() is None
    for pass_s, counts in ((9.0, False), (2.0, True), (4.0, True)):
        clock.begin()
        now[0] += pass_s
        clock.end()
        now[0] += 50.0  # the rest of the step, other passes
        clock.end()
        clock.settle(counts=counts)
    assert clock.take() == 3.0
    assert clock.take() is None
    clock.settle()
    assert clock.take() is None
