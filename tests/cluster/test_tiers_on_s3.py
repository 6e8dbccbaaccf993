"""Three tiers, the last one an object store that fails: two of four nodes die, and nothing of the run is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from asking import ask
from test_tiers_on_nodes import ROOT, lines, wait
from worlds import make_data

from cluster.local import LocalCluster, Settings
from ray_ckpt.config import Config
from ray_ckpt.facts import expected_digest, global_order
from ray_ckpt.view.summary import surviving_steps
from tests.s3 import object_store

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS, BATCH, DURABLE_EVERY = 80, 16, 24
LOGIN = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def expected_digests(data: Path) -> list[str]:
    """What each step of a run without failures trains on: from the order alone."""
    order = global_order(Config(data=str(data), global_batch=BATCH, micro_batch=2, steps=STEPS))
    return [
        expected_digest(order, step, global_batch=BATCH, micro_batch=2) for step in range(STEPS)
    ]


def test_two_nodes_die_while_the_object_store_fails_every_third_request(tmp_path: Path) -> None:
    data, storage = tmp_path / "data", tmp_path / "runs"
    run_dir = storage / "tiers"
    make_data(data, [64] * 60, seq_len=128, vocab=257)
    settings = Settings(extra_env=LOGIN)
    with object_store() as store, LocalCluster(4, 1, settings=settings) as cluster:
        store.fail({"do": "503", "every": 3})
        command = [sys.executable, "jobs/pretrain.py", "--run", "tiers", "--storage", str(storage)]
        command += ["--data", str(data), "--steps", str(STEPS)]
        command += ["--workers", "1:4", "--global-batch", str(BATCH), "--micro-batch", "2"]
        command += ["--policy.interval-steps", "8", "--elastic.resize-check-s", "300"]
        command += ["--tiers.use", "memory", "local", "durable", "--tiers.replicas", "2"]
        command += ["--tiers.local-folder", "$RAY_CKPT_NODE_DIR/copies"]
        command += ["--tiers.local-every-steps", "16", "--tiers.remote", store.uri("runs")]
        command += ["--tiers.durable-every-steps", str(DURABLE_EVERY)]
        job = cluster.submit(command, working_dir=ROOT, env=LOGIN)
        wait(cluster, job, run_dir, lambda row: row["world_size"] == 4 and row["step"] >= 28)
        cluster.kill("node1")
        cluster.kill("node2")
        wait(cluster, job, run_dir, lambda row: row["world_size"] == 2)
        assert cluster.wait_job(job, 200) == "SUCCEEDED", cluster.job_logs(job)[-6000:]
        refused = store.done[0]
        assert refused > 20, "the store did fail"
        there = ask(cluster, "ls", store.uri("runs/tiers"), more=LOGIN)
        read = ask(cluster, "verify", store.uri("runs/tiers"), more=LOGIN)
        assert store.done[0] > refused, "it still does"
    # The sample history: of each step the same samples as without failures, at the same offsets.
    rows = surviving_steps(run_dir)
    assert list(rows) == list(range(1, STEPS + 1))
    assert [row["sample_offset"] for row in rows.values()] == [BATCH * step for step in rows]
    assert [row["sample_digest"] for row in rows.values()] == expected_digests(data)
    # Restored from memory, although two of the nodes that wrote it are gone.
    events = lines(run_dir / "journal.jsonl")
    ends = [event for event in events if event["event"] == "interruption"]
    assert [event["kind"] for event in ends] == ["node_loss"]
    restored = [event for event in events if event["event"] == "restored"][1]
    assert restored["step"] == ends[0]["step"] - ends[0]["lost_steps"]
    assert ends[0]["lost_steps"] < 16, "not back to what the store has"
    assert restored["reason"].endswith("from memory")
    # Durable copies, each as it was written.
    durable = [e["step"] for e in events if e["event"] == "promote" and e["tier"] == "durable"]
    assert durable[-1] == STEPS
    assert len(durable) >= 3
    listed = {row["step"] for row in there if "durable" in row["tiers"]}
    assert STEPS in listed
    assert listed <= set(durable)
    assert {row["step"] for row in read if row["ok"]} == listed
    assert not [row for row in read if not row["ok"]]
