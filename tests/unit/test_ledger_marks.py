"""The tracker leaves the marks that the ledger needs, whatever its date does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_ledger import check_sums
from test_tracker_core import OPTIONS

from ray_ckpt.clocks import Instant, boot_name, now, submitted
from ray_ckpt.tracker.core import RunFacts, TrackerCore
from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines
from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view.summary import summary


class Machine:
    """A tracker on a machine whose clocks a test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.date, self.steady = folder, 1.7e9, 900.0
        self.submit(0.0)

    def submit(self, starting_s: float) -> None:
        job = self.here()
        self.sleep(starting_s)
        self.restart(job)

    def restart(self, job: Instant) -> None:
        """A tracker takes the run up from what is on the disk."""
        facts: dict[str, Any] = {
            "run": "demo",
            "run_dir": str(self.folder),
            "config_fingerprint": "c",
            "data_fingerprint": "d",
            "parallel": "ddp",
            "versions": {},
        }
        self.job = job
        self.core = TrackerCore(
            RunFacts(**facts), OPTIONS, clock=lambda: self.date, monotonic=lambda: self.steady
        )
        self.core.announce(job)

    def here(self) -> Instant:
        return Instant(time=self.date, monotonic=self.steady, boot=boot_name())

    def sleep(self, seconds: float) -> None:
        self.date += seconds
        self.steady += seconds

    def attempt(self, steps: int) -> None:
        self.core.group_started(2, asked_ago_s=3.0, workers_ago_s=1.0, waited_s=2.0)
        self.sleep(4.0)
        attempt = self.core.begin_attempt(2, ["a"])
        self.sleep(1.0)
        worker = self.steady + 5e5
        self.core.restored(attempt.generation, 0, 1.0, "", "new", worker_monotonic=worker)
        for step in range(1, steps + 1):
            self.sleep(2.0)
            record = {
                "step": step,
                "loss": 1.0,
                "sample_offset": 8 * step,
                "step_time_s": 2.0,
                "time": -1.0,  # rank 0's date is of no interest
                "monotonic": self.steady + 5e5,
            }
            self.core.steps(attempt.generation, [record])


def test_a_run_of_two_jobs_a_dead_tracker_and_a_moved_date_adds_up(tmp_path):
    machine = Machine(tmp_path / "demo")
    machine.sleep(10.0)
    machine.attempt(5)
    machine.date -= 86_400.0
    machine.restart(machine.job)
    machine.sleep(7.0)  # the node dies
    machine.core.interruption("node_loss", "gone", group="a", noticed_ago_s=3.0)
    machine.sleep(6.0)
    machine.attempt(4)
    machine.date += 3600.0
    machine.core.request_save("somebody wants it")
    machine.sleep(100.0)  # the job is gone by now
    machine.submit(8.0)
    machine.sleep(6.0)
    machine.attempt(6)
    machine.core.finished(machine.core.memory.generation, 6)
    ledger = read_ledger(machine.folder)
    check_sums(ledger)
    assert ledger.wall_s == pytest.approx(machine.steady - 900.0)
    assert ledger.buckets == pytest.approx(
        dict.fromkeys(ledger.buckets, 0.0)
        | {
            "start": 5.0 + 2.0 + 1.0 + 4.0 + 1.0,
            "useful": 12.0,
            "rework": 10.0 + 8.0,
            "idle": 100.0,
            "restart_detect": 4.0,
            "restart_reschedule": 3.0 + 1.0 + 8.0 + 1.0,
            "waiting_for_resources": 3 * 2.0,
            "restart_start_workers": 2 * (2.0 + 4.0),
            "restart_process_group": 2 * 1.0,
            "restart_restore": 2 * 1.0,
        }
    )
    assert ledger.interruptions == {"node_loss": 1, "lost": 1}
    assert [each.kind for each in ledger.restarts] == ["node_loss", "lost"]
    share = f"goodput {100 * ledger.goodput:.1f} %: 12s of useful steps in"
    assert share in summary(machine.folder)


def test_every_line_has_a_steady_clock_and_lives_name_whose_it_is(tmp_path):
    machine = Machine(tmp_path / "demo")
    machine.attempt(1)
    for line in read_lines(machine.folder / JOURNAL_NAME):
        assert line["monotonic"] >= 900.0
        if line["event"] in ("tracker_started", "attempt_started"):
            assert line["boot"] == boot_name()


def test_a_group_that_is_up_is_no_attempt(tmp_path):
    machine = Machine(tmp_path / "demo")
    machine.core.group_started(2, asked_ago_s=3.0, workers_ago_s=1.0, waited_s=2.0)
    memory = machine.core.memory
    assert (memory.generation, memory.attempt_open, memory.first_time) == (0, False, None)


def test_a_job_begins_with_its_process_and_ages_by_the_clock_that_nobody_sets():
    began, here = submitted(), now()
    assert 0 <= began.age_s(here) < 86_400
    moved = Instant(time=here.time - 5.0, monotonic=here.monotonic + 2.0, boot=here.boot)
    assert here.age_s(moved) == pytest.approx(2.0)
    elsewhere = Instant(time=here.time + 3.0, monotonic=0.0, boot="another")
    assert here.age_s(elsewhere) == pytest.approx(3.0)
    assert elsewhere.age_s(here) == 0
