"""A node that is cut off from the others, both ways, while it trains; and comes back when the run has gone on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from networks import INTERFACE, SUBNET, Networks, forbidden
from soak import right_digests, write_data
from soak_events import WORKER, command_line, find
from soak_judge import judge_history, judge_journal, judge_ledger

from cluster.local import LocalCluster, Settings
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.tracker.journal import read_lines
from ray_ckpt.tracker.recall import read_ledger

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BATCH = 16
STEPS = 100_000
PATIENCE_S = 200.0
OWN_END_S = 60.0


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_lines(run_dir / "steps.jsonl"))


def until(holds: Callable[[], bool], within_s: float, what: Callable[[], str]) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, what()
        time.sleep(0.2)
    return time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_was_cut_off_comes_back_and_changes_nothing(
    tmp_path: Path, rank: int
) -> None:
    if reason := forbidden():
        pytest.skip(f"no network namespaces here: {reason}")
    data, run_dir = tmp_path / "data", tmp_path / "runs" / "cut"
    write_data(data)
    (tmp_path / "net").mkdir()
    with Networks(3, tmp_path / "net") as networks:
        settings = Settings(
            subnet=SUBNET,
            in_front=networks.in_front,
            extra_env={"GLOO_SOCKET_IFNAME": INTERFACE},
        )
        # The head has the driver, tracker and controller, and no worker.
        with LocalCluster(1, 0, settings=settings) as cluster:
            nodes = [cluster.add(cpus=1) for _ in range(2)]

            def command(steps: int) -> list[str]:
                return [
                    *(sys.executable, "jobs/pretrain.py", "--run", "cut", "--workers", "1:2"),
                    *("--storage", str(run_dir.parent), "--data", str(data)),
                    *("--global-batch", str(BATCH), "--micro-batch", "2", "--seq-len", "33"),
                    *("--model.dim", "32", "--model.num-layers", "2", "--exact"),
                    *("--optim.min-lr-ratio", "1", "--steps", str(steps)),
                    *("--policy.interval-steps", "10", "--elastic.leash-s", "3"),
                    *("--elastic.resize-check-s", "5", "--elastic.hang-factor", "0"),
                ]

            job = cluster.submit(command(STEPS), working_dir=ROOT)

            def told() -> str:
                return cluster.job_logs(job)[-6000:]

            def at(generation: int, count: int) -> bool:
                return sum(row["generation"] == generation for row in rows(run_dir)) >= count

            until(lambda: at(1, 25), PATIENCE_S, told)
            assert rows(run_dir)[-1]["world_size"] == 2
            (began,) = [
                e for e in read_lines(run_dir / "journal.jsonl") if e["event"] == "attempt_started"
            ]
            by_id = {node.node_id: node.name for node in cluster.nodes()}
            lost = by_id[began["nodes"][rank]]
            (worker,) = find(cluster, lost, WORKER)
            networks.cut(lost)
            took_s = until(lambda: at(2, 15), PATIENCE_S, told)
            print(
                f"{lost} with rank {rank} was cut off; 15 steps of the next attempt after {took_s:.1f} s"
            )
            assert rows(run_dir)[-1]["world_size"] == 1
            alone = bool(command_line(worker))
            print(f"the worker that was cut off {'lives' if alone else 'has ended'}")
            networks.heal(lost)
            took_s = until(lambda: not command_line(worker), OWN_END_S, lambda: "the worker lives")
            print(f"it ended {took_s:.1f} s after it could reach the others again")
            until(lambda: at(2, 40) or at(3, 10), PATIENCE_S, told)
            cluster.kill(lost)
            stopped = cluster.submit(["ray-ckpt", "stop", str(run_dir)], working_dir=ROOT)
            cluster.wait_job(stopped, 120)
            cluster.wait_job(job, 120)
            last = rows(run_dir)[-1]["step"] + 10
            job = cluster.submit(command(last), working_dir=ROOT)
            assert cluster.wait_job(job, PATIENCE_S) == "SUCCEEDED", told()
            assert nodes[rank] in by_id.values()
    events = list(read_lines(run_dir / "journal.jsonl"))
    ends = [event["kind"] for event in events if event["event"] == "interruption"]
    assert ends[0] == "node_loss", ends
    ledger = read_ledger(run_dir)
    assert ledger is not None
    found = [
        *judge_history(rows(run_dir), last, BATCH, right_digests(data)),
        *judge_journal(events),
        *judge_ledger(ledger.wall_s, ledger.buckets),
    ]
    assert found == []
    # What it wrote into the folder that all nodes see is no checkpoint: all that are committed are in the journal.
    committed = {(e["step"], e["generation"]) for e in events if e["event"] == "commit"}
    for manifest in (run_dir / CHECKPOINTS_DIR).glob("*/COMMITTED.json"):
        content = json.loads(manifest.read_text())
        assert (content["step"], content["generation"]) in committed
