"""The interval follows what the run measures, and says by what formula and numbers."""

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
