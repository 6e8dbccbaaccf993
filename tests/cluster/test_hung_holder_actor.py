"""The tracker as an actor, and the actor of a node's copies stopped by SIGSTOP: whoever else calls has its answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import xxhash

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker.actor import start_tracker
from ray_ckpt.tracker.core import RunFacts, TrackerOptions

pytestmark = pytest.mark.cluster

SOON_S = 5.0  # far less than a commit waits for a node


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    ray.shutdown()
    for name in [name for name in os.environ if name.startswith("RAY_") and "CKPT" not in name]:
        monkeypatch.delenv(name)
    ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)
    yield ray.get_runtime_context().get_node_id()
    ray.shutdown()


def save(folder: Path, step: int, node: str) -> dict[str, Any]:
    """What a worker writes, and tells."""
    files = []
    folder.mkdir(parents=True)
    for path in (".metadata", "__0_0.distcp"):
        data = f"{path} of step {step}".encode()
        (folder / path).write_bytes(data)
        files.append(
            {"path": path, "bytes": len(data), "checksum": xxhash.xxh3_128_hexdigest(data)}
        )
    return {
        "step": step, "samples": step, "tokens": step, "world_size": 1, "files": files,
        "places": {node: [each["path"] for each in files]}, "stall_s": 0.1, "upload_s": 0.1, "metrics": {},
        "guard": {}, "error": None, "bitwise_comparable": True,
    }  # fmt: skip


def test_while_a_commit_waits_for_a_stopped_holder_all_other_calls_are_answered(
    tmp_path: Path, one_node: str
) -> None:
    stack = Stack(use=("memory", "durable"), replicas=0, memory_folder=str(tmp_path / "memory"))
    run_dir = tmp_path / "runs" / "demo"
    run_dir.mkdir(parents=True)
    facts = RunFacts(
        run="demo", run_dir=str(run_dir), config_fingerprint="c", data_fingerprint="d", parallel="ddp", versions={}
    )  # fmt: skip
    options = TrackerOptions(limits=IntervalLimits(), prior_mtbf_s=3600.0, stack=stack)
    tracker = start_tracker(facts, options)
    attempt = ray.get(tracker.begin_attempt.remote(1, [one_node]), timeout=90)
    generation = attempt.generation
    root = stack.root("memory", run_dir) / CHECKPOINTS_DIR

    def line(step: int) -> dict[str, Any]:
        return {"step": step, "loss": 1.0, "step_time_s": 0.1, "sample_offset": step, "world_size": 1}  # fmt: skip

    def commit(step: int) -> Any:
        tracker.steps.remote(generation, [line(step)])
        made = save(root / checkpoint_name(step, generation), step, one_node)
        return tracker.commit.remote(generation, made)

    assert ray.get(commit(1), timeout=30)
    mine = psutil.Process().children(recursive=True)
    (holder,) = [each for each in mine if "ray::HolderActor" in " ".join(each.cmdline())]
    holder.send_signal(signal.SIGSTOP)
    try:
        waiting = commit(2)
        began_s = time.monotonic()
        for step in range(3, 9):
            directive = ray.get(tracker.steps.remote(generation, [line(step)]), timeout=SOON_S)
            assert directive.every_steps > 0
            assert ray.get(tracker.status.remote(), timeout=SOON_S)["step"] == step
            time.sleep(0.2)
        number = ray.get(tracker.request_save.remote("somebody asks"), timeout=SOON_S)
        assert ray.get(tracker.steps.remote(generation, []), timeout=SOON_S).save_request == number
        assert time.monotonic() - began_s < SOON_S + 6 * 0.2
        assert not ray.wait([waiting], timeout=0)[0], "and all the while the commit waits"
    finally:
        holder.send_signal(signal.SIGCONT)
    assert ray.get(waiting, timeout=30), "a holder that only slept commits its part"
    assert ray.get(tracker.status.remote(), timeout=SOON_S)["last_commit_step"] == 2
