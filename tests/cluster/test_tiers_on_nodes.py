"""Two of four nodes die at once, and the run goes on from the memory of the other two."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.local import LocalCluster
from ray_ckpt.tiers.stack import run_key

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
STEPS = 64


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def wait(
    cluster: LocalCluster, job: str, run_dir: Path, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        rows = lines(run_dir / "steps.jsonl")
        if rows and holds(rows[-1]):
            return rows[-1]
        if cluster.job_status(job) in ("SUCCEEDED", "FAILED", "STOPPED"):
            break
        time.sleep(0.2)
    raise AssertionError(cluster.job_logs(job)[-6000:])


def test_as_many_nodes_as_replicas_die_at_once_and_memory_gives_the_state_back(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "tiers"
    with LocalCluster(4, 1) as cluster:
        command = [sys.executable, "jobs/pretrain.py", "--run", "tiers", "--storage", str(tmp_path)]
        command += ["--workers", "1:4", "--global-batch", "16", "--micro-batch", "2"]
        command += ["--steps", str(STEPS), "--policy.interval-steps", "8"]
        command += ["--elastic.resize-check-s", "300"]
        command += ["--tiers.use", "memory", "local", "durable", "--tiers.replicas", "2"]
        command += ["--tiers.local-folder", "$RAY_CKPT_NODE_DIR/copies"]
        command += ["--tiers.local-every-steps", "16", "--tiers.durable-every-steps", "1000"]
        job = cluster.submit(command, working_dir=ROOT)
        wait(cluster, job, run_dir, lambda row: row["world_size"] == 4 and row["step"] >= 28)
        cluster.kill("node1")
        cluster.kill("node2")
        wait(cluster, job, run_dir, lambda row: row["world_size"] == 2)
        command = [sys.executable, "-m", "ray_ckpt", "verify", str(run_dir), "--nodes", "--json"]
        read = subprocess.run(
            [*command, "--address", cluster.address],
            env=cluster.client_environ(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert read.returncode == 0, read.stderr
        assert {"memory", "local", "durable"} == {row["tier"] for row in json.loads(read.stdout)}
        assert cluster.wait_job(job, 200) == "SUCCEEDED", cluster.job_logs(job)[-6000:]
        shared = Path("/dev/shm").glob(f"rcl-*/*/*/data/ray_ckpt/{run_key(run_dir)}/checkpoints/*")
        assert list(shared) == []  # nobody needs memory of a run that has finished
    events = lines(run_dir / "journal.jsonl")
    ends = [event for event in events if event["event"] == "interruption"]
    assert [event["kind"] for event in ends] == ["node_loss"]
    assert ends[0]["lost_steps"] < 16  # not back to the durable tier
    restored = [event for event in events if event["event"] == "restored"][1]
    assert restored["step"] == ends[0]["step"] - ends[0]["lost_steps"]
    assert restored["reason"].endswith("from memory")
    promoted = [(e["tier"], e["step"]) for e in events if e["event"] == "promote"]
    durable = [step for tier, step in promoted if tier == "durable"]
    assert durable[0] < restored["step"]
    assert durable[-1] == STEPS
    assert "local" in {tier for tier, _ in promoted}
    offsets = {row["step"]: row["sample_offset"] for row in lines(run_dir / "steps.jsonl")}
    assert offsets == {step: 16 * step for step in range(1, STEPS + 1)}
