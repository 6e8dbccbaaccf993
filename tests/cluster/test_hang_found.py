"""A worker that stops in the middle of training is found, named, replaced, and the run ends as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_main_job import (
    PRETRAIN,
    environment,
    executed,
    journal,
    processes_of,
    steps_done,
    wait_until,
)
from worlds import make_data

from ray_ckpt.view.summary import surviving_steps

pytestmark = pytest.mark.cluster

INTERVAL_STEPS = 20
STEPS = 200  # so many that none is the last one before a worker is found and frozen


def workers_of(driver: int) -> list[psutil.Process]:
    """Processes of the training workers of a job."""
    below = [child for p in processes_of(driver) for child in p.children(recursive=True)]
    return list({p for p in below if "RayTrainWorker" in " ".join(p.cmdline())})


def test_a_frozen_worker_is_found_and_the_run_goes_on(tmp_path: Path) -> None:
    make_data(tmp_path / "rows", [64] * 20, seq_len=33, vocab=257)
    run_dir, log = tmp_path / "r", tmp_path / "log"
    options = {
        "run": "r",
        "storage": tmp_path,
        "data": tmp_path / "rows",
        "steps": STEPS,
        "global-batch": 8,
        "micro-batch": 2,
        "seq-len": 33,
        "workers": 2,
        "model.dim": 32,
        "model.num-layers": 2,
        "policy.interval-steps": INTERVAL_STEPS,
        "reading.feed": "local",
        "elastic.hang-factor": 10,
        "elastic.hang-min-s": 4,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    driver = subprocess.Popen(
        [sys.executable, str(PRETRAIN), *words],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env=environment(),
        start_new_session=True,
    )
    try:
        wait_until(lambda: steps_done(run_dir) >= 22, 120, f"step 22, see {log}")
        frozen = sorted(workers_of(driver.pid), key=lambda p: p.pid)[-1]
        os.kill(frozen.pid, signal.SIGSTOP)
        assert driver.wait(timeout=120) == 0, log.read_text()[-5000:]
    finally:
        driver.kill()
    assert not psutil.pid_exists(frozen.pid), "the frozen worker was left behind"
    (end,) = journal(run_dir, "interruption")
    saved = [e["step"] for e in journal(run_dir, "commit") if e["generation"] == 1]
    assert [e["step"] for e in journal(run_dir, "restored")] == [0, saved[-1]]
    # The one before it, where the newest was still being written.
    assert 0 <= end["step"] - saved[-1] <= 2 * INTERVAL_STEPS
    assert end["kind"] == "hang", end
    (found,) = journal(run_dir, "hang")
    files = sorted((run_dir / found["dumps"]).iterdir())
    assert [path.name for path in files] == ["rank-0000.txt", "rank-0001.txt"]
    # Which rank it was, its own file says: the one that was looked at from outside.
    silent = [i for i, path in enumerate(files) if "no answer" in path.read_text()]
    assert end["suspect_ranks"] == found["suspects"] == silent
    text = files[silent[0]].read_text()
    assert f"process {frozen.pid}:" in text
    assert re.search(r"State: T|py-spy dump", text), text
    answered = files[1 - silent[0]].read_text()
    assert "step_end" in answered or "backward" in answered, answered
    assert len(end["suspect_nodes"]) == 1
    assert end["at_step"] > end["step"], "the worker that was left knows the step that broke"
    # What was done twice has the same bits both times, and no step is missing.
    assert [line["step"] for line in surviving_steps(run_dir).values()] == list(range(1, STEPS + 1))
    seen: dict[int, set[tuple[str, str]]] = {}
    for line in executed(run_dir):
        seen.setdefault(line["step"], set()).add((line["loss_hex"], line["sample_digest"]))
    assert all(len(bits) == 1 for bits in seen.values()), seen
