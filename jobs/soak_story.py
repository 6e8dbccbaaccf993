"""The run of a soak, watched from outside: how far it is, whether it gets on, and what to tell when it does not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak_events import command_line

from cluster.local import ClusterError, LocalCluster
from ray_ckpt.errors import RayCkptError
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME
from ray_ckpt.view.tail import Tail

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_POLL_S = 0.2
_ASK_S = 1.0  # between two questions to the job server


class SoakError(RayCkptError):
    """The run does not get on, or ended by itself; the message is its story so far."""


class Story:
    """One run, through all jobs that drive it.

    Args:
        cluster: where it trains.
        run_dir: its folder.
        command: of a job, for a number of steps.
        root: folder that a job brings along.
        patience_s: longest wait for a new step, seconds.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        run_dir: Path,
        command: Callable[[int], list[str]],
        root: Path,
        patience_s: float,
    ) -> None:
        self._cluster, self._run_dir, self._command, self._root = cluster, run_dir, command, root
        self._patience_s = patience_s
        self._steps, self._journal = Tail(run_dir / STEPS_NAME), Tail(run_dir / JOURNAL_NAME)
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.jobs: list[str] = []

    def submit(self, steps: int) -> None:
        """Starts a job that drives the run to a step."""
        self.jobs.append(self._cluster.submit(self._command(steps), working_dir=self._root))

    def best(self) -> int:
        """The highest step that was ever made."""
        self._read()
        return max((int(row["step"]) for row in self.rows[-1000:]), default=0)

    def generation(self) -> int:
        """The newest attempt."""
        self._read()
        begun = (
            int(e["generation"]) for e in reversed(self.events) if e["event"] == "attempt_started"
        )
        return next(begun, 0)

    def _read(self) -> None:
        for tail, found in ((self._steps, self.rows), (self._journal, self.events)):
            tail.look()
            while more := tail.read():
                found += more

    def reach(
        self, step: int, why: str, steps: int, *, may_end: bool = False, beyond: int = 0
    ) -> int:
        """Waits until a step is made; the patience is for each new step, not for all of them.

        Args:
            step: to reach.
            why: it is waited for.
            steps: of the run, for a job that takes over.
            may_end: whether a job that has failed is expected, and the same command follows.
            beyond: an attempt whose own steps do not count.

        Raises:
            SoakError: no new step within the patience, or the job ended.
        """
        best = self.best()
        deadline, ask = time.monotonic() + self._patience_s, 0.0
        while best < step or self.generation() <= beyond:
            if time.monotonic() >= ask:
                status = self._status()
                if status == "FAILED" and may_end:
                    self.submit(steps)
                    may_end = False
                elif status in ENDED:
                    raise self.stuck(f"{why}: the job ended as {status}")
                ask = time.monotonic() + _ASK_S
            time.sleep(_POLL_S)
            before, best = best, self.best()
            if best > before:
                deadline = time.monotonic() + self._patience_s
            elif time.monotonic() >= deadline:
                raise self.stuck(f"{why}: no step after {best} within {self._patience_s:g} s")
        return best

    def stop(self) -> None:
        """Asks for the end of the job, as people do, and waits for it."""
        command = [sys.executable, "-m", "ray_ckpt", "stop", str(self._run_dir)]
        done = subprocess.run(
            [*command, "--timeout-s", str(self._patience_s)],
            env=self._cluster.client_environ(),
            cwd=self._root,
            capture_output=True,
            text=True,
            timeout=self._patience_s + 60.0,
            check=False,
        )
        if done.returncode != 0:
            raise self.stuck(f"ray-ckpt stop: {done.stderr}")
        self._cluster.wait_job(self.jobs[-1], self._patience_s)
        self.best()

    def finish(self) -> None:
        """Waits for the end of a run that is to reach its last step."""
        if (status := self._cluster.wait_job(self.jobs[-1], self._patience_s)) != "SUCCEEDED":
            raise self.stuck(f"the last job ended as {status}")
        self.best()

    def stuck(self, what: str) -> SoakError:
        """All that helps to understand it."""
        self.best()
        parts = [what, "journal:", *(str(event)[:400] for event in self.events[-25:])]
        parts += ["last steps:", *(str(row)[:160] for row in self.rows[-3:])]
        try:
            nodes = self._cluster.nodes()
            parts += ["nodes:", *(f"{node.name} {node.state} {node.reason}" for node in nodes)]
            for node in nodes:
                if node.alive:
                    lines = (
                        f"{pid} {command_line(pid)}"[:160]
                        for pid in self._cluster.processes(node.name)
                    )
                    parts += [f"{node.name}:", *(line for line in lines if "ray::" in line)]
            parts += ["log of the job:", self._cluster.job_logs(self.jobs[-1])[-6000:]]
        except (ClusterError, RuntimeError, OSError) as error:
            parts.append(f"the cluster does not tell more: {error}")
        return SoakError("\n".join(parts))

    def _status(self) -> str:
        try:
            return self._cluster.job_status(self.jobs[-1])
        except (RuntimeError, OSError):  # a head that is busy
            return "UNKNOWN"
