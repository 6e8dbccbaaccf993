"""Runs the script of a proof on a many-node Ray cluster on this machine: workers and nodes die, nodes join.

Run as a job it is the training program of the proof; ``jobs/prove.py --cluster`` submits it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from ray import cloudpickle

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pretrain  # noqa: E402

import ray_ckpt  # noqa: E402
from cluster.local import LocalCluster  # noqa: E402
from ray_ckpt.config import ElasticConfig  # noqa: E402
from ray_ckpt.errors import RayCkptError  # noqa: E402
from ray_ckpt.options import run_main  # noqa: E402
from ray_ckpt.prove.plant import gate_path, plant_fault, plant_gates, reached_path  # noqa: E402
from ray_ckpt.prove.script import Phase, Script  # noqa: E402
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines  # noqa: E402

cloudpickle.register_pickle_by_value(pretrain)

PLAN = "RAY_CKPT_PROOF"  # environment variable: the file with what the job is to do
TIMEOUT_S = 240.0


def run_on_cluster(config: Any, train: Callable[[Any], None], script: Script, fault: str) -> None:
    """Runs a script as a job on a cluster of as many nodes as it needs workers.

    Args:
        config: of the run.
        train: ignored but for its name: the job trains with ``jobs/pretrain.py``'s function.
        script: what happens.
        fault: planted in every attempt that resumes.
    """
    run_dir = config.run_dir
    gates = run_dir / "gates"
    gates.mkdir(parents=True)
    config = replace(config, elastic=ElasticConfig(resize_check_s=3.0))
    plan = run_dir / "proof.plan"
    plan.write_bytes(cloudpickle.dumps((config, str(gates), fault)))
    for phase, end in zip(script.phases, script.ends, strict=True):
        if phase.event:
            gate_path(gates, end).touch()
    with LocalCluster(script.phases[0].world, 1) as cluster:
        story = _Story(cluster, run_dir, gates, plan)
        story.submit()
        following = [*script.phases[1:], None]
        for phase, after, end in zip(script.phases, following, script.ends, strict=True):
            if after is None:
                story.finish()
            else:
                story.reach(end, phase.world)
                story.happen(phase.event, after, end)


class _Story:
    """The cluster, the job, and what has happened to them."""

    def __init__(self, cluster: LocalCluster, run_dir: Path, gates: Path, plan: Path) -> None:
        self._cluster, self._run_dir, self._gates, self._plan = cluster, run_dir, gates, plan
        self._job = ""

    def submit(self) -> None:
        command = [sys.executable, "jobs/prove_cluster.py"]
        self._job = self._cluster.submit(command, ROOT, {PLAN: str(self._plan)})

    def finish(self) -> None:
        if self._cluster.wait_job(self._job, TIMEOUT_S) != "SUCCEEDED":
            raise RayCkptError(
                f"the job of the proof failed:\n{self._cluster.job_logs(self._job)[-3000:]}"
            )

    def reach(self, step: int, world: int) -> None:
        """Waits until the run stands at the gate of a step."""
        reached = reached_path(self._gates, step)
        self._wait(f"step {step} on {world} workers", lambda row: reached.exists())

    def happen(self, event: str, after: Phase, end: int) -> None:
        """Makes an event, and sees to it that the next phase has as many nodes as it needs."""
        alive = [node.name for node in self._cluster.nodes() if node.alive]
        surplus = [name for name in reversed(alive) if name != "node0"][
            : max(0, len(alive) - after.world)
        ]
        attempts = self._attempts()
        if event == "stop":
            self._stop_driver()
        for _ in range(after.world - len(alive)):
            self._cluster.add()
        if event == "resize" and surplus:
            for name in surplus:
                self._cluster.drain(name, deadline_s=5.0, kill_at_deadline=True)
        else:
            for name in surplus:
                self._cluster.kill(name)
        if event == "kill" and not surplus:
            self._cluster.wait_for_nodes(after.world)
            self._kill_worker()
        if event != "resize":
            gate_path(self._gates, end).unlink()
        if event == "stop":
            self.submit()
        what = f"a new attempt with {after.world} workers after {event}"
        self._wait(
            what, lambda row: row["generation"] > attempts and row["world_size"] == after.world
        )
        gate_path(self._gates, end).unlink(missing_ok=True)

    def _attempts(self) -> int:
        return max((row["generation"] for row in read_lines(self._run_dir / STEPS_NAME)), default=0)

    def _stop_driver(self) -> None:
        """Kills the driver of the job, as a machine that goes away does, and waits for its workers to go."""
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if any(word.endswith("prove_cluster.py") for word in line) and self._mine(process):
                process.send_signal(signal.SIGKILL)
        self._cluster.wait_job(self._job, TIMEOUT_S)

    def _kill_worker(self) -> None:
        victims = [
            process
            for process in psutil.process_iter(["cmdline"])
            if "RayTrainWorker" in " ".join(process.info["cmdline"] or []) and self._child(process)
        ]
        victims[-1].send_signal(signal.SIGKILL)

    def _mine(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(PLAN) == str(self._plan))
        except psutil.Error:
            return False

    def _child(self, process: psutil.Process) -> bool:
        raylets = {node.raylet_pid for node in self._cluster.nodes()}
        try:
            return process.ppid() in raylets
        except psutil.Error:
            return False

    def _wait(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            rows = list(read_lines(self._run_dir / STEPS_NAME))
            if rows and holds(rows[-1]):
                return
            status = self._cluster.job_status(self._job)
            if status in ("FAILED", "STOPPED", "SUCCEEDED"):
                break
            time.sleep(0.2)
        logs = self._cluster.job_logs(self._job)[-3000:]
        raise RayCkptError(f"the proof did not come to {what}:\n{logs}")


def job() -> int:
    """The training program that a proof submits."""
    config, gates, fault = cloudpickle.loads(Path(os.environ[PLAN]).read_bytes())

    def planted(config: Any) -> None:
        plant_gates(Path(gates))
        if fault:
            plant_fault(fault)
        pretrain.train(config)

    return ray_ckpt.run(config, planted)


if __name__ == "__main__":
    run_main(job)
