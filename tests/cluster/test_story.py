"""A node dies, another one joins: same batch, same order, every sample once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import make_data

from cluster.local import LocalCluster
from ray_ckpt.config import Config
from ray_ckpt.facts import expected_digest, global_order
from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view.summary import surviving_steps

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH = 900, 16


def expected_digests(data: Path) -> list[str]:
    """What an uninterrupted run trains on: from the order alone, without any run."""
    config = Config(data=str(data), global_batch=BATCH, micro_batch=2, seq_len=33)
    order = global_order(config)
    return [
        expected_digest(order, step, global_batch=BATCH, micro_batch=2) for step in range(STEPS)
    ]


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
    "tasks": [task.name for task in list_tasks(limit=5000)],
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
    assert "ray_ckpt.tracker:story" in found["actors"]
    assert "commit step-00000020" in found["tasks"]
    assert "ray_ckpt-story.log" in found["logs"]
    gauges = {"ray_ckpt_step", "ray_ckpt_world_size", "ray_ckpt_copy_age_seconds"}
    assert gauges | {"ray_ckpt_commits_total"} <= set(found["metrics"])


def ask(cluster: LocalCluster, command: str, run: str) -> dict[str, Any]:
    """`ray-ckpt save` or `stop`, as a person calls it."""
    done = subprocess.run(
        [sys.executable, "-m", "ray_ckpt", command, run, "--json", "--timeout-s", "60"],
        env=cluster.client_environ(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_three_then_two_then_three_workers(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "runs" / "story"
    make_data(data, [64] * 60, seq_len=33, vocab=257)
    with LocalCluster(3, 1) as cluster:
        job = cluster.submit(
            [
                *(sys.executable, "jobs/pretrain.py", "--run", "story", "--workers", "1:3"),
                *("--storage", str(run_dir.parent), "--data", str(data), "--steps", str(STEPS)),
                *("--global-batch", str(BATCH), "--micro-batch", "2", "--seq-len", "33"),
                *("--policy.interval-steps", "20", "--elastic.resize-check-s", "5"),
            ],
            working_dir=ROOT,
        )

        def wait(what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                rows = read(run_dir / "steps.jsonl")
                if rows and holds(rows[-1]):
                    return rows[-1]
                assert cluster.job_status(job) in ("PENDING", "RUNNING"), cluster.job_logs(job)[
                    -4000:
                ]
                time.sleep(0.3)
            raise AssertionError(f"no {what}\n{cluster.job_logs(job)[-4000:]}")

        wait("start with 3", lambda row: row["world_size"] == 3 and row["step"] >= 45)
        look_at_the_dashboard(cluster)
        saved = ask(cluster, "save", str(run_dir))
        killed = time.monotonic()
        cluster.kill("node1")
        wait("step with 2", lambda row: row["world_size"] == 2)
        print(f"from the kill of a node to the next step: {time.monotonic() - killed:.1f} s")
        cluster.add(node="node1")
        wait("step with 3 again", lambda row: row["world_size"] == 3 and row["generation"] == 3)
        assert cluster.wait_job(job, 180) == "SUCCEEDED", cluster.job_logs(job)[-4000:]

    rows = surviving_steps(run_dir)
    assert list(rows) == list(range(1, STEPS + 1))
    worlds = [row["world_size"] for row in read(run_dir / "steps.jsonl")]
    changes = [w for i, w in enumerate(worlds) if i == 0 or worlds[i - 1] != w]
    assert changes == [3, 2, 3]
    assert [row["sample_digest"] for row in rows.values()] == expected_digests(data)
    assert [row["sample_offset"] for row in rows.values()] == [BATCH * step for step in rows]
    assert {row["tokens"] for row in rows.values()} == {BATCH * 32}
    events = read(run_dir / "journal.jsonl")
    ends = [event for event in events if event["event"] == "interruption"]
    assert [end["kind"] for end in ends] == ["node_loss", "resize"]
    assert saved["step"] in {e["step"] for e in events if e["event"] == "commit"}
    assert any("asked for it" in e["reason"] for e in events if e["event"] == "save_requested")
    assert "node1" in ends[0]["cause"]
    assert ends[0]["lost_steps"] <= 21
    assert ends[1]["lost_steps"] == 0, "growing is planned"
    ledger = read_ledger(run_dir)
    assert ledger is not None
    assert sum(ledger.buckets.values()) == pytest.approx(ledger.wall_s, rel=1e-3)
    assert ledger.buckets["unknown"] <= 0.01 * ledger.wall_s, "Ray told how the groups started"
    assert [each.kind for each in ledger.restarts] == ["node_loss", "resize"]
    assert all(each.buckets["restart_start_workers"] > 0 for each in ledger.restarts)
