"""Tracker, controller, driver and head are killed: the run goes on or is taken up again, and its account is whole."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soak import right_digests, write_data
from soak_events import CONTROLLER, DRIVER, HEAD, TRACKER, WORKER, command_line, find
from soak_judge import judge_history, judge_journal, judge_ledger

from cluster.local import LocalCluster
from ray_ckpt.tracker.journal import read_lines
from ray_ckpt.tracker.recall import read_ledger

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
BATCH = 16
NEVER = 1_000_000
PATIENCE_S = 120.0
OWN_END_S = 90.0


class Watched:
    """One run, by what it leaves on storage."""

    def __init__(self, folder: Path) -> None:
        self.data, self.dir = folder / "data", folder / "runs" / "r"
        write_data(self.data)

    def submit(self, cluster: LocalCluster, steps: int) -> str:
        command = [
            *(sys.executable, "jobs/pretrain.py", "--run", "r", "--storage", str(self.dir.parent)),
            *("--data", str(self.data), "--workers", "1:2", "--exact", "--steps", str(steps)),
            *("--global-batch", str(BATCH), "--micro-batch", "2", "--seq-len", "33"),
            *("--model.dim", "32", "--model.num-layers", "2", "--optim.min-lr-ratio", "1"),
            *("--policy.interval-steps", "10", "--elastic.leash-s", "3"),
        ]
        return cluster.submit(command, working_dir=ROOT)

    def lines(self, name: str = "steps") -> list[dict[str, Any]]:
        return list(read_lines(self.dir / f"{name}.jsonl"))

    def ends(self) -> list[str]:
        return [e["kind"] for e in self.lines("journal") if e["event"] == "interruption"]

    def reach(self, cluster: LocalCluster, job: str, generation: int, count: int) -> float:
        """Waits for so many lines of an attempt; returns how long."""
        began = time.monotonic()
        while sum(line["generation"] == generation for line in self.lines()) < count:
            assert time.monotonic() - began < PATIENCE_S, cluster.job_logs(job)[-5000:]
            assert cluster.job_status(job) in ("PENDING", "RUNNING"), cluster.job_logs(job)[-5000:]
            time.sleep(0.2)
        return time.monotonic() - began

    def judge(self, steps: int) -> None:
        """The history is exact, and every second is in one bucket."""
        ledger = read_ledger(self.dir)
        assert ledger is not None
        found = [
            *judge_history(self.lines(), steps, BATCH, right_digests(self.data)),
            *judge_journal(self.lines("journal")),
            *judge_ledger(ledger.wall_s, ledger.buckets),
        ]
        assert found == []


def kill(cluster: LocalCluster, word: str) -> None:
    """SIGKILL to the one process of the head that a word names."""
    (pid,) = find(cluster, HEAD, word)
    os.kill(pid, signal.SIGKILL)


def until(holds: Callable[[], bool], within_s: float, what: str) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, what
        time.sleep(0.2)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_run_outlives_its_tracker_and_its_head(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    # A head without a worker: its end leaves all workers alive, and none of them has anybody to ask.
    with LocalCluster(1, 0) as first:
        nodes = [first.add(cpus=1) for _ in range(2)]
        job = run.submit(first, NEVER)
        run.reach(first, job, 1, 15)
        kill(first, TRACKER)
        before = len(run.lines())
        took_s = run.reach(first, job, 1, before + 15)
        print(f"15 steps {took_s:.1f} s after the tracker's death, in the same attempt")
        assert run.ends() == []
        workers = [pid for node in nodes for pid in find(first, node, WORKER)]
        assert len(workers) == 2
        first.kill(HEAD, force=True)
        killed = time.monotonic()
        with LocalCluster(1, 2) as second:
            last = max(line["step"] for line in run.lines()) + 20
            job = run.submit(second, last)
            assert second.wait_job(job, PATIENCE_S) == "SUCCEEDED", second.job_logs(job)[-5000:]
            left_s = OWN_END_S - (time.monotonic() - killed)
            until(
                lambda: not any(map(command_line, workers)),
                left_s,
                "workers without a head live on",
            )
            print(f"the last worker of the old head ended within {time.monotonic() - killed:.1f} s")
    assert run.ends() == ["lost"]
    run.judge(last)


@pytest.mark.slow
def test_a_run_outlives_its_controller_in_the_same_job_and_its_driver_in_the_next(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path)
    with LocalCluster(2, 1) as cluster:
        job = run.submit(cluster, NEVER)
        run.reach(cluster, job, 1, 15)
        kill(cluster, CONTROLLER)
        took_s = run.reach(cluster, job, 2, 15)
        print(f"15 steps of the next attempt {took_s:.1f} s after the controller's death")
        kill(cluster, DRIVER)
        assert cluster.wait_job(job, PATIENCE_S) == "FAILED"
        job = run.submit(cluster, NEVER)
        took_s = run.reach(cluster, job, 3, 15)
        print(f"15 steps of the next attempt {took_s:.1f} s after the next job was submitted")
        # All of them at once: nothing of the job is left but its workers.
        for word in (TRACKER, CONTROLLER, DRIVER):
            kill(cluster, word)
        assert cluster.wait_job(job, PATIENCE_S) == "FAILED"
        last = max(line["step"] for line in run.lines()) + 20
        job = run.submit(cluster, last)
        assert cluster.wait_job(job, PATIENCE_S) == "SUCCEEDED", cluster.job_logs(job)[-5000:]
    assert run.ends() == ["lost"] * 3
    run.judge(last)
