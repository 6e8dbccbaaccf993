"""Progress of a run on the driver's output: lines in a job's log, a bar on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from ray.exceptions import RayError

from ray_ckpt.errors import RayCkptError
from ray_ckpt.tracker.client import RayTracker
from ray_ckpt.view.human import human_count, human_duration

POLL_S = 0.5
_BAR = 24


class Narrator:
    """Prints where a run is, from another thread, until it is stopped.

    Args:
        tracker: of the run.
        total_steps: last step.
        log_every: steps between lines, where the output is not a terminal.
    """

    def __init__(self, tracker: RayTracker, total_steps: int, log_every: int) -> None:
        self._tracker, self._total, self._every = tracker, total_steps, log_every
        self._stop = threading.Event()
        self._told = -1
        self._terminal = sys.stdout.isatty()
        self._thread = threading.Thread(target=self._run, name="narrator", daemon=True)

    def __enter__(self) -> Narrator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)
        if self._terminal:
            print(flush=True)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                status = self._tracker.call("status")
            except (RayError, RayCkptError):
                continue  # the tracker restarts, or the run ends: the trainer will say so
            if status["last"]:
                self._show(status)

    def _show(self, status: dict[str, Any]) -> None:
        step = status["last"]["step"]
        if self._terminal:
            done = min(_BAR, _BAR * step // self._total)
            bar = "#" * done + "-" * (_BAR - done)
            print(f"\r[{bar}] {progress_line(status, self._total)}\033[K", end="", flush=True)
        elif step // self._every != self._told // self._every or step == self._total != self._told:
            print(progress_line(status, self._total), flush=True)
        self._told = step


def progress_line(status: dict[str, Any], total_steps: int) -> str:
    """One line: step, loss, learning rate, speed, workers, last commit, next save and why."""
    last = status["last"]
    seconds = status["step_time_s"] or last["step_time_s"]
    speed = "? tokens/s"
    if seconds > 0:
        speed = f"{human_count(last['tokens'] / seconds)} tokens/s"
        if not last["tokens"]:  # images have none
            speed = f"{1 / seconds:.2f} steps/s"
    commit = status["last_commit_step"]
    saved = "no commit yet"
    if commit is not None:
        age = human_duration(max(0.0, time.time() - status["last_commit_time"]))
        saved = f"last commit step {commit} ({age} ago)"
    refused = status.get("refused", 0)
    if refused:
        saved += f", {refused} QUARANTINED by the guard"
    return (
        f"step {last['step']}/{total_steps}  loss {last['loss']:.4f}  lr {last['lr']:.2e}  {speed}  "
        f"{last['world_size']} worker{'s' if last['world_size'] > 1 else ''}  {saved}"
        f"{_next_save(status, total_steps)}"
    )


def _next_save(status: dict[str, Any], total_steps: int) -> str:
    if status["last_commit_step"] == total_steps:
        return ""
    step, failed = min(total_steps, status["next_save_step"]), status["failed_in_a_row"]
    tries = f"{failed} save{'s' if failed > 1 else ''} FAILED, " if failed else ""
    if step <= status["last"]["step"]:
        return f"  {tries}a save is under way"
    if failed:
        return f"  {tries}next try near step {step}"
    return f"  next save near step {step} ({status['decision']['reason'].split(':')[0]})"
