"""The interval follows what the run measures and meets, and says by what formula and numbers."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from worlds import events, make_config, make_data, run_world, train

from ray_ckpt.config import PolicyConfig

pytestmark = pytest.mark.dist


class _SlowStaging:
    """Makes each staging copy take longer, from a given step on."""

    def __init__(self, from_step: int, seconds: float) -> None:
        self.from_step, self.seconds = from_step, seconds

    def __call__(self, session: Any, step: int) -> None:
        if step == self.from_step:
            stager, seconds = session._saving._saver._stager, self.seconds
            begin = stager.begin

            def slow(state: Any) -> Any:
                time.sleep(seconds)
                return begin(state)

            stager.begin = slow


def test_a_longer_stall_makes_a_longer_interval_and_the_reason_has_the_numbers(
    tmp_path: Path,
) -> None:
    make_data(tmp_path / "data", [16] * 12)
    policy = PolicyConfig(min_interval_s=0.01, first_save_steps=4, prior_mtbf_s=20.0)
    config = make_config(tmp_path, steps=400, policy=policy)
    run_world(train, 2, config, None, False, _SlowStaging(120, 0.4))
    decisions = events(config, "decision")
    exact = [d for d in decisions if d["formula"] == "exact"]
    stalls = [float(re.search(r"stall C ([0-9.e+-]+) (ms|s)", d["reason"])[1]) for d in exact]  # type: ignore[index]
    units = [1e-3 if "ms, MTBF" in d["reason"] else 1.0 for d in exact]
    seconds = [stall * unit for stall, unit in zip(stalls, units, strict=True)]
    assert max(seconds) > 0.4, "the slow staging was not measured"
    before = min(d["interval_s"] for d, s in zip(exact, seconds, strict=True) if s < 0.2)
    after = max(d["interval_s"] for d, s in zip(exact, seconds, strict=True) if s > 0.4)
    assert after > 2 * before
    commits = [event["step"] for event in events(config, "commit")]
    gaps = [b - a for a, b in pairwise(commits)]
    assert max(gaps) > 2 * min(gaps)
    assert all("MTBF M" in d["reason"] and "at 2 workers" in d["reason"] for d in exact)


class _Resized:
    """After a step the cluster has room for another number of workers, as Ray Train's controller tells it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, session: Any, step: int) -> None:
        if step == self.step and session.rank == 0:
            session._steward.exchange(flush=True)
            session._talk.tracker.call(
                "interruption", kind="resize", cause="the cluster has room for 1 worker"
            )


class _SlowStorage:
    """Makes each upload take longer, from a given step on."""

    def __init__(self, from_step: int, seconds: float) -> None:
        self.from_step, self.seconds = from_step, seconds

    def __call__(self, session: Any, step: int) -> None:
        if step == self.from_step:
            saver, seconds = session._saving._saver, self.seconds
            write = saver._write

            def slow(*args: Any) -> Any:
                time.sleep(seconds)
                return write(*args)

            saver._write = slow


def test_a_failure_a_resize_and_a_slower_storage_change_the_interval_and_each_is_told(
    tmp_path: Path,
) -> None:
    make_data(tmp_path / "data", [16] * 12)
    # Failures come with the workers: one every half minute for each of them.
    policy = PolicyConfig(
        min_interval_s=0.01,
        first_save_steps=4,
        prior_mtbf_s=600.0,
        prior_per_1000_worker_days=1000 * 86400 / 30.0,
    )
    config = make_config(tmp_path, steps=150, policy=policy)
    run_world(train, 2, config, 30)  # the workers vanish
    run_world(train, 2, config, 60, False, _Resized(60))
    run_world(train, 1, config, None, False, _SlowStorage(70, 1.5))
    lines = events(config)
    ends = [k for k, line in enumerate(lines) if line["event"] == "interruption"]
    assert [lines[k]["kind"] for k in ends] == ["lost", "resize"]

    def decided(part: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in part if line["event"] == "decision"]

    # Nothing is measured between the end of an attempt and the next decision: what differs is M.
    before, failed = decided(lines[: ends[0]])[-1], decided(lines[ends[0] :])[0]
    assert "at 2 workers (prior, no failure yet" in before["reason"]
    assert "at 2 workers (1 failure seen" in failed["reason"]
    assert failed["interval_s"] < 0.9 * before["interval_s"]
    many = decided(lines[: ends[1]])[-1]
    resized, *later = [line for line in decided(lines) if line["generation"] == 3]
    assert "at 2 workers (1 failure seen" in many["reason"]
    assert "at 1 worker (1 failure seen" in resized["reason"], "a planned end is no failure"
    assert resized["interval_s"] > 1.2 * many["interval_s"]
    raised = r"raised to [0-9.]+ s, the upload time"
    slow = [line for line in later if re.search(raised, line["reason"])]
    assert slow, "the slow storage was not seen"
    assert slow[-1]["interval_s"] >= 1.5
