"""A short soak with a fixed seed; the half hour is `python jobs/soak.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_main_job import environment

pytestmark = [pytest.mark.cluster, pytest.mark.slow]  # two to five minutes on two cores

SOAK = Path(__file__).resolve().parents[2] / "jobs" / "soak.py"
SEED, EVENTS = 1675, 4


def test_a_run_comes_out_of_some_misfortune_whole(tmp_path: Path) -> None:
    words = {
        "seed": SEED,
        "events": EVENTS,
        "nodes": 3,
        "storage": tmp_path,
        "json": tmp_path / "found",
    }
    args = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, str(SOAK), *args],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["findings"] == []
    happened = [(event["kind"], event["node"]) for event in found["events"]]
    assert happened == [
        ("kill-node", "node1"),
        ("kill-controller", ""),
        ("add", "node1"),
        ("kill-tracker", ""),
    ]
    assert {"node_loss", "lost"} <= found["ends"].keys()
    assert 0 < found["goodput"] < 1
    assert "whole" in done.stdout
