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


def decided(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "decision"]


def test_a_failure_and_a_resize_change_the_interval_and_each_is_told(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    # Failures come with the workers: rare ones, so that no upload is longer than the interval, on any machine.
    policy = PolicyConfig(
        min_interval_s=0.01,
        first_save_steps=4,
        prior_mtbf_s=20_000.0,
        prior_per_1000_worker_days=1000 * 86400 / 1000.0,
    )
    config = make_config(tmp_path, steps=400, policy=policy)
    run_world(train, 2, config, 20)  # the workers vanish
    run_world(train, 2, config, 30, False, _Resized(30))
    run_world(train, 1, config, 35)
    lines = events(config)
    ends = [k for k, line in enumerate(lines) if line["event"] == "interruption"]
    assert [lines[k]["kind"] for k in ends] == ["lost", "resize"]
    # Nothing is measured between the end of an attempt and the next decision: what differs is M.
    before, failed = decided(lines[: ends[0]])[-1], decided(lines[ends[0] :])[0]
    assert "at 2 workers (prior, no failure yet" in before["reason"]
    assert "at 2 workers (1 failure seen" in failed["reason"]
    assert failed["interval_s"] < 0.9 * before["interval_s"]
    # That decision holds until the resize, unless the pace has changed; the workers of before may have told of a few
    # steps more after it.
    starts = [k for k, line in enumerate(lines) if line["event"] == "attempt_started"]
    many, resized = decided(lines[: ends[1]])[-1], decided(lines[starts[-1] :])[0]
    assert "at 2 workers (1 failure seen" in many["reason"]
    assert "at 1 worker (1 failure seen" in resized["reason"], "a planned end is no failure"
    assert resized["interval_s"] > 1.2 * many["interval_s"]


def test_a_slower_storage_makes_a_longer_interval_and_the_reason_says_so(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    policy = PolicyConfig(min_interval_s=0.01, first_save_steps=4, prior_mtbf_s=10.0)
    config = make_config(tmp_path, steps=150, policy=policy)
    run_world(train, 1, config, None, False, _SlowStorage(20, 1.5))
    first, *later = [d for d in decided(events(config)) if d["formula"] == "exact"]
    slow = [d for d in later if re.search(r"raised to [0-9.]+ s, the upload time", d["reason"])]
    assert slow, "the slow storage was not seen"
    assert slow[-1]["interval_s"] >= 1.5 > first["interval_s"]
