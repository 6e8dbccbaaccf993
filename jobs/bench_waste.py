"""What failures cost a run: what the cost model says, and what the ledger of a real run measured.

    python jobs/bench_waste.py [--quick] [--json FILE]

The main job trains on one worker of a cluster on this machine; its process is killed at random moments of its training,
memoryless, at a known rate. The run decides by itself when to save. Afterwards its own journal tells how long a save,
an upload and a restart took, and how often it failed, with the range that holds the rate with 90 %. From these follows
what should have been lost for each useful second:

    growth(T, C, 1/M, U) (1 + R/M) - 1        (ray_ckpt.policy.interval.growth)

with T the mean of the useful time between saves. Failures come while it trains, and each pays one restart. What was
lost is what the ledger says: saves, steps done again, restarts. Exit code 0 only if that is inside of what the two
ends of the range predict. Twenty failures take about ten minutes; ``--quick`` has five.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench_report import between, conclude
from prepare import PrepareOptions, prepare

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from cluster.local import LocalCluster, Settings  # noqa: E402
from ray_ckpt.errors import RayCkptError  # noqa: E402
from ray_ckpt.local_ray import cluster as private_ray  # noqa: E402
from ray_ckpt.options import parse, run_main  # noqa: E402
from ray_ckpt.policy.belief import ScalePrior  # noqa: E402
from ray_ckpt.policy.failures import FailureModel  # noqa: E402
from ray_ckpt.policy.interval import growth  # noqa: E402
from ray_ckpt.tracker.buckets import PHASES  # noqa: E402
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines  # noqa: E402
from ray_ckpt.tracker.recall import read_ledger, recall  # noqa: E402

SEQ_LEN = 128
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What failures cost a run, predicted and measured."""

    failures: int = 20
    """Times that the worker is killed; --quick has 5."""
    mtbf_s: float = 15.0
    """Mean time of training between them, seconds."""
    seed: int = 0
    """Of the moments."""
    quick: bool = False
    """Five failures."""
    json: str = ""
    """File for the figures as JSON."""


class _Run:
    """The main job on a cluster of one node."""

    def __init__(self, cluster: LocalCluster, storage: Path, data: Path, mtbf_s: float) -> None:
        self._cluster, self.folder = cluster, storage / "waste"
        options = {
            "--run": "waste",
            "--storage": storage,
            "--data": data,
            "--workers": "1:1",
            "--seq-len": SEQ_LEN,
            "--steps": 1_000_000,
            "--policy.prior-mtbf-s": mtbf_s,
            # So many failures are what is asked for here, and no crash loop.
            "--elastic.same-failure-tries": 1000,
            "--elastic.max-failures": "worker_error=0",
            "--elastic.backoff-s": 0,
        }
        flags = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, "jobs/pretrain.py", *flags]
        self._job = cluster.submit(command, working_dir=ROOT)

    def wait_for_steps(self, attempts: int) -> int:
        """Waits for a step of a later attempt than so many; returns its number."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            last = deque(read_lines(self.folder / STEPS_NAME), maxlen=1)
            if last and last[0]["generation"] > attempts:
                return int(last[0]["generation"])
            if self._cluster.job_status(self._job) in ("FAILED", "STOPPED", "SUCCEEDED"):
                break
            time.sleep(0.1)
        logs = self._cluster.job_logs(self._job)[-3000:]
        raise RayCkptError(f"the run did not come to a step of attempt {attempts + 1}:\n{logs}")

    def strike(self) -> None:
        """Kills the worker."""
        raylets = {node.raylet_pid for node in self._cluster.nodes() if node.alive}
        for process in psutil.process_iter(["cmdline", "ppid"]):
            words = " ".join(process.info["cmdline"] or [])
            if "RayTrainWorker" in words and process.info["ppid"] in raylets:
                os.kill(process.pid, signal.SIGKILL)


def outcome(run_dir: Path, prior_mtbf_s: float) -> dict[str, Any]:
    """What was lost for each useful second, and what should have been; with the numbers that it follows from.

    Args:
        run_dir: the run's folder.
        prior_mtbf_s: what the run believed before it saw failures, seconds.
    """
    ledger, memory = read_ledger(run_dir), recall(run_dir)
    if ledger is None or not memory.commits:
        raise RayCkptError(f"{run_dir}: nothing was trained, or nothing saved")
    buckets = ledger.buckets
    useful = buckets["useful"]
    saving = buckets["stall"] + buckets["slowdown"]
    restarts = [restart.seconds for restart in ledger.restarts if restart.complete]
    belief = FailureModel(ScalePrior(job_mtbf_s=prior_mtbf_s), memory.seen()).at(1)
    interval, cost = useful / memory.commits, saving / memory.commits
    upload, restart = memory.upload_s or 0.0, statistics.fmean(restarts)

    def lost(mtbf: float) -> float:
        return growth(interval, cost, 1 / mtbf, upload) * (1 + restart / mtbf) - 1

    again = sum(buckets[name] for name in PHASES)
    return {
        "failures": memory.failures,
        "useful_s": useful,
        "interval_s": interval,
        "save_s": cost,
        "upload_s": upload,
        "restart_s": restart,
        "mtbf_s": belief.mtbf_s,
        "measured": (saving + buckets["rework"] + again) / useful,
        "measured_rework": buckets["rework"] / useful,
        "measured_saving": saving / useful,
        "measured_restart": again / useful,
        "predicted": lost(belief.mtbf_s),
        "predicted_low": lost(belief.high_s),
        "predicted_high": lost(belief.low_s),
    }


def measure(config: BenchConfig) -> dict[str, Any]:
    """One run with its failures."""
    moments = random.Random(config.seed)
    with tempfile.TemporaryDirectory(prefix="bench-waste-") as folder:
        data = Path(folder) / "data"
        with private_ray(2):
            prepare(PrepareOptions(output=str(data), seq_len=SEQ_LEN))
        with LocalCluster(1, 2, settings=Settings(page=False)) as cluster:
            run = _Run(cluster, Path(folder), data, config.mtbf_s)
            attempt = 0
            for number in range(5 if config.quick else config.failures):
                attempt = run.wait_for_steps(attempt)
                time.sleep(moments.expovariate(1 / config.mtbf_s))
                run.strike()
                print(f"failure {number + 1}, of attempt {attempt}", flush=True)
            run.wait_for_steps(attempt)
        return outcome(run.folder, config.mtbf_s)


def main() -> int:
    """Measures, prints a table, and holds what was lost against what was predicted."""
    config = parse(BenchConfig)
    row = measure(config)
    for name, value in row.items():
        print(f"{name:<18}{value:>10.4g}")
    bounds = row["predicted_low"], row["predicted_high"]
    target = between("lost for each useful second", row["measured"], *bounds)
    return conclude([target], [row], config.json)


if __name__ == "__main__":
    run_main(main)
