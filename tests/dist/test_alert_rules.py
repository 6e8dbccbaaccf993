"""The alerts, tried by Prometheus's own `promtool` on scripted runs: each fires when it should, and no other does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from board import BOARD, GRAFANA, expressions

PROMTOOL = shutil.which("promtool")
RULES = GRAFANA / "alerts.yaml"

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        PROMTOOL is None, reason="there is no promtool here (Debian: apt-get install prometheus)"
    ),
]

STEP_S, POINTS = 30, 240  # two hours
HEALTHY: dict[str, str] = {
    "up": "1+0x240",
    "started_seconds": "1000+0x240",
    "attempt_open": "1+0x240",
    "step_age_seconds": "2+0x240",
    "step_seconds": "1+0x240",
    'copy_age_seconds{tier="durable"}': "0+30x9 " * 24,
    'copy_age_seconds{tier="any"}': "0+30x9 " * 24,
    'interval_seconds{tier="durable"}': "300+0x240",
    "failed_saves_in_a_row": "0+0x240",
    "fruitless_attempts": "0+0x240",
    "last_drill_ok": "1+0x240",
    "guard_findings_total": "0+0x240",
    'nonfinite_total{action="stop"}': "0+0x240",
    'quarantined_total{why="damaged"}': "0+0x240",
    'failures_total{stage="copy"}': "0+0x240",
    'interruptions_total{kind="node_loss"}': "0+0x240",
    'interruptions_total{kind="resize"}': "0+0x240",
    'time_seconds{bucket="useful"}': "0+28x240",
    'time_seconds{bucket="stall"}': "0+2x240",
}
AT_HALF = "0+0x59 1+0x180"  # from minute 30 on
GONE = "_x239"  # a series that is not there

# What is different in a run, and which alerts fire at which minutes.
Story = tuple[dict[str, str], dict[int, set[str]]]
STORIES: dict[str, Story] = {
    "all is well": ({}, {1: set(), 30: set(), 61: set(), 119: set()}),
    "nothing gets to the durable tier": (
        {'copy_age_seconds{tier="durable"}': "0+30x240"},
        {15: set(), 20: {"NoDurableCommit"}, 100: {"NoDurableCommit"}},
    ),
    "no save ever succeeds": (
        {'copy_age_seconds{tier="durable"}': GONE, 'copy_age_seconds{tier="any"}': GONE},
        {50: set(), 65: {"NoCommit"}},
    ),
    "a storage is full for an hour": (
        {"failed_saves_in_a_row": "0+0x59 2+0x20 3+0x100 0+0x60"},
        {35: set(), 42: {"SavesFail"}, 110: set()},
    ),
    "the first finding of the guard": (
        {"guard_findings_total": AT_HALF},
        {29: set(), 31: {"GuardFinding"}, 50: set()},
    ),
    "the loss is not finite": ({'nonfinite_total{action="stop"}': AT_HALF}, {31: {"GuardFinding"}}),
    "a checkpoint went bad": (
        {'quarantined_total{why="damaged"}': AT_HALF},
        {31: {"CopyDamaged"}, 50: set()},
    ),
    "a copy on a node went bad": ({'failures_total{stage="copy"}': AT_HALF}, {31: {"CopyDamaged"}}),
    "a drill fails, and the next one does not": (
        {"last_drill_ok": "1+0x59 0+0x59 1+0x120"},
        {29: set(), 31: {"DrillFailed"}, 59: {"DrillFailed"}, 62: set()},
    ),
    "two attempts without a step": (
        {"fruitless_attempts": "0+0x59 1+0x10 2+0x170"},
        {34: set(), 37: {"CrashLoop"}},
    ),
    "three failures in half an hour": (
        {'interruptions_total{kind="node_loss"}': "0+0x59 1+0x10 2+0x10 3+0x160"},
        {40: set(), 43: {"CrashLoop"}, 90: set()},
    ),
    "three resizes in half an hour": (
        {'interruptions_total{kind="resize"}': "0+0x59 1+0x10 2+0x10 3+0x160"},
        {43: set()},
    ),
    "workers hang": (
        {"step_age_seconds": "0+0x59 0+30x180"},
        {38: set(), 48: {"NoSteps"}},
    ),
    "no step ever": (
        {"step_age_seconds": "0+30x240", "step_seconds": GONE},
        {9: set(), 20: {"NoSteps"}},
    ),
    "a third of the time is lost": (
        {'time_seconds{bucket="useful"}': "0+20x240", 'time_seconds{bucket="stall"}': "0+10x240"},
        {60: set(), 95: {"GoodputLow"}},
    ),
    "useful steps turn out to be rework": (
        {'time_seconds{bucket="useful"}': "0+28x100 2000+28x139"},
        {45: set(), 60: set()},
    ),
}


def series(told: dict[str, str], worker: str = "a") -> list[dict[str, str]]:
    """Series of the run `demo`, as one tracker tells them."""
    found = []
    for name, values in told.items():
        metric, _, labels = name.partition("{")
        more = f", {labels.removesuffix('}')}" if labels else ""
        full = f'ray_ckpt_{metric}{{ray_train_run_name="demo", WorkerId="{worker}"{more}}}'
        found.append({"series": full, "values": values})
    return found


def ended(worker: str, values: str, how: str = "finished", run: str = "demo") -> dict[str, str]:
    labels = f'ray_train_run_name="{run}", WorkerId="{worker}", how="{how}"'
    return {"series": f"ray_ckpt_ended_total{{{labels}}}", "values": values}


def story(inputs: list[dict[str, str]], expected: dict[int, set[str]]) -> dict[str, Any]:
    return {
        "interval": f"{STEP_S}s",
        "input_series": inputs,
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="RayCkpt{name}"}}', "value": 1}
                    for name in sorted(names)
                ],
            }
            for minute, names in expected.items()
        ],
    }


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def tried(tmp_path: Path, *stories: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    document = {"rule_files": [str(RULES)], "evaluation_interval": f"{STEP_S}s", "tests": stories}
    path = tmp_path / "stories.yaml"
    path.write_text(json.dumps(document))  # which is YAML too
    return promtool("test", "rules", str(path))


def passed(tmp_path: Path, *stories: dict[str, Any]) -> None:
    done = tried(tmp_path, *stories)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules() -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_no_other_does(tmp_path: Path) -> None:
    passed(
        tmp_path,
        *(story(series(HEALTHY | changes), expected) for changes, expected in STORIES.values()),
    )
    told = {
        name for _, expected in STORIES.values() for names in expected.values() for name in names
    }
    names = set(re.findall(r"alert: RayCkpt(\w+)", RULES.read_text()))
    assert told == names - {"RunGone"}, "an alert without a story"


def test_a_story_that_is_wrong_would_be_told(tmp_path: Path) -> None:
    done = tried(tmp_path, story(series(HEALTHY), {30: {"NoSteps"}}))
    assert done.returncode != 0


def gone(
    points: int, begun: int = 0, worker: str = "a", changes: dict[str, str] | None = None
) -> list[dict[str, str]]:
    """A tracker of a healthy run that is there for so many points from one on, and then no more."""
    told = {}
    all_told = HEALTHY | {"started_seconds": f"{1000 + begun}+0x240"} | (changes or {})
    for name, values in all_told.items():
        saw = "copy_age" in name
        there = "0+30x9 " * (points // 10) if saw else values.replace("240", str(points - 1))
        told[name] = f"{f'_x{begun - 1}' if begun else ''} {there} stale"
    return series(told, worker)


def test_a_new_tracker_of_a_run_with_a_past_alerts_nobody(tmp_path: Path) -> None:
    past = {
        "guard_findings_total": "4+0x240",
        'quarantined_total{why="damaged"}': "2+0x240",
        'interruptions_total{kind="node_loss"}': "9+0x240",
    }
    since = {name: f"_x58 {values}" for name, values in (HEALTHY | past).items()}
    both = [*gone(60, changes=past), *series(since, worker="b")]
    passed(tmp_path, story(both, {28: set(), 30: set(), 32: set(), 45: set(), 100: set()}))


def test_a_run_that_is_gone_is_told_unless_it_said_so(tmp_path: Path) -> None:
    at_30m = gone(60)
    passed(
        tmp_path,
        story(at_30m, {29: set(), 34: {"RunGone"}, 80: {"RunGone"}, 100: set()}),
        story([*at_30m, ended("a", "_x58 1+0x180")], {31: set(), 34: set(), 60: set()}),
        story([*at_30m, ended("a", "_x58 1+0x180", how="stopped")], {34: set()}),
        story([*at_30m, ended("a", "_x58 1+0x180", how="failed")], {34: {"RunGone"}}),
        story([*at_30m, ended("a", "_x58 1 stale")], {34: set(), 80: set()}),  # with its cluster
        story([*at_30m, ended("b", "_x58 1+0x180", run="other")], {34: {"RunGone"}}),
        # The job before has finished, and this one is gone; or its tracker died, and this one has finished.
        story([*gone(20, worker="old"), ended("old", "_x18 1+0x220"), *gone(30, begun=30)],
              {12: set(), 25: set(), 34: {"RunGone"}}),
        story([*gone(20, worker="old"), *gone(40, begun=20), ended("a", "_x58 1+0x180")],
              {12: set(), 25: set(), 34: set()}),
    )  # fmt: skip


def test_prometheus_understands_every_query_of_the_board(tmp_path: Path) -> None:
    rules = [
        {
            "record": f"panel:{number}",
            "expr": re.sub(r"\$window", "1h", expr).replace("$run", "demo"),
        }
        for number, (where, expr) in enumerate(expressions())
        if not where.startswith("alert")
    ]
    assert len(rules) > len(BOARD["panels"])
    path = tmp_path / "board.yaml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
