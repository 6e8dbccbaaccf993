"""Deleting: a crash, a refusal or a race at any point leaves a whole checkpoint or none."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
from disk import add_checkpoint, at_every_touch, whole

from ray_ckpt.checkpoint import manifest as manifest_module
from ray_ckpt.checkpoint import storing
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import FileEntry, read_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME, PINS_NAME, checkpoint_name
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.errors import ConfigError, StaleGenerationError, StorageError
from ray_ckpt.tiers import collect as module
from ray_ckpt.tiers import pins
from ray_ckpt.tiers.collect import LEAVING_NAME, Gate, Outcome, collect
from ray_ckpt.tiers.housekeeping import Findings, Round, keep_house, read_back
from ray_ckpt.tiers.retention import Verdict
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.view.summary import snapshot_problem


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(pins, "_BACK_S", 0.0)


@pytest.fixture
def run(tmp_path) -> Path:
    """Checkpoints at the steps 10 to 50."""
    run = tmp_path / "demo"
    for step in (10, 20, 30, 40, 50):
        add_checkpoint(run, step)
    return run


def names(*steps: int) -> set[str]:
    return {checkpoint_name(step, 1) for step in steps}


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / checkpoint_name(step, 1)


def delete(run: Path, *steps: int, generation: int = 1, newest: int = 1, gate: Gate | None = None):
    verdicts = [
        Verdict(name=checkpoint_name(step, 1), keep=False, reasons=("of no use",))
        for step in sorted(steps, reverse=True)
    ]
    return collect(
        run,
        verdicts,
        generation=generation,
        newest_generation=lambda: newest,
        gate=gate or Gate(),
    )


def tidy(run: Path, keep: int = 2, verified: tuple[int, ...] = (50,), **changes) -> Findings:
    """A round of housekeeping, long after everything was written."""
    values = {
        "run_dir": run,
        "rules": Rules(keep_newest=keep),
        "generation": 1,
        "newest_generation": lambda: 1,
        "present_generation": 1,
        "verified": names(*verified),
        "in_use": {},
        "read_back": None,
        "gate": Gate(),
    }
    return keep_house(Round(**{**values, **changes}), now_s=time.time() + 1e6)


def test_what_no_rule_keeps_is_gone_with_its_folder_oldest_first(run):
    found = tidy(run)
    assert [outcome.name for outcome in found.outcomes] == sorted(names(10, 20, 30))
    assert all(not outcome.problem for outcome in found.outcomes)
    assert whole(run) == names(40, 50)
    assert {path.name for path in (run / "checkpoints").iterdir()} == names(40, 50)
    assert tidy(run).outcomes == ()


def test_nothing_is_deleted_before_the_newest_was_read_back(run):
    found = tidy(run, verified=(), read_back=read_back)
    assert (found.to_read, found.faults, found.outcomes) == (checkpoint_name(50, 1), (), ())
    assert whole(run) == names(10, 20, 30, 40, 50)
    blind = tidy(run, verified=())
    assert blind.outcomes == ()
    assert whole(run) == names(10, 20, 30, 40, 50)


def test_reading_back_finds_a_flipped_bit_and_tells_a_disk_that_fails_from_it(run, monkeypatch):
    path = folder(run, 50) / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))
    (fault,) = read_back(folder(run, 50))
    assert (fault.path, fault.unreadable) == ("__1_0.distcp", False)
    (folder(run, 40) / MANIFEST_NAME).write_bytes(b"{")
    assert not read_back(folder(run, 40))[0].unreadable

    def refuse(path):
        raise StorageError(f"cannot read {path}: Input/output error")

    monkeypatch.setattr(manifest_module, "read_bytes", refuse)
    assert read_back(folder(run, 30))[0].unreadable


# ---- at every point -------------------------------------------------------------------------------


def touches(action) -> int:
    """How often an action looks at or changes the file system."""
    told: list[str] = []
    with at_every_touch(told.append):
        action()
    return len(told)


def fresh(tmp_path: Path, number: int) -> Path:
    run = tmp_path / f"run-{number}"
    for step in (10, 20, 30):
        add_checkpoint(run, step)
    pins.pin(folder(run, 20), "a paper", author="ada", time_s=1.0)
    write_quarantine(folder(run, 10), "NaN", time_s=1.0)
    return run


def test_an_error_at_any_touch_leaves_whole_checkpoints_and_the_next_round_ends_the_work(tmp_path):
    """EIO wherever it may come; what it costs is a second round."""
    todo = fresh(tmp_path, 0)
    count = touches(lambda: delete(todo, 10, 20, 30))
    assert count > 20
    assert whole(todo) == names(20)
    for at in range(1, count + 1):
        run, seen = fresh(tmp_path, at), 0

        def fail(what: str, at: int = at) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                raise OSError(errno.EIO, f"Input/output error at {what}")

        with at_every_touch(fail):
            outcomes = delete(run, 10, 20, 30)
        failed = [outcome for outcome in outcomes if outcome.problem and not outcome.kept]
        assert len(failed) <= 1, "one bad file must not keep the others"
        assert checkpoint_name(20, 1) in whole(run)
        gone = {outcome.name for outcome in outcomes if not outcome.problem}
        assert not gone & {entry.folder.name for entry in list_checkpoints(run)}
        # Either it is a checkpoint still, or it goes without waiting for its grace.
        rest = tidy(run, keep=1, rules=Rules(keep_newest=1, grace_s=1e9))
        left = {entry.folder.name for entry in list_checkpoints(run) if entry.committed}
        assert left == whole(run)
        half = [entry for entry in list_checkpoints(run) if not entry.committed]
        # All that may stay is an empty folder, whose last name was gone before the error came.
        assert all(not list(entry.folder.iterdir()) for entry in half), (at, failed, rest)


def test_an_unlink_that_fails_is_told_and_the_rest_goes_on(run, monkeypatch):
    real = os.unlink

    def refuse(path, *, dir_fd=None):
        place = "" if dir_fd is None else str(Path(f"/proc/self/fd/{dir_fd}").readlink())
        if str(path).endswith("__0_0.distcp") and checkpoint_name(20, 1) in place:
            raise OSError(errno.EIO, "Input/output error", str(path))
        real(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        outcomes = {outcome.step: outcome for outcome in tidy(run).outcomes}
        assert "Input/output error" in outcomes[20].problem
        assert not outcomes[20].kept
        assert not outcomes[10].problem
        assert not outcomes[30].problem
        assert whole(run) == names(40, 50)
        left = sorted(path.name for path in folder(run, 20).iterdir())
        assert left == [LEAVING_NAME, "__0_0.distcp"]
    again = tidy(run)
    assert [(outcome.step, outcome.problem) for outcome in again.outcomes] == [(20, "")]
    assert not folder(run, 20).exists()


def test_a_pin_at_any_point_of_a_collection_holds_or_is_refused(tmp_path):
    probe = fresh(tmp_path, 0)
    count = touches(lambda: delete(probe, 30))
    held = 0
    for at in range(1, count + 1):
        run, seen, answers = fresh(tmp_path, at), 0, list[str]()

        def pin_now(what: str, at: int = at, run: Path = run, answers: list[str] = answers) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                try:
                    pins.pin(folder(run, 30), "the best", author="bob", time_s=2.0)
                    answers.append("pinned")
                except ConfigError as error:
                    answers.append(str(error))

        with at_every_touch(pin_now):
            (outcome,) = delete(run, 30)
        (answer,) = answers
        if answer == "pinned":
            held += 1
            assert outcome.kept
            assert "the best" in outcome.problem
            assert whole(run) == names(10, 20, 30)
        else:
            assert "cannot be pinned" in answer
        assert (checkpoint_name(30, 1) in whole(run)) == outcome.kept
    assert 0 < held < count


@pytest.mark.parametrize("how", ["all of it", "no more than the end of the checkpoint"])
def test_a_collection_at_any_point_of_a_pin_lets_it_hold_or_refuses_it(tmp_path, monkeypatch, how):
    if how != "all of it":
        monkeypatch.setattr(module, "remove_folder", lambda folder: "not yet")
    probe = fresh(tmp_path, 0)
    count = touches(lambda: pins.pin(folder(probe, 30), "the best", author="bob", time_s=2.0))
    held = 0
    for at in range(1, count + 1):
        run, seen = fresh(tmp_path, at), 0

        def delete_now(what: str, at: int = at, run: Path = run) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                delete(run, 30)

        with at_every_touch(delete_now):
            try:
                pins.pin(folder(run, 30), "the best", author="bob", time_s=2.0)
                pinned = True
            except ConfigError:
                pinned = False
        held += pinned
        assert (checkpoint_name(30, 1) in whole(run)) == pinned
    assert 0 < held < count


def test_a_pinned_checkpoint_that_a_dead_collector_ended_comes_back(run):
    pins.pin(folder(run, 20), "a paper", author="ada", time_s=1.0)
    (folder(run, 20) / MANIFEST_NAME).rename(folder(run, 20) / LEAVING_NAME)
    assert whole(run) == names(10, 30, 40, 50)
    tidy(run)
    assert whole(run) == names(20, 40, 50)


# ---- who may, and what ----------------------------------------------------------------------------


def test_a_generation_that_was_replaced_deletes_nothing(run):
    with pytest.raises(StaleGenerationError, match="attempt 2 has taken the place of attempt 1"):
        delete(run, 10, 20, newest=2)
    assert whole(run) == names(10, 20, 30, 40, 50)


def test_a_generation_that_is_replaced_meanwhile_deletes_no_more(run):
    newest = iter([1, 1, 2])
    verdicts = [
        Verdict(name=checkpoint_name(step, 1), keep=False, reasons=("x",))
        for step in (40, 30, 20, 10)
    ]
    with pytest.raises(StaleGenerationError):
        collect(run, verdicts, generation=1, newest_generation=lambda: next(newest), gate=Gate())
    assert whole(run) == names(30, 40, 50)


def test_a_gate_that_was_shut_lets_nothing_end(run):
    gate = Gate()
    gate.shut()
    assert delete(run, 10, 20, gate=gate) == []
    assert whole(run) == names(10, 20, 30, 40, 50)


def test_when_the_gate_is_shut_what_is_ending_has_ended(run, monkeypatch):
    gate, inside, go_on = Gate(), threading.Event(), threading.Event()
    real = module._end

    def slow(folder: Path):
        inside.set()
        assert go_on.wait(10)
        return real(folder)

    monkeypatch.setattr(module, "_end", slow)
    worker = threading.Thread(target=lambda: delete(run, 10, 20, gate=gate))
    worker.start()
    assert inside.wait(10)
    closer = threading.Thread(target=gate.shut)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "shut() must wait for the checkpoint that is ending"
    go_on.set()
    closer.join(10)
    assert checkpoint_name(10, 1) not in whole(run)
    worker.join(10)
    assert whole(run) == names(20, 30, 40, 50)


def test_a_link_is_not_followed(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    folder(run, 10).rename(elsewhere)
    folder(run, 10).symlink_to(elsewhere)
    (folder(run, 20) / "rank" / "link").symlink_to(elsewhere)
    first, second = delete(run, 10, 20)
    assert first.kept
    assert "link" in first.problem
    assert second == Outcome(name=checkpoint_name(20, 1), step=20, reason="of no use")
    assert len(list(elsewhere.rglob("*"))) == 6


def test_files_of_an_attempt_that_is_over_go_after_their_grace_and_those_in_flight_stay(run):
    old, present = (
        add_checkpoint(run, 60, 1, commit=False),
        add_checkpoint(run, 60, 2, commit=False),
    )
    pinned = add_checkpoint(run, 70, 1, commit=False)
    (pinned / PINS_NAME).write_text("damaged")
    tidy(run, keep=9, generation=2, newest_generation=lambda: 2, present_generation=2)
    assert not old.exists()
    assert present.exists()
    assert pinned.exists()
    fresh = add_checkpoint(run, 80, 1, commit=False)
    rules = Rules(keep_newest=9, grace_s=2e6)
    tidy(run, rules=rules, generation=2, newest_generation=lambda: 2, present_generation=2)
    assert fresh.exists()


def test_a_save_that_was_set_aside_before_its_commit_is_evidence(run):
    for step in (60, 70, 80):
        write_quarantine(add_checkpoint(run, step, commit=False), "loss was NaN", time_s=1.0)
    later = {"generation": 2, "newest_generation": lambda: 2, "present_generation": 2}
    tidy(run, rules=Rules(keep_newest=9, quarantined=2), **later)
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert left == names(10, 20, 30, 40, 50, 70, 80)


# ---- pins -----------------------------------------------------------------------------------------


def test_pins_add_up_and_are_taken_away_by_reason(run):
    here = folder(run, 10)
    assert pins.read_pins(here) == ()
    assert pins.pin(here, "a paper", author="ada", time_s=1.0)
    assert not pins.pin(here, "a paper", author="ada", time_s=2.0)
    assert pins.pin(here, "the best", author="ada", time_s=3.0)
    document = json.loads((here / PINS_NAME).read_text())
    assert document[0] == {"reason": "a paper", "author": "ada", "time": 1.0}
    assert [pin.reason for pin in pins.read_pins(here)] == ["a paper", "the best"]
    assert verify_files(here, read_manifest(here)) == [], "a pin is no surplus file"
    with pytest.raises(ConfigError, match="'a paper', 'the best'"):
        pins.unpin(here, "a poster")
    assert [pin.reason for pin in pins.unpin(here, "a paper")] == ["a paper"]
    assert [pin.reason for pin in pins.unpin(here)] == ["the best"]
    assert pins.unpin(here) == ()
    assert not (here / PINS_NAME).exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"{}", b"[1]", b'[{"reason": "x"}]', b"\xff", b"null"]
)
def test_a_damaged_pin_is_a_pin(run, damage):
    here = folder(run, 10)
    (here / PINS_NAME).write_bytes(damage)
    assert [pin.reason for pin in pins.read_pins(here)] == [pins.DAMAGED]
    assert checkpoint_name(10, 1) in {v.name for v in tidy(run).verdicts if v.keep}
    assert delete(run, 10)[0].kept
    assert whole(run) == names(10, 40, 50)
    assert pins.pin(here, "a paper", author="ada", time_s=1.0)
    assert [pin.reason for pin in pins.read_pins(here)] == [pins.DAMAGED, "a paper"]
    assert len(pins.unpin(here)) == 2
    assert not delete(run, 10)[0].problem


def test_pins_that_cannot_be_read_are_no_absence(run, monkeypatch):
    real = storing.read_plain

    def refuse(path: Path) -> bytes:
        if path.name == PINS_NAME and checkpoint_name(10, 1) in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(storing, "read_plain", refuse)
    with pytest.raises(StorageError):
        pins.read_pins(folder(run, 10))
    found = tidy(run)
    assert "perhaps" in next(v for v in found.verdicts if v.name in names(10)).reasons[0]
    (outcome,) = delete(run, 10)
    assert "Input/output error" in outcome.problem
    assert whole(run) == names(10, 40, 50)


def test_only_a_committed_checkpoint_can_be_pinned_and_only_with_a_reason(run):
    for bad in (add_checkpoint(run, 60, commit=False), run / "checkpoints" / "step-00000099-g1"):
        with pytest.raises(ConfigError, match="never committed"):
            pins.pin(bad, "a paper", author="ada", time_s=1.0)
        assert not (bad / PINS_NAME).exists()
    for reason, author in ((" ", "ada"), ("a paper", "")):
        with pytest.raises(ConfigError, match="is empty"):
            pins.pin(folder(run, 10), reason, author=author, time_s=1.0)


def test_the_name_of_the_pins_is_no_file_of_a_checkpoint():
    with pytest.raises(ValueError, match="reserved"):
        FileEntry(PINS_NAME, 0, "0" * 32)


# ---- Ray's own list -------------------------------------------------------------------------------


def test_a_run_whose_checkpoints_were_deleted_starts_again_under_ray(run):
    """Ray's controller refuses a list that names what is gone; what a start does first must mend that."""
    from ray.train import CheckpointConfig
    from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
        CheckpointManager,
        _CheckpointManagerState,
        _TrainingResultState,
    )
    from ray.train.v2._internal.execution.context import StorageContext

    listed = [
        _TrainingResultState(checkpoint_dir_name=f"checkpoints/{name}", metrics={})
        for name in sorted(names(10, 20, 30, 40, 50))
    ]
    state = _CheckpointManagerState(
        checkpoint_results=listed,
        checkpoint_report_indices=list(range(5)),
        latest_checkpoint_result=listed[-1],
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=5,
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )
    snapshot = run / "checkpoint_manager_snapshot.json"
    snapshot.write_text(state.json())
    storage = StorageContext(storage_path=str(run.parent), experiment_dir_name=run.name)
    CheckpointManager(CheckpointConfig(), storage)  # all are there: Ray takes its list
    assert snapshot_problem(run) is None
    tidy(run)
    with pytest.raises(CheckpointManagerInitializationError):
        CheckpointManager(CheckpointConfig(), storage)
    assert "set aside" in str(snapshot_problem(run))
    CheckpointManager(CheckpointConfig(), storage)
    assert whole(run) == names(40, 50)
