"""What an interruption costs: this project against Ray Train as its documentation has it.

    python jobs/bench_restart.py [--quick] [--json FILE]

On a cluster of three nodes on this machine, one contender after the other trains the same model with a checkpoint every
so many steps, and meets the same events half-way between two checkpoints: a worker is killed, a node is killed, a node
is added, a node is drained. Of each event: from the last step before it to the first step that is new, and the steps
that were done twice. Ray's cluster settings are its defaults for its contender, and those of ``cluster/local.py`` for
ours; ``--same-cluster`` gives both the latter. Exit code 0 only if all targets hold.

Three rounds take about half an hour, ``--quick`` is one of them. ``--only ours`` (or ``stock``) measures one of the
two, to see what a change brings: there are no ratios then. Of ours the ledger's phases of each restart are shown too.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from bench_report import conclude, target_of
from prepare import PrepareOptions, prepare

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from cluster.local import LocalCluster, Settings  # noqa: E402
from ray_ckpt.data.index import load_index  # noqa: E402
from ray_ckpt.errors import RayCkptError  # noqa: E402
from ray_ckpt.local_ray import cluster as private_ray  # noqa: E402
from ray_ckpt.options import parse, run_main  # noqa: E402
from ray_ckpt.tracker.buckets import RESTART  # noqa: E402
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines  # noqa: E402
from ray_ckpt.tracker.recall import read_ledger  # noqa: E402

NODES, GLOBAL_BATCH, SEQ_LEN, EVERY = 3, 12, 128, 30
# A worker on each node, and a CPU beside it: the tasks that read for Ray's own loop would find none else.
NODE_CPUS, WORKER_CPUS = 3, 2
PATIENCE_S = 300.0
EVENTS = ("worker error", "node kill", "node added", "drain")
DRAIN_S = 20.0
# Nodes share the cores of this machine: threads of more workers than cores would wait for each other, spinning.
THREADS = {"OMP_NUM_THREADS": "1"}
# Ray's own: period, timeout and failures of its health checks are left as they are.
RAY_DEFAULT = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}


Only = Literal["both", "ours", "stock"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What an interruption costs."""

    rounds: int = 3
    """Times that each contender meets each event."""
    quick: bool = False
    """One round."""
    same_cluster: bool = False
    """Quick health checks for both contenders."""
    only: Only = "both"
    """Which contender is measured; the targets need both."""
    json: str = ""
    """File for the figures as JSON."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Who trains.

    Attributes:
        name: for the table.
        command: of the job, from folder of the run's storage and the data.
        lines: file with a line for each step, from the folder of the storage.
        settings: of the cluster.
    """

    name: str
    command: Callable[[Path, Path], list[str]]
    lines: Callable[[Path], Path]
    settings: Settings


def ours(storage: Path, data: Path) -> list[str]:
    """The main job."""
    options = {
        "--run": "ours",
        "--storage": storage,
        "--data": data,
        "--workers": f"1:{NODES}",
        "--global-batch": GLOBAL_BATCH,
        "--micro-batch": 2,
        "--seq-len": SEQ_LEN,
        "--steps": 1_000_000,
        "--policy.interval-steps": EVERY,
        "--elastic.cpus-per-worker": WORKER_CPUS,
    }
    flags = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "jobs/pretrain.py", *flags]


def stock(storage: Path, data: Path) -> list[str]:
    """Ray Train as documented."""
    config = {
        "storage": str(storage),
        "data": str(data),
        "lines": str(storage / "lines.jsonl"),
        "vocab_size": load_index(data).vocab_size,
        "global_batch": GLOBAL_BATCH,
        "every": EVERY,
        "workers": NODES,
        "cpus": WORKER_CPUS,
    }
    return [sys.executable, "jobs/bench_stock.py", json.dumps(config)]


