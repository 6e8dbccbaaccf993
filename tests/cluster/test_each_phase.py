"""Every kind of interruption in every phase of training: the run ends, is exact, and its journal says what happened.

One run for a phase: its ranks stand still there in each attempt (``held.py``), and each attempt meets another kind. A
few pairs here are part of every run of the tests; all of them together take a quarter of an hour (``slow``).
"""

from __future__ import annotations

import contextlib
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
from worlds import make_data

from cluster.local import LocalCluster
from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view.summary import surviving_steps
from ray_ckpt.warm import WARM_VARIABLE

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "held.py"
HANG_S = 25.0
LIMIT_S = 150.0  # from the strike to the next attempt, or to the end, on a machine that does other things too
# A save is begun only if it can be done before: on a busy machine one takes seconds.
NOTICE_S = 20.0

# Kind in the journal, and whether the step that was worked on when it came is kept.
KINDS = {
    "error": ("worker_error", False),
    "kill": ("worker_error", False),
    "sigterm": ("preempted", True),
    "hang": ("hang", False),
    "node loss": ("node_loss", False),
    "drain": ("drain", True),
    "resize": ("resize", True),
    "stop": ("user_stop", True),
}
PHASES = ("start", "save", "evaluation", "compile", "restore")


def words_of(options: dict[str, Any]) -> list[str]:
    """A command line."""
    return ["--exact", *(str(word) for pair in options.items() for word in pair)]


