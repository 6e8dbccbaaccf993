"""A short soak with a fixed seed: a node dies, the tracker dies, a node joins, the job is stopped and goes on.

The half hour is `python jobs/soak.py`. Same batch, same order, every sample once, nothing left behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from soak import BATCH, SEQ_LEN
from test_main_job import environment

from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view.summary import surviving_steps

pytestmark = pytest.mark.cluster

SOAK = Path(__file__).resolve().parents[2] / "jobs" / "soak.py"
SEED, KINDS = 36, ("kill-node", "add", "kill-tracker")
EVENTS = [("kill-node", "node1"), ("kill-tracker", ""), ("add", "node1")]
INTERVAL_STEPS = 20


def test_three_then_two_then_three_workers_and_the_run_is_whole(tmp_path: Path) -> None:
    words = {
        "seed": SEED,
        "events": len(EVENTS),
        "nodes": 3,
        "patience-s": 150,
        "storage": tmp_path,
        "json": tmp_path / "found",
    }
    args = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    kinds = [word for kind in KINDS for word in ("--kinds", kind)]
    done = subprocess.run(
        [sys.executable, str(SOAK), *args, *kinds],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment(),
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["findings"] == []
    assert [(event["kind"], event["node"]) for event in found["events"]] == EVENTS
    assert 0 < found["goodput"] < 1
    assert "whole" in done.stdout

    run_dir = tmp_path / "soak"
    rows = surviving_steps(run_dir).values()
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    worlds = [line["world_size"] for line in lines]
    assert [w for i, w in enumerate(worlds) if i == 0 or worlds[i - 1] != w] == [3, 2, 3]
    # Of a batch that three workers cannot share equally.
    assert {row["tokens"] for row in rows} == {BATCH * (SEQ_LEN - 1)}
    journal = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    ends = [event for event in journal if event["event"] == "interruption"]
    # The stop may come while the run grows.
    assert [end["kind"] for end in ends] in (
        ["node_loss", "resize"],
        ["node_loss", "resize", "user_stop"],
    )
    assert "node1" in ends[0]["cause"]
    committed = [
        event["step"]
        for event in takewhile(lambda event: event != ends[0], journal)
        if event["event"] == "commit"
    ]
    assert ends[0]["step"] - ends[0]["lost_steps"] == max(committed), (
        "it went back further than it had to"
    )
    # Of the newest two saves one may have been on its way to the storage.
    assert ends[0]["lost_steps"] <= 2 * INTERVAL_STEPS
    assert {end["lost_steps"] for end in ends[1:]} == {0}, "they were planned"
    ledger = read_ledger(run_dir)
    assert ledger is not None
    assert ledger.buckets["unknown"] <= 0.01 * ledger.wall_s, "Ray told how the groups started"
    lost = next(each for each in ledger.restarts if each.kind == "node_loss")
    assert lost.buckets["restart_start_workers"] > 0
