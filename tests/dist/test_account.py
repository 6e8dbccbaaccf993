"""The ledger that a process beside a run makes is the one that the command line shows, and it is never in the way."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME
from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view import account as account_module
from ray_ckpt.view.account import Account, Accountant, account_of

pytestmark = pytest.mark.dist


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two attempts, the second after a failure."""
    clock = {"time": 1.7e9, "monotonic": 0.0}
    events: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []

    def write(event: str, after_s: float, **fields: Any) -> None:
        for key in clock:
            clock[key] += after_s
        events.append({**clock, "event": event, **fields})

    def train(generation: int, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for key in clock:
                clock[key] += 1.0
            lines.append({"step": step, "generation": generation, "step_time_s": 1.0, **clock})

    write("tracker_started", 0.0, boot="x", submitted_ago_s=2.0, generation=0)
    for generation, first in ((1, 1), (2, 6)):
        write(
            "group_started",
            4.0,
            asked_ago_s=3.0,
            workers_ago_s=1.0,
            waited_s=0.0,
            generation=generation - 1,
        )
        write("attempt_started", 1.0, generation=generation, world_size=2)
        write(
            "restored",
            2.0,
            generation=generation,
            step=first - 1,
            worker_monotonic=clock["monotonic"] + 2.0,
        )
        train(generation, first, first + 9)
        if generation == 1:
            write("interruption", 0.5, generation=1, kind="worker_error", step=10, lost_steps=5, group="a",
                  noticed_ago_s=0.1)  # fmt: skip
    write("decision", 0.0, generation=2)
    (tmp_path / JOURNAL_NAME).write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / STEPS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def looked(accountant: Accountant, since: int = 0, timeout_s: float = 30.0) -> Account | None:
    """What comes of the next process, on a clock on which one is due."""
    deadline, first_s = time.monotonic() + timeout_s, time.monotonic()
    accountant.look(first_s - 1e6, since)
    assert accountant._process is None
    while time.monotonic() < deadline:
        found = accountant.look(time.monotonic(), since)
        if found is not None or (accountant._output is not None and accountant._process is None):
            return found
        time.sleep(0.01)
    raise AssertionError("it does not come to an end")


def test_the_account_is_the_ledger(run_dir: Path) -> None:
    ledger = read_ledger(run_dir)
    assert ledger is not None
    found = looked(Accountant(run_dir))
    assert found == account_of(ledger)
    assert found.buckets["rework"] == pytest.approx(5.0)
    assert sum(found.buckets.values()) == pytest.approx(found.wall_s)
    assert set(found.restarts) == {2}, "the first attempt is no restart"
    assert found.restarts[2]["restart_restore"] == pytest.approx(2.0)
    assert found.restarts[2]["restart_detect"] > 0.0
    assert looked(Accountant(run_dir), since=3).restarts == {}


def test_a_run_that_has_not_begun_has_none(tmp_path: Path) -> None:
    assert looked(Accountant(tmp_path)) is None


def test_what_is_in_the_way_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account_module, "LEAST_S", 0.0)
    monkeypatch.setattr(account_module, "SHARE", 0.0)
    (tmp_path / JOURNAL_NAME).mkdir()
    accountant = Accountant(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert looked(accountant) is None
        assert looked(accountant) is None
    assert len(caplog.records) == 1
    assert JOURNAL_NAME in caplog.text


def test_a_look_never_waits_and_the_next_process_has_time(tmp_path: Path) -> None:
    accountant = Accountant(tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"])
    accountant.look(0.0, 0)
    started = time.monotonic()
    accountant.look(10.0, 0)
    process = accountant._process
    assert process is not None
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    assert accountant.look(100.0, 0) is None
    assert accountant._process is process, "one at a time"
    assert time.monotonic() - started < 5
    # One that hangs is ended, and the next one begins after many times as long.
    accountant.look(10.0 + account_module.TIMEOUT_S + 1, 0)
    process.wait(timeout=10)
    assert accountant.look(1900.0, 0) is None
    assert accountant._process is None
    accountant.look(1900.0 + account_module.SHARE * 1800.0 - 1, 0)
    assert accountant._process is None
    accountant.close()


def test_records_that_are_too_large_are_left_alone(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account_module, "MOST_BYTES", 10)
    accountant = Accountant(run_dir)
    accountant.look(0.0, 0)
    accountant.look(100.0, 0)
    assert accountant._process is None
    assert "MiB" in caplog.text
