"""Nodes that are taken away after a notice, workers that get SIGTERM, nodes that come: no step is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import ask
from worlds import make_data

from cluster.local import LocalCluster
from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view.summary import surviving_steps

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH = 100_000, 32  # it is stopped before
NOTICE_S = 8.0


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


PROBE = """
import json, time, urllib.request
import ray
from ray.util.state import list_actors, list_logs, list_tasks

ray.init(logging_level="error", log_to_driver=False)
def scrape():
    names = set()
    for node in ray.nodes():
        if node["Alive"]:
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
            text = urllib.request.urlopen(url, timeout=10).read().decode()
            names |= {line.split("{")[0] for line in text.splitlines()}
    return names

# A gauge is set on a tick of 5 s and exported every 10 s.
deadline = time.monotonic() + 40
while "ray_ckpt_copy_age_seconds" not in (names := scrape()) and time.monotonic() < deadline:
    time.sleep(1)
head = ray.get_runtime_context().get_node_id()
logs = [name for names in list_logs(node_id=head).values() for name in names]
print("PROBE" + json.dumps({
    "actors": [actor.name for actor in list_actors(filters=[("state", "=", "ALIVE")])],
    "tasks": [(task.name, task.actor_id) for task in list_tasks(limit=5000)],
    "logs": logs,
    "metrics": sorted(names),
}))
"""


def look_at_the_dashboard(cluster: LocalCluster) -> None:
    """What people find without our own page: actor, commit tasks, table in the Logs tab, metrics."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=cluster.client_environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "PROBE" in done.stdout, done.stdout + done.stderr
    found = json.loads(done.stdout.split("PROBE", 1)[1])
    assert "ray_ckpt.tracker:planned" in found["actors"]
    readers = {actor for name, actor in found["tasks"] if name.startswith("commit step-")}
    assert "commit step-00000005" in dict(found["tasks"])
    assert len(readers) == 1, "a process for each commit would take processors from training"
    assert None not in readers
    assert "ray_ckpt-planned.log" in found["logs"]
    gauges = {"ray_ckpt_step", "ray_ckpt_world_size", "ray_ckpt_copy_age_seconds"}
    assert gauges | {"ray_ckpt_commits_total"} <= set(found["metrics"])


def terminate_a_worker(cluster: LocalCluster) -> None:
    """SIGTERM to the process of one training worker of a cluster."""
    raylets = {node.raylet_pid for node in cluster.nodes()}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        line = " ".join(process.info["cmdline"] or [])
        if "RayTrainWorker" in line and process.info["ppid"] in raylets:
            os.kill(process.pid, signal.SIGTERM)
            return
    raise AssertionError("no training worker is running")


def test_a_drained_node_a_terminated_worker_and_a_new_node_cost_no_step(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "runs" / "planned"
    make_data(data, [64] * 60, seq_len=33, vocab=257)
    with LocalCluster(3, 1) as cluster:
        job = cluster.submit(
            [
                *(sys.executable, "jobs/pretrain.py", "--run", "planned", "--workers", "1:3"),
                *("--storage", str(run_dir.parent), "--data", str(data), "--steps", str(STEPS)),
                *("--global-batch", str(BATCH), "--micro-batch", "2", "--seq-len", "33"),
                *("--model.dim", "64", "--model.num-layers", "2"),
                *("--policy.interval-steps", "5", "--elastic.resize-check-s", "1"),
                *("--elastic.drain-margin-s", "2", "--elastic.settle-s", "1"),
                # Steps are few here: they would not be worth a restart.
                *("--elastic.min-gain", "0"),
                # On two cores, processes that start beside training would take seconds of a notice of eight.
                *("--elastic.spare-after-s", "0"),
            ],
            working_dir=ROOT,
        )

        def wait(what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline:
                rows = read(run_dir / "steps.jsonl")
                if rows and holds(rows[-1]):
                    return rows[-1]
                assert cluster.job_status(job) in ("PENDING", "RUNNING"), cluster.job_logs(job)
                time.sleep(0.2)
            raise AssertionError(f"no {what}\n{cluster.job_logs(job)[-4000:]}")

        wait("start with 3", lambda row: row["world_size"] == 3 and row["step"] >= 12)
        look_at_the_dashboard(cluster)
        saved = ask(cluster, "save", str(run_dir), "--timeout-s", "60")
        told = time.time()
        cluster.drain("node1", deadline_s=NOTICE_S)
        wait("step with 2", lambda row: row["world_size"] == 2)
        terminate_a_worker(cluster)
        wait("step after SIGTERM", lambda row: row["generation"] == 3)
        cluster.add()
        wait("step with 3 again", lambda row: row["world_size"] == 3 and row["generation"] == 4)
        ask(cluster, "stop", str(run_dir), "--timeout-s", "60")
        assert cluster.wait_job(job, 60) == "FAILED", "a stop is no success"
        assert "stopped by" in cluster.job_logs(job)
        assert "LeavingError" not in cluster.job_logs(job), "it was planned"

    events = read(run_dir / "journal.jsonl")
    ends = [event for event in events if event["event"] == "interruption"]
    assert [(end["kind"], end["lost_steps"]) for end in ends] == [
        ("drain", 0),
        ("preempted", 0),
        ("resize", 0),
        ("user_stop", 0),
    ]
    assert "node1" in ends[0]["cause"]
    rows = surviving_steps(run_dir)
    assert list(rows) == list(range(1, len(rows) + 1))
    assert saved["step"] in {event["step"] for event in events if event["event"] == "commit"}
    assert any("asked for it" in e["reason"] for e in events if e["event"] == "save_requested")
    assert [row["sample_offset"] for row in rows.values()] == [BATCH * step for step in rows]
    # Nothing was done twice either: what was executed is what counts.
    assert [line["step"] for line in read(run_dir / "steps.jsonl")] == list(rows)
    worlds = [row["world_size"] for row in rows.values()]
    assert [w for i, w in enumerate(worlds) if i == 0 or worlds[i - 1] != w] == [3, 2, 3]
    asked = next(event for event in events if event["event"] == "leave_requested")
    assert asked["saves"]
    assert asked["time"] - told > NOTICE_S / 8, "the node trained for a part of its notice"
    group = [event for event in events if event["event"] == "group_started"][1]
    wished = group["time"] - group["asked_ago_s"]
    assert wished < told + NOTICE_S, "the others did not wait for the deadline"
    grown = [event for event in events if event["event"] == "resize_decision"]
    assert grown[-1]["why"] == "grow"
    ledger = read_ledger(run_dir)
    assert ledger is not None
    assert sum(ledger.buckets.values()) == pytest.approx(ledger.wall_s, rel=1e-3)
    assert ledger.buckets["rework"] == 0
    *restarts, stop = ledger.restarts
    assert [each.kind for each in restarts] == ["drain", "preempted", "resize"]
    assert (stop.kind, sum(stop.buckets.values())) == ("user_stop", 0)
    assert ledger.buckets["unknown"] <= 0.01 * ledger.wall_s, "Ray told how the groups started"
    assert all(each.buckets["restart_start_workers"] > 0 for each in restarts)