class Told:
    """One run, its cluster, and what its ranks are told."""

    def __init__(self, cluster: LocalCluster, folder: Path, phase: str, steps: int) -> None:
        self._cluster, self.phase, self._job = cluster, phase, ""
        self.run_dir, self.marks = folder / "r", folder / "marks"
        self.marks.mkdir()
        self.options = {
            "--run": "r",
            "--storage": folder,
            "--marks": self.marks,
            "--phase": phase,
            "--data": folder / "data",
            "--steps": steps,
            "--workers": "1:3",
            "--global-batch": 8,
            "--micro-batch": 2,
            "--seq-len": 33,
            "--reading.feed": "local",
            "--policy.interval-steps": 3,
            "--elastic.hang-factor": 5,
            "--elastic.hang-min-s": HANG_S,
            "--elastic.hang-long-s": HANG_S,
            "--elastic.spare-after-s": 0.5,
            "--elastic.resize-check-s": 1,
            "--elastic.settle-s": 1,
            "--elastic.cooldown-s": 0,
            "--elastic.min-gain": 0,
            "--elastic.drain-margin-s": 2,
            # They fail at the same place again and again here, and all on purpose.
            "--elastic.max-fruitless-attempts": 50,
            "--elastic.same-failure-tries": 50,
            "--elastic.backoff-s": 0,
            "--elastic.exclude-after": 0,
        }

    def submit(self) -> None:
        command = [sys.executable, str(PROGRAM.relative_to(ROOT)), *words_of(self.options)]
        self._job = self._cluster.submit(command, working_dir=ROOT)

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    def wait(self, what: str, holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            ended = self._cluster.job_status(self._job) not in ("PENDING", "RUNNING")
            if (ended and not holds()) or time.monotonic() > deadline:
                log = self._cluster.job_logs(self._job)[-4000:]
                raise AssertionError(f"no {what} within {limit_s} s in phase {self.phase}\n{log}")
            time.sleep(0.1)

    def wait_until_held(self, attempt: int) -> None:
        self.wait(f"attempt {attempt} that stands still", (self.marks / f"held-{attempt}").exists)

    def end(self, limit_s: float = LIMIT_S) -> str:
        return self._cluster.wait_job(self._job, limit_s)

    def logs(self) -> str:
        return self._cluster.job_logs(self._job)

    def tell(self, word: str) -> None:
        (self.marks / word).touch()

    # ---- what strikes ---------------------------------------------------------------------------

    def strike(self, kind: str, attempt: int) -> None:
        """One kind of interruption, while an attempt stands still; it goes on where it has to, to end as planned."""
        getattr(self, "_" + kind.replace(" ", "_"))(attempt)
        if KINDS[kind][1]:
            self.tell(f"go-{attempt}")

    def _workers(self) -> dict[str, psutil.Process]:
        """Node to the process of its training worker."""
        nodes = {node.raylet_pid: node.name for node in self._cluster.nodes() if node.alive}
        return {
            nodes[process.info["ppid"]]: process
            for process in psutil.process_iter(["cmdline", "ppid"])
            if "RayTrainWorker" in " ".join(process.info["cmdline"] or [])
            and process.info["ppid"] in nodes
        }

    @property
    def workers(self) -> int:
        """Workers of the present group."""
        return int(self.events("attempt_started")[-1]["world_size"])

    @property
    def spares(self) -> int:
        """Processes that wait for a worker."""
        raylets = {node.raylet_pid for node in self._cluster.nodes() if node.alive}
        found = 0
        for process in psutil.process_iter(["cmdline", "ppid"]):
            if process.info["ppid"] in raylets and "IDLE" in " ".join(
                process.info["cmdline"] or []
            ):
                with contextlib.suppress(psutil.Error):
                    found += process.environ().get(WARM_VARIABLE) == "1"
        return found

    def _error(self, attempt: int) -> None:
        self.tell(f"raise-{attempt}")

    def _kill(self, attempt: int) -> None:
        os.kill(list(self._workers().values())[-1].pid, signal.SIGKILL)

    def _sigterm(self, attempt: int) -> None:
        os.kill(list(self._workers().values())[-1].pid, signal.SIGTERM)

    def _hang(self, attempt: int) -> None:
        os.kill(list(self._workers().values())[-1].pid, signal.SIGSTOP)
        self.tell(f"go-{attempt}")

    def _node_loss(self, attempt: int) -> None:
        self._cluster.kill(next(name for name in sorted(self._workers()) if name != "node0"))

    def _drain(self, attempt: int) -> None:
        node = next(name for name in sorted(self._workers()) if name != "node0")
        self._cluster.drain(node, deadline_s=NOTICE_S)
        self.wait("drain that is heard of", lambda: bool(self.events("drain_notice")), 20)

    def _resize(self, attempt: int) -> None:
        self._cluster.add()
        grown = lambda: any(e["why"] == "grow" for e in self.events("resize_decision"))  # noqa: E731
        if self.phase != "save":
            self.wait("decision to grow", grown, HANG_S - 5)

    def _stop(self, attempt: int) -> None:
        # A job that is stopped gets SIGTERM in its driver, as from `ray job stop`.
        command = [sys.executable, "-m", "ray_ckpt", "stop", str(self.run_dir), "--timeout-s", "60"]
        stopping = subprocess.Popen(
            command,
            env=self._cluster.client_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.wait("request to stop", lambda: bool(self.events("stop_requested")), 30)
        self.tell(f"go-{attempt}")
        said, _ = stopping.communicate(timeout=90)
        assert stopping.returncode == 0, said
        self.end()
        self.submit()


def train_alone(folder: Path, options: dict[str, Any]) -> subprocess.Popen[str]:
    """The run that nothing happens to, on one worker without Ray: its bits are those of any number of workers."""
    options = {**options, "--storage": folder, "--phase": "none", "--workers": 1}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words_of(options)],
        env={**os.environ, "HELD_ALONE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def play(
    folder: Path,
    phase: str,
    kinds: tuple[str, ...],
    steps: int,
    *,
    nodes: int = 4,
    cpus: int = 1,
    spares: bool = False,
) -> Told:
    """A run that meets these kinds of interruptions, one in each attempt."""
    make_data(folder / "data", [64] * 12, seq_len=33, vocab=257)
    with LocalCluster(nodes, cpus) as cluster:
        told = Told(cluster, folder, phase, steps)
        told.submit()
        alone = train_alone(folder / "alone", told.options)
        for attempt, kind in enumerate(kinds, 1):
            told.wait_until_held(attempt)
            if spares:
                told.wait("spare processes", lambda: told.spares >= told.workers, 30)
            told.strike(kind, attempt)
        told.tell("go-all")
        status = told.end()
        assert status == "SUCCEEDED", told.logs()[-4000:]
        said, _ = alone.communicate(timeout=LIMIT_S)
        assert alone.returncode == 0, said
        deadline = time.monotonic() + 20
        while told.spares:
            assert time.monotonic() < deadline, "spare processes outlive their job"
            time.sleep(0.2)
    check(told, kinds, steps, surviving_steps(folder / "alone" / "r"))
    return told


def check(told: Told, kinds: tuple[str, ...], steps: int, whole: dict[int, Any]) -> None:
    """What must hold after it, whatever happened."""
    ends = [(end["kind"], end["lost_steps"]) for end in told.events("interruption")]
    planned = {name for name, keeps in KINDS.values() if keeps}
    assert all(lost == 0 for kind, lost in ends if kind in planned), ends
    expected = [KINDS[kind][0] for kind in kinds]
    if told.phase == "last step":
        # Who was to leave after that step has nowhere to go on: the run is complete.
        assert [kind for kind, _ in ends if kind not in planned] == [
            kind for kind in expected if kind not in planned
        ]
    else:
        assert [kind for kind, _ in ends] == expected, ends
    rows = surviving_steps(told.run_dir)
    assert list(rows) == list(range(1, steps + 1))
    names = ("loss_hex", "sample_offset", "sample_digest", "rng_digest")
    for step, row in rows.items():
        assert [row[n] for n in names] == [whole[step][n] for n in names], f"step {step}"
    threads = {path.name: path.read_text() for path in told.marks.glob("threads-*")}
    assert set(threads.values()) == {"1"}, threads
    ledger = read_ledger(told.run_dir)
    assert ledger is not None
    assert sum(ledger.buckets.values()) == pytest.approx(ledger.wall_s, rel=1e-3)
    assert min(ledger.buckets.values()) >= 0
    for each in ledger.restarts:
        assert each.seconds < LIMIT_S, each
        print(each.kind, {name: round(s, 1) for name, s in each.buckets.items()})
    print(f"goodput {ledger.goodput:.2f}, unknown {ledger.buckets['unknown']:.1f} s")


def test_a_kill_and_a_sigterm_in_an_evaluation_with_spare_processes(tmp_path: Path) -> None:
    told = play(tmp_path, "evaluation", ("kill", "sigterm"), 30, nodes=1, cpus=2, spares=True)
    taken = [(group["world_size"], group["spares"]) for group in told.events("group_started")]
    assert taken[0] == (2, 0)
    assert sum(spares for _, spares in taken[1:]) >= 2, f"spare processes were not used: {taken}"


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_every_kind_in_each_phase(tmp_path: Path, phase: str) -> None:
    # Beside a save the steps go on.
    play(tmp_path, phase, tuple(KINDS), 400 if phase == "save" else 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [("error", "kill", "sigterm"), ("hang", "drain"), ("node loss", "resize"), ("stop",)],
)
def test_every_kind_in_the_last_step(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    play(tmp_path, "last step", kinds, 12)
