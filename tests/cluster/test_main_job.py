"""The main job as people run it: killed, started again, asked wrongly."""

from __future__ import annotations

import json
import os
import random
import re
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

from ray_ckpt.view.summary import surviving_steps

pytestmark = pytest.mark.cluster

PRETRAIN = Path(__file__).resolve().parents[2] / "jobs" / "pretrain.py"
SNAPSHOT = "checkpoint_manager_snapshot.json"
CHECKPOINT = re.compile(r"step-\d{8}-g\d+")
SMALL = [
    *(
        "--global-batch",
        "8",
        "--micro-batch",
        "2",
        "--seq-len",
        "33",
        "--workers",
        "2",
        "--log-every",
        "5",
    ),
    *("--model.dim", "32", "--model.num-layers", "2", "--model.dropout", "0.1"),
    *("--policy.interval-steps", "7"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "rows"
    make_data(folder, [64] * 40, seq_len=33, vocab=257)
    return folder


def command(storage: Path, data: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        str(PRETRAIN),
        "--storage",
        str(storage),
        "--data",
        str(data),
        *SMALL,
        *more,
    ]


def environment() -> dict[str, str]:
    # A Ray that happens to run on this machine must not be joined.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return clean | {"RAY_worker_niceness": "0", "RAY_CKPT_DASHBOARD": "0"}


def run(args: list[str], timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        args, capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False
    )


def start(args: list[str], log: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        args,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env=environment(),
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.1)


def executed(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of the steps so far, without one that is being written."""
    path = run_dir / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def steps_done(run_dir: Path) -> int:
    return max((line["step"] for line in executed(run_dir)), default=0)


def processes_of(pid: int) -> list[psutil.Process]:
    """Ray processes of the job with this driver: its temporary folder has the driver's number."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if re.search(rf"/ray_ckpt-\d+/{pid}-", line):
            found.append(process)
    return found


def journal(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def test_a_job_killed_twice_repeats_the_uninterrupted_run_bit_for_bit(
    tmp_path: Path, data: Path
) -> None:
    steps = 300  # a killed driver's workers go on until their Ray has noticed: they must not come to the end
    whole = run(command(tmp_path, data, "--run", "whole", "--steps", str(steps)))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert f"step {steps}" in whole.stdout
    told = (tmp_path / "whole" / SNAPSHOT).read_text().replace("whole", "broken")
    assert f"step-{steps:08d}-g1" in told, "Ray Train was not told of the commit"
    run_dir = tmp_path / "broken"
    args = command(tmp_path, data, "--run", "broken", "--steps", str(steps))
    chance = random.Random()
    for round_ in range(2):
        # Steps of this driver's own attempt: those of a killed one go on until its Ray has noticed.
        count, attempt = chance.randint(3, 18), round_ + 1
        log = tmp_path / f"log-{round_}"
        driver = start(args, log)
        try:
            wait_until(
                lambda count=count, attempt=attempt: (
                    [line["generation"] for line in executed(run_dir)].count(attempt) >= count
                ),
                120,
                f"{count} steps of attempt {attempt}\n{log.read_text()}",
            )
        finally:
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
        killed = time.monotonic()
        if round_:  # once at once, once after everything of it is gone
            wait_until(
                lambda pid=driver.pid: not processes_of(pid), 60, "the end of the killed job's Ray"
            )
            print(f"the Ray of a killed driver was gone after {time.monotonic() - killed:.1f} s")
        # Ray's own list of checkpoints must not decide whether a run can go on (ray#62391): gone, and wrong.
        if round_:
            (run_dir / SNAPSHOT).write_text(CHECKPOINT.sub("step-00000099-g9", told))
        else:
            (run_dir / SNAPSHOT).unlink(missing_ok=True)
    last = run(args)
    assert last.returncode == 0, last.stdout + last.stderr
    assert "resumes at step" in last.stdout
    assert "newest committed checkpoint" in last.stdout
    mine, reference = surviving_steps(run_dir), surviving_steps(tmp_path / "whole")
    assert [row["loss_hex"] for row in mine.values()] == [
        row["loss_hex"] for row in reference.values()
    ]
    assert [r["sample_digest"] for r in mine.values()] == [
        r["sample_digest"] for r in reference.values()
    ]
    assert [event["kind"] for event in journal(run_dir, "interruption")] == ["lost", "lost"]
    other = run([*args, "--global-batch", "16"])
    assert other.returncode == 2
    assert "--global-batch was 8, now 16" in other.stderr
    again = run(args)
    assert again.returncode == 0
    assert "is complete" in again.stdout
    assert not processes_of(driver.pid)


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--micro-batch", "3"], 2, "does not divide"),
        (["--workers", "1:9"], 2, "at most 4 workers"),
        (["--no-such-option", "1"], 2, "no-such-option"),
        (["--seq-len", "64"], 2, "have 33 tokens"),
        (["--storage", "/dev/null/runs"], 1, "cannot be written"),
        (["--storage", "s3://bucket/runs"], 2, "only folders"),
        (["--run", "../x"], 2, "folder's name"),
        (["--data", "/proc/self"], 1, "foreign"),
        (["--data", "/nowhere/rows"], 1, "does not exist"),
        (["--model.num-heads", "3"], 2, "num_heads"),
        (["--global-batch", "8000"], 2, "less than one global batch"),
    ],
)
def test_a_mistake_ends_at_once_with_one_clear_message(
    tmp_path: Path, data: Path, more: list[str], code: int, words: str
) -> None:
    started = time.monotonic()
    # A second --data would be a mixture of two.
    rows, more = (Path(more[1]), []) if more[0] == "--data" else (data, more)
    result = run([*command(tmp_path, rows), *more], timeout_s=60)
    assert result.returncode == code, result.stdout + result.stderr
    message = " ".join(result.stderr.replace("│", " ").split())
    assert words in message
    assert "Traceback" not in result.stderr
    assert time.monotonic() - started < 30
    assert not list(tmp_path.glob("*/checkpoints/*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_by_signal_saves_first_and_a_run_has_one_driver(
    tmp_path: Path, data: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "r"
    args = command(
        tmp_path, data, "--run", "r", "--steps", "20000", "--policy.interval-steps", "100000"
    )
    log = tmp_path / "log"
    driver = start(args, log)
    try:
        wait_until(lambda: steps_done(run_dir) >= 15, 120, f"step 15\n{log.read_text()}")
        if number == signal.SIGTERM:
            second = run(args)
            assert second.returncode == 2, second.stdout + second.stderr
            assert "is being driven by another process" in second.stderr
            assert driver.poll() is None
        driver.send_signal(number)
        assert driver.wait(timeout=90) == 128 + number, log.read_text()[-3000:]
    finally:
        driver.kill()
    end = journal(run_dir, "interruption")[-1]
    assert (end["kind"], end["lost_steps"]) == ("user_stop", 0)
    assert journal(run_dir, "commit")[-1]["step"] == end["step"] >= 15
    assert "stopped by" in log.read_text()
