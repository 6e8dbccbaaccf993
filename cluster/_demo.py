"""The story of an elastic run, told while it happens: a node burns, another one joins."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster._cluster import LocalCluster
from cluster._state import ClusterError

_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE_S = 240.0


def tell(storage: Path, steps: int, extra: list[str]) -> None:
    """Runs the story; raises ``ClusterError`` when it does not end well.

    Args:
        storage: folder for the demo's run, which must be new.
        steps: optimizer steps of the run.
        extra: more options for ``jobs/pretrain.py``.
    """
    run_dir = storage / "demo"
    if run_dir.exists():
        raise ClusterError(
            f"{run_dir} exists, and the demo begins a new run: remove it, or name another --storage"
        )
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    say("three nodes of one CPU each are started on this machine")
    with LocalCluster(3, 1) as cluster:
        command = [
            *(
                sys.executable,
                "jobs/pretrain.py",
                "--run",
                "demo",
                "--storage",
                str(storage),
                "--workers",
                "1:3",
            ),
            *("--global-batch", "16", "--micro-batch", "2", "--steps", str(steps)),
            *("--elastic.resize-check-s", "5", "--policy.interval-steps", "25", *extra),
        ]
        say(f"ray job submit --working-dir . -- {' '.join(command)}")
        job = cluster.submit(command, working_dir=_ROOT)
        try:
            _story(cluster, job, run_dir, say)
        except ClusterError:
            print(cluster.job_logs(job)[-4000:], file=sys.stderr)
            raise
        say("the journal of the run:")
        for event in _lines(run_dir / "journal.jsonl"):
            if event["event"] in ("attempt_started", "restored", "interruption", "finished"):
                print("    " + _short(event))
        rows = {row["step"]: row for row in _lines(run_dir / "steps.jsonl")}
        offsets = [row["sample_offset"] for _, row in sorted(rows.items())]
        if offsets != [16 * (i + 1) for i in range(steps)]:
            raise ClusterError("the surviving history does not use every sample once")
        say(f"{steps} steps of 16 samples, each sample once, on 3, 2 and 3 workers")
    print(f"look further: ray-ckpt ls {run_dir}   ray-ckpt verify {run_dir}")


def _story(cluster: LocalCluster, job: str, run_dir: Path, say: Callable[[str], None]) -> None:
    def wait(what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return _wait(cluster, job, run_dir, what, holds)

    row = wait("3 workers", lambda row: row["world_size"] == 3 and row["step"] >= 35)
    say(
        f"step {row['step']}, loss {row['loss']:.3f}, 3 workers. Now node1 burns: kill -9, files lost"
    )
    cluster.kill("node1")
    row = wait("2 workers", lambda row: row["world_size"] == 2)
    say(f"back at step {row['step']} with 2 workers, from the last committed checkpoint")
    cluster.add(node="node1")
    say("node1 is back, empty; the run will save at a step's end and grow")
    row = wait("3 workers again", lambda row: row["generation"] >= 3 and row["world_size"] == 3)
    say(f"step {row['step']} with 3 workers again; no step was lost by growing")
    status = cluster.wait_job(job, _PATIENCE_S)
    if status != "SUCCEEDED":
        raise ClusterError(f"the job ended as {status}")
    say("the job SUCCEEDED")


def _wait(
    cluster: LocalCluster,
    job: str,
    run_dir: Path,
    what: str,
    holds: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        rows = _lines(run_dir / "steps.jsonl")
        if rows and holds(rows[-1]):
            return rows[-1]
        if cluster.job_status(job) in ("SUCCEEDED", "FAILED", "STOPPED"):
            raise ClusterError(
                f"the job ended ({cluster.job_status(job)}) before there were {what}"
            )
        time.sleep(0.5)
    raise ClusterError(f"no {what} within {_PATIENCE_S:g} s")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line may be half written at this moment.
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def _short(event: dict[str, Any]) -> str:
    skip = ("time", "event", "generation", "nodes", "pid", "host", "exposure_s", "verified")
    rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in skip)
    return f"attempt {event['generation']} {event['event']}: {rest}"