class _Story:
    """One contender's way through the events."""

    def __init__(self, cluster: LocalCluster, job: str, lines: Path) -> None:
        self._cluster, self._job, self._lines = cluster, job, lines

    def _rows(self) -> list[dict[str, Any]]:
        return list(read_lines(self._lines))

    def wait(
        self, what: str, holds: Callable[[list[dict[str, Any]]], bool]
    ) -> list[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            rows = self._rows()
            if rows and holds(rows):
                return rows
            if self._cluster.job_status(self._job) in ("FAILED", "STOPPED", "SUCCEEDED"):
                break
            time.sleep(0.1)
        logs = self._cluster.job_logs(self._job)[-3000:]
        raise RayCkptError(f"{self._job} did not come to {what}:\n{logs}")

    def half_way(self, world: int) -> int:
        """Waits for a step in the middle between two checkpoints, with so many workers; returns the lines so far."""
        seen = len(self._rows())

        def there(rows: list[dict[str, Any]]) -> bool:
            last = rows[-1]
            long_enough = len(rows) >= seen + EVERY
            return (
                long_enough and last["world_size"] == world and last["step"] % EVERY == EVERY // 2
            )

        return len(self.wait(f"a step half-way with {world} workers", there))

    def after(self, event: str, seen: int, world: int) -> dict[str, Any]:
        """What the event cost, once there is a new step in a new group with so many workers."""

        def new_group(rows: list[dict[str, Any]]) -> int:
            # The first line that does not go on from the one before it, or is of another size of the group.
            for i in range(seen, len(rows)):
                before, row = rows[i - 1], rows[i]
                if row["step"] != before["step"] + 1 or _group(row) != _group(before):
                    return i
            return 0

        def done(rows: list[dict[str, Any]]) -> bool:
            at = new_group(rows)
            best = max((row["step"] for row in rows[:at]), default=0)
            return bool(at) and rows[-1]["world_size"] == world and rows[-1]["step"] > best

        rows = self.wait(f"a new step with {world} workers after {event}", done)
        at = new_group(rows)
        last = rows[at - 1]
        best = max(row["step"] for row in rows[:at])
        new = next(row for row in rows[at:] if row["step"] > best and row["world_size"] == world)
        return {
            "event": event,
            "to_first_step_s": rows[at]["time"] - last["time"],
            "to_new_step_s": new["time"] - last["time"],
            "steps_lost": best + 1 - rows[at]["step"],
        }

    def kill_worker(self) -> None:
        raylets = {node.raylet_pid for node in self._cluster.nodes() if node.alive}
        workers = [
            process
            for process in psutil.process_iter(["cmdline", "ppid"])
            if "RayTrainWorker" in " ".join(process.info["cmdline"] or [])
            and process.info["ppid"] in raylets
        ]
        os.kill(workers[-1].pid, signal.SIGKILL)

    def run(self) -> list[dict[str, Any]]:
        """All events, one after the other."""
        found = []
        seen = self.half_way(NODES)
        self.kill_worker()
        found.append(self.after("worker error", seen, NODES))
        seen = self.half_way(NODES)
        self._cluster.kill("node2")
        found.append(self.after("node kill", seen, NODES - 1))
        seen = self.half_way(NODES - 1)
        self._cluster.add()
        found.append(self.after("node added", seen, NODES))
        seen = self.half_way(NODES)
        self._cluster.drain("node1", deadline_s=DRAIN_S, kill_at_deadline=True)
        found.append(self.after("drain", seen, NODES - 1))
        return found


def _group(row: dict[str, Any]) -> Any:
    return row.get("generation", row.get("began")), row["world_size"]


def measure(contender: Contender, data: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One contender's way through the events, on a cluster of its own; and the phases of its restarts."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-restart-") as folder,
        LocalCluster(NODES, NODE_CPUS, settings=contender.settings) as cluster,
    ):
        storage = Path(folder)
        job = cluster.submit(contender.command(storage, data), working_dir=ROOT)
        story = _Story(cluster, job, contender.lines(storage))
        rows = [{"who": contender.name, **row} for row in story.run()]
        return rows, phases(storage)


def phases(storage: Path) -> list[dict[str, Any]]:
    """Where the time of each restart went by our ledger, seconds; none for a contender that keeps no ledger."""
    ledger = read_ledger(storage / "ours")
    return [
        {"kind": each.kind}
        | {name.removeprefix(RESTART): round(took, 2) for name, took in each.buckets.items()}
        for each in (ledger.restarts if ledger else ())
    ]


def targets_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians held against the limits."""

    def median(who: str, event: str, what: str) -> float:
        values = [row[what] for row in rows if row["who"] == who and row["event"] == event]
        return float(statistics.median(values))

    def over(event: str) -> float:
        return median("ours", event, "to_new_step_s") / median("stock", event, "to_new_step_s")

    return [
        target_of("node_kill_over_stock", over("node kill"), 0.25),
        target_of("worker_error_over_stock", over("worker error"), 0.6),
        target_of("steps_lost_node_added", median("ours", "node added", "steps_lost"), 0),
        target_of("steps_lost_drain", median("ours", "drain", "steps_lost"), 0),
    ]


def main() -> int:
    """Measures, prints a table, and holds the ratios against their limits."""
    config = parse(BenchConfig)
    settings = Settings(page=False, extra_env=THREADS)
    default = Settings(page=False, extra_env={**RAY_DEFAULT, **THREADS})
    if config.same_cluster:
        default = settings
    contenders = [
        Contender("stock", stock, lambda storage: storage / "lines.jsonl", default),
        Contender("ours", ours, lambda storage: storage / "ours" / STEPS_NAME, settings),
    ]
    rows: list[dict[str, Any]] = []
    ledger: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-restart-data-") as folder:
        data = Path(folder) / "data"
        with private_ray(2):
            prepare(PrepareOptions(output=str(data), seq_len=SEQ_LEN))
        print(f"{'who':<8}{'event':<14}{'to first step':>15}{'to new step':>13}{'steps lost':>12}")
        for number in range(1 if config.quick else config.rounds):
            for contender in contenders[:: 1 if number % 2 else -1]:
                if config.only not in ("both", contender.name):
                    continue
                found, restarts = measure(contender, data)
                for row in found:
                    rows.append({"round": number, **row})
                    print(
                        f"{row['who']:<8}{row['event']:<14}{row['to_first_step_s']:>13.1f} s"
                        f"{row['to_new_step_s']:>11.1f} s{row['steps_lost']:>12}",
                        flush=True,
                    )
                for each in restarts:
                    print("        " + ", ".join(f"{k} {v}" for k, v in each.items()), flush=True)
                    ledger.append({"round": number, "phases_of": "ours", **each})
    targets = targets_of(rows) if config.only == "both" else []
    return conclude(targets, [*rows, *ledger], config.json)


if __name__ == "__main__":
    run_main(main)
