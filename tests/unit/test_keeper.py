"""The tracker keeps what the rules say, explains it in the journal, and never stops for it."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tracker_core import OPTIONS, Run, of_the_run

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.names import MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import ConfigError, StaleGenerationError, StorageError
from ray_ckpt.tiers import pins
from ray_ckpt.tiers.collect import collect
from ray_ckpt.tiers.housekeeping import read_back
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker import attempts
from ray_ckpt.tracker.aside import Thread
from ray_ckpt.tracker.core import TrackerCore
from ray_ckpt.tracker.journal import JOURNAL_NAME, JsonLines
from ray_ckpt.view.story import tell

KEEP_2 = dataclasses.replace(OPTIONS, retention=Rules(keep_newest=2))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(pins, "_BACK_S", 0.0)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "demo", KEEP_2)


def commits(run: Run, count: int) -> list[str]:
    """So many saves, ten steps apart."""
    names = []
    for _ in range(count):
        run.train(10)
        names.append(run.save())
    return names


def names(*steps: int, generation: int = 1) -> list[str]:
    return [checkpoint_name(step, generation) for step in steps]


def folders(run: Run) -> list[str]:
    return sorted(path.name for path in (run.dir / "checkpoints").iterdir())


def test_many_commits_keep_what_the_rules_say_and_the_journal_explains_each_delete(run):
    run.begin()
    commits(run, 7)
    # The 70th is not read back yet: no rule may delete below what was, which is step 50.
    deleted = [event["name"] for event in run.journal("delete")]
    assert deleted == names(10, 20, 30, 40, 50)
    assert folders(run) == names(60, 70)
    # Each older one went after a newer one was read back, and that is on record before it.
    proven: list[int] = []
    for event in run.journal("verified", "delete"):
        if event["event"] == "verified":
            assert event["verified"] == event["name"]
            proven.append(event["step"])
        else:
            assert any(step > event["step"] for step in proven)
            assert "no rule keeps it (the newest 2)" in event["reason"]
            assert "is verified" in event["reason"]
    (rules,) = run.journal("retention")
    assert Rules.from_json(rules["rules"]) == KEEP_2.retention
    assert all(tell(event) for event in run.journal("verified", "delete"))


def test_reading_back_costs_one_read_for_several_deletes(run):
    run.options = dataclasses.replace(OPTIONS, retention=Rules(keep_newest=4))
    run.open()
    run.begin()
    commits(run, 17)
    assert len(run.journal("delete")) == 13
    assert len(run.journal("verified")) <= 17 // 4


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_history_ends_with_a_checkpoint_that_can_be_restored_and_every_pinned_one(
    tmp_path_factory, data
):
    rules = Rules(
        keep_newest=data.draw(st.integers(1, 3)),
        keep_every_steps=data.draw(st.sampled_from([0, 7])),
        keep_best=data.draw(st.integers(0, 1)),
        quarantined=1,
    )
    run = Run(tmp_path_factory.mktemp("run"), dataclasses.replace(OPTIONS, retention=rules))
    pinned: set[str] = set()
    run.begin()
    for _ in range(data.draw(st.integers(4, 25))):
        action = data.draw(
            st.sampled_from(["save"] * 5 + ["pin", "unpin", "reject", "begin", "reopen", "clock"])
        )
        here = [entry.folder.name for entry in list_checkpoints(run.dir) if entry.committed]
        if action == "save" and run.core.memory.attempt_open:
            run.train(data.draw(st.integers(1, 5)))
            run.save(metrics={"loss": data.draw(st.floats(allow_nan=True))})
        elif action == "pin" and here:
            name = data.draw(st.sampled_from(here))
            run.core.pin(name, "somebody wants it")
            pinned.add(name)
        elif action == "unpin" and pinned:
            name = data.draw(st.sampled_from(sorted(pinned)))
            run.core.unpin(name)
            pinned.discard(name)
        elif action == "reject" and len(run.usable()) > 1:
            attempt = run.core.begin_attempt(2, ["node-a"])
            plan = run.core.reject(
                attempt.generation, attempt.plan.name, [Fault("x", "checksum differs")]
            )
            run.core.restored(attempt.generation, plan.manifest.step, 0.1, plan.name, plan.reason)
            run.step = plan.manifest.step
        elif action == "begin":
            run.begin()
        elif action == "reopen":
            run.open()
        elif action == "clock":
            run.clock.now += data.draw(st.sampled_from([-1e6, 3600.0]))
        usable = run.usable()  # reads every byte of each
        committed = {entry.folder.name for entry in list_checkpoints(run.dir) if entry.committed}
        assert pinned <= committed
        if run.core.memory.commits:
            assert usable, "a run that has saved has something to restore"
        assert of_the_run(run.fold()) == of_the_run(run.core.memory)
        deleted = {event["name"] for event in run.journal("delete")}
        assert not deleted & committed
        everything = {event["name"] for event in run.journal("commit")}
        assert everything == committed | deleted, "nothing goes without a line in the journal"


def test_a_newest_one_that_reads_back_damaged_is_set_aside_and_nothing_older_goes_for_it(tmp_path):
    bad = set(names(30))

    def read(folder: Path) -> list[Fault]:
        return [Fault("a", "checksum differs")] if folder.name in bad else read_back(folder)

    run = Run(tmp_path / "demo", KEEP_2)
    run.core = TrackerCore(run.core._facts, KEEP_2, clock=run.clock, read=read)
    run.begin()
    commits(run, 3)
    assert [event["name"] for event in run.journal("quarantine")] == names(30)
    assert run.usable() == names(20, 10)
    assert not run.journal("delete")
    commits(run, 1)
    assert run.usable() == names(40, 20)
    assert folders(run) == names(20, 30, 40)


def test_storage_that_fails_while_it_is_read_back_condemns_nothing(tmp_path):
    run = Run(tmp_path / "demo", KEEP_2)
    failing = [Fault("a", "unreadable: Input/output error")]
    run.core = TrackerCore(run.core._facts, KEEP_2, clock=run.clock, read=lambda folder: failing)
    run.begin()
    commits(run, 4)
    assert run.usable() == names(40, 30, 20, 10)
    assert not run.journal("delete", "quarantine", "verified")
    assert "Input/output error" in run.journal("alert")[-1]["problem"]
    failing.clear()
    commits(run, 1)
    assert run.usable() == names(50, 40)


def test_what_cannot_be_deleted_is_told_and_tried_again_and_never_stops_a_commit(run, monkeypatch):
    run.begin()
    real = os.unlink

    def refuse(path, **more):
        if "__0_0.distcp" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        commits(run, 4)
        assert run.usable() == names(40, 30)
        assert {event["name"] for event in run.journal("delete_failed")} == set(names(10, 20))
        assert all("Input/output error" in e["error"] for e in run.journal("delete_failed"))
    commits(run, 1)
    assert folders(run) == names(40, 50)
    assert {event["name"] for event in run.journal("delete")} == set(names(10, 20, 30))


def test_a_folder_that_cannot_be_listed_never_stops_a_commit(run, monkeypatch):
    run.begin()
    commits(run, 2)

    def refuse(*args, **more):
        raise StorageError("cannot list: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("ray_ckpt.tiers.stock.list_checkpoints", refuse)
        commits(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr("ray_ckpt.tracker.house.keep_house", lambda *args, **more: 1 / 0)
        commits(run, 1)
    assert run.usable() == names(40, 30, 20, 10)
    commits(run, 1)
    assert run.usable() == names(50, 40)


def test_a_full_disk_that_fails_a_save_is_given_room_by_what_no_rule_keeps(run):
    run.begin()
    commits(run, 3)
    assert run.usable() == names(30, 20)
    pins.pin(run.folder(20), "for a while", author="ada", time_s=1.0)
    commits(run, 2)
    assert run.usable() == names(50, 40, 20)
    pins.unpin(run.folder(20))
    run.train(10)
    assert not run.core.commit(1, run.written(60, error="OSError: no space left on device"))
    assert run.usable() == names(50, 40)


def test_the_same_commit_told_again_does_not_bring_a_deleted_checkpoint_back(run):
    run.begin()
    commits(run, 3)
    late = run.written(10)  # as if its files had not been removed yet
    assert run.core.commit(1, late)
    assert not (run.folder(10) / MANIFEST_NAME).exists()
    assert run.usable() == names(30, 20)
    assert not run.journal("save_failed")


@pytest.mark.parametrize("how", ["another attempt", "a finding in the same attempt"])
def test_what_was_decided_before_is_not_done_after_the_newest_turned_out_bad(
    tmp_path, monkeypatch, how
):
    entered, go_on = threading.Event(), threading.Event()

    def slow(*args, **more):
        entered.set()
        assert go_on.wait(10)
        return collect(*args, **more)

    run = Run(tmp_path / "demo", OPTIONS)
    run.begin()
    commits(run, 4)
    run.core = TrackerCore(run.core._facts, KEEP_2, clock=run.clock, aside=Thread("housekeeping"))
    run.begin()
    with monkeypatch.context() as patch:
        patch.setattr("ray_ckpt.tiers.housekeeping.collect", slow)
        commits(run, 1)  # now 10, 20 and 30 are about to go, for the sake of 40, which was verified
        assert entered.wait(10)
        bad = names(40)[0]
        if how == "another attempt":
            attempt = run.core.begin_attempt(2, ["node-a"])  # and does not wait for the round
            fault = [Fault("x", "checksum differs")]
            assert attempt.plan.name == checkpoint_name(50, 2)
            run.core.reject(attempt.generation, attempt.plan.name, fault)
            plan = run.core.reject(attempt.generation, bad, fault)
            assert plan.name == names(30)[0]
        else:
            run.core._keeper.quarantine(bad, "x: checksum differs", [])
        go_on.set()
        run.core._keeper._aside.wait(10)
    assert set(names(30, 20, 10)) <= set(run.usable())


def test_the_tracker_answers_while_a_checkpoint_is_read_back_and_settles_at_the_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(attempts, "SETTLE_S", 10.0)
    go_on = threading.Event()

    def read(folder: Path) -> list[Fault]:
        assert go_on.wait(10)
        return read_back(folder)

    run = Run(tmp_path / "demo", KEEP_2)
    run.core = TrackerCore(
        run.core._facts, KEEP_2, clock=run.clock, aside=Thread("housekeeping"), read=read
    )
    run.begin()
    started = time.monotonic()
    commits(run, 6)
    assert time.monotonic() - started < 5
    assert len(run.usable()) == 6
    go_on.set()
    run.core.finished(1, run.step)
    assert run.usable() == names(60, 50)
    assert len(run.journal("delete")) == 4


def test_pins_are_on_record_whoever_set_them(run):
    run.begin()
    commits(run, 2)
    run.core.pin(names(10)[0], "before a rollback")
    run.core.pin(names(10)[0], "before a rollback")
    pins.pin(run.folder(20), "a paper (2026)", author="ada", time_s=1.0)
    commits(run, 3)
    assert run.usable() == names(50, 40, 20, 10)
    told = [(e["step"], e["reason"], e["author"]) for e in run.journal("pin")]
    assert told == [(10, "before a rollback", "ray_ckpt"), (20, "a paper (2026)", "ada")]
    pins.unpin(run.folder(20))
    run.core.unpin(names(10)[0], "before a rollback")
    commits(run, 1)
    assert [event["step"] for event in run.journal("unpin")] == [10, 20]
    assert run.usable() == names(60, 50)
    assert not run.core.memory.pins
    for name in ("step-00000099-g1", "../../etc"):
        with pytest.raises(ConfigError):
            run.core.pin(name, "x")


def test_rules_are_on_record_once_and_again_when_they_change(run):
    for _ in range(3):
        run.begin()
    assert len(run.journal("retention")) == 1
    run.options = dataclasses.replace(OPTIONS, retention=Rules(keep_newest=5))
    run.open()
    run.begin()
    assert [event["rules"]["keep_newest"] for event in run.journal("retention")] == [2, 5]


def test_another_driver_that_took_the_run_over_is_not_deleted_under(run):
    run.begin()
    commits(run, 2)
    with JsonLines(run.dir / JOURNAL_NAME, sync=False) as other:
        other.append({"time": 1.0, "generation": 2, "event": "attempt_started", "world_size": 1})
    before = set(run.usable())
    assert len(before) == 2
    run.core._keeper._rules = Rules(keep_newest=1)
    run.core._keeper.after_save()  # as after a save that was committed just before the other began
    assert set(run.usable()) == before
    assert not run.journal("delete")
    with pytest.raises(StaleGenerationError, match="another tracker has taken over"):
        run.train(10)


def test_a_checkpoint_that_rots_on_storage_is_found_told_and_never_restored(run):
    run.options = dataclasses.replace(OPTIONS, stack=Stack(scrub_s=1000.0))
    run.open()
    run.begin()
    older, newer = commits(run, 2)
    run.train(1)
    assert not run.journal("verified")  # they were written a moment ago
    file = next((run.dir / "checkpoints" / newer).glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    run.clock.now += 1001.0
    for _ in range(4):
        run.train(1)
    # Each is read once, and not again before its next turn.
    assert [event["name"] for event in run.journal("verified")] == [older]
    assert [event["name"] for event in run.journal("quarantine")] == [newer]
    assert any("went bad" in event["problem"] for event in run.journal("alert"))
    assert run.begin().plan.name == older
