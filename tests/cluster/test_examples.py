"""The examples of adoption as people run them: a worker is killed, and the run goes on with the right sample."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_main_job import executed, journal, start, steps_done, wait_until

from ray_ckpt.data import BatchPlan, dataset_order
from ray_ckpt.data.own import OwnFeed
from ray_ckpt.elastic.control import digest_samples
from ray_ckpt.view.summary import surviving_steps

pytestmark = pytest.mark.cluster

JOBS = Path(__file__).resolve().parents[2] / "jobs"
EXAMPLES = ("example_ray_docs", "example_hf")
G, B, SAMPLES, STEPS = 16, 4, 600, 150  # four epochs


def expected_digests() -> list[str]:
    """Of the samples of each step, by arithmetic: nothing of the job is asked."""
    feed = OwnFeed(
        order=dataset_order(SAMPLES, global_batch=G, micro_batch=B, seed=0),
        plan=BatchPlan(global_batch=G, micro_batch=B, world_size=1, rank=0),
        make=iter,
    )
    return [f"{digest_samples(batch):016x}" for batch in feed.steps(0, STEPS)]


def workers_of(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Training workers of a job with a Ray of its own."""
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def command(example: str, storage: Path) -> list[str]:
    options = {
        "storage": storage,
        "run": example,
        "samples": SAMPLES,
        "global-batch": G,
        "micro-batch": B,
        "steps": STEPS,
        "workers": 2,
        "policy.interval-steps": 7,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(JOBS / f"{example}.py"), *flags]


def is_saved(run_dir: Path) -> bool:
    """Whether a checkpoint is committed, and there are steps after it to be lost."""
    if steps_done(run_dir) < 10:
        return False
    return bool(journal(run_dir, "commit"))


def is_missing(example: str) -> bool:
    return example == "example_hf" and importlib.util.find_spec("transformers") is None


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the examples' runs. They run beside each other: most of their time is waiting for Ray."""
    storage = tmp_path_factory.mktemp("examples")
    drivers = {
        example: start(command(example, storage), storage / f"{example}.log")
        for example in EXAMPLES
        if not is_missing(example)
    }
    struck: set[str] = set()

    def all_ended() -> bool:
        for example, driver in drivers.items():
            if example not in struck and is_saved(storage / example):
                workers_of(driver)[-1].send_signal(signal.SIGKILL)
                struck.add(example)
        return all(driver.poll() is not None for driver in drivers.values())

    try:
        wait_until(all_ended, 240, "the end of the examples")
    finally:
        for driver in drivers.values():
            driver.kill()
    for example, driver in drivers.items():
        assert driver.returncode == 0, (storage / f"{example}.log").read_text()[-3000:]
    assert struck == set(drivers), "each was struck while it trained"
    return {example: storage / example for example in drivers}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_goes_on_with_the_right_sample_after_a_worker_was_killed(
    ended: dict[str, Path], example: str
) -> None:
    if is_missing(example):
        pytest.skip("transformers is not installed: pip install -e '.[hf]'")
    run_dir = ended[example]
    assert [event["kind"] for event in journal(run_dir, "interruption")] == ["worker_error"]
    first, second = journal(run_dir, "restored")
    commits = [event["step"] for event in journal(run_dir, "commit") if event["generation"] == 1]
    assert (first["step"], second["step"]) == (0, max(commits))
    assert second["step"] >= 7
    rows = surviving_steps(run_dir)
    assert list(rows) == list(range(1, STEPS + 1))
    assert [row["sample_digest"] for row in rows.values()] == expected_digests()
    losses = [row["loss"] for row in rows.values()]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10]), "and it learns"
    assert all(row["tokens"] for row in executed(run_dir)) == (example == "example_hf")
