"""`ray-ckpt pin`, `unpin`, `gc`: what a person asks for is done, and said in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk import add_checkpoint, whole

from ray_ckpt import cli
from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.tiers import pins
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tracker.journal import JOURNAL_NAME, JsonLines, read_lines
from ray_ckpt.tracker.lock import RunLock


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def run(tmp_path) -> Path:
    """Checkpoints 10 to 50 of a run that keeps the newest two."""
    run = tmp_path / "runs" / "demo"
    for step in (10, 20, 30, 40, 50):
        add_checkpoint(run, step, loss=step / 10)
    with JsonLines(run / JOURNAL_NAME, sync=False) as journal:
        rules = Rules(keep_newest=2).to_json()
        journal.append({"time": 1.0, "generation": 1, "event": "retention", "rules": rules})
    return run


def names(*steps: int) -> set[str]:
    return {checkpoint_name(step, 1) for step in steps}


def call(capsys, *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def call_json(capsys, *argv: object):
    code, out, _ = call(capsys, *argv, "--json")
    return code, json.loads(out)


def journal(run: Path, *events: str):
    return [line for line in read_lines(run / JOURNAL_NAME) if line["event"] in events]


def files(run: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def test_gc_goes_by_the_rules_on_record_and_says_why_each_stays_or_goes(run, capsys):
    before = files(run)
    code, out, _ = call(capsys, "gc", run, "--dry-run")
    assert (code, files(run)) == (0, before), "a dry run changes nothing"
    assert "3 of 5 would be deleted" in out
    assert "step-00000050-g1 would be read back first" in out
    code, out, _ = call(capsys, "gc", run)
    assert code == 0
    assert "rules (on the run's record): the newest 2" in out
    for step in (10, 20, 30):
        line = next(line for line in out.splitlines() if checkpoint_name(step, 1) in line)
        assert "deleted" in line
        assert "no rule keeps it (the newest 2), and step-00000050-g1 is verified" in line
    assert "3 of 5 deleted" in out
    assert whole(run) == names(40, 50)
    told = journal(run, "verified", "delete")
    assert [(e["event"], e["step"]) for e in told] == [
        ("verified", 50), ("delete", 10), ("delete", 20), ("delete", 30),
    ]  # fmt: skip
    assert all(event["generation"] == 1 for event in told)
    code, document = call_json(capsys, "gc", run)
    assert code == 0
    assert [item["keep"] for item in document["checkpoints"]] == [True, True]
    assert len(journal(run, "verified", "delete")) == 4, "a second time changes nothing"


def test_flags_win_over_the_record(run, capsys):
    flags = ("--retention.keep-newest", 1, "--retention.keep-best", 1, "--retention.keep-steps", 30)
    code, document = call_json(capsys, "gc", run, *flags)
    assert code == 0
    assert document["rules"]["keep_best"] == 1
    gone = {item["name"] for item in document["checkpoints"] if item["deleted"]}
    assert gone == names(20, 40)
    assert whole(run) == names(10, 30, 50)
    assert call(capsys, "gc", run, "--retention.keep-newest", -1)[0] == cli.EXIT_USAGE


def test_without_rules_on_record_nothing_goes(tmp_path, capsys):
    run = tmp_path / "old"
    for step in (10, 20):
        add_checkpoint(run, step)
    code, out, _ = call(capsys, "gc", run)
    assert code == 0
    assert "none on the run's record" in out
    assert whole(run) == names(10, 20)


def test_a_run_that_is_driven_is_left_to_its_driver(run, capsys):
    before = files(run)
    lock = RunLock(run)
    code, _, err = call(capsys, "gc", run)
    assert code == cli.EXIT_USAGE
    assert "being driven by another process" in err
    assert "Nothing was deleted" in err
    assert call(capsys, "gc", run, "--dry-run")[0] == 0
    assert {name: data for name, data in files(run).items() if not name.endswith(".lock")} == before
    assert call(capsys, "pin", run, 10, "--reason", "a paper")[0] == 0
    assert not journal(run, "pin"), "the journal of a driven run is its tracker's"
    lock.close()
    assert call(capsys, "gc", run)[0] == 0
    assert whole(run) == names(10, 40, 50)


def test_a_newest_one_that_is_damaged_keeps_the_old_ones_and_is_told(run, capsys):
    (run / "checkpoints" / checkpoint_name(50, 1) / "__0_0.distcp").write_bytes(b"x")
    code, out, err = call(capsys, "gc", run)
    assert code == cli.EXIT_FAULT
    assert "step-00000050-g1/__0_0.distcp: truncated" in err
    assert "deleted" not in out.replace("would be deleted", "")
    assert len(list((run / "checkpoints").iterdir())) == 5
    code, document = call_json(capsys, "gc", run)
    assert "truncated" in document["fault"]
    assert not any(item["deleted"] for item in document["checkpoints"])


def test_what_cannot_be_deleted_is_an_error_with_a_name(run, capsys, monkeypatch):
    real = os.rename

    def refuse(path, target, **more):
        if checkpoint_name(20, 1) in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        real(path, target, **more)

    monkeypatch.setattr(os, "rename", refuse)
    code, out, err = call(capsys, "gc", run)
    assert code == cli.EXIT_FAULT
    assert "step-00000020-g1: not deleted, or not all of it" in err
    assert "Permission denied" in err
    assert "2 of 5 deleted" in out
    assert whole(run) == names(20, 40, 50)


def test_saves_that_never_were_committed_go_after_their_grace(run, capsys):
    add_checkpoint(run, 60, commit=False)
    code, document = call_json(capsys, "gc", run)
    newest = document["checkpoints"][0]
    assert (code, newest["keep"]) == (0, True)
    assert "written less than 3600 s ago" in newest["reasons"][0]
    code, document = call_json(capsys, "gc", run, "--retention.grace-s", 0)
    assert document["checkpoints"][0]["deleted"]
    assert not (run / "checkpoints" / checkpoint_name(60, 1)).exists()


def test_pins_are_set_shown_and_taken_away(run, capsys):
    code, out, _ = call(capsys, "pin", run, 10, "--reason", "a paper", "--author", "ada")
    assert (code, "pinned" in out) == (0, True)
    assert call(capsys, "pin", run, 10, "--reason", "the best")[0] == 0
    listed = {item["step"]: item for item in call_json(capsys, "ls", run)[1]}
    assert listed[10]["pinned"] is True
    assert [pin["reason"] for pin in listed[10]["pins"]] == ["a paper", "the best"]
    assert listed[10]["pins"][0]["author"] == "ada"
    assert listed[10]["pins"][1]["author"] == cli_login()
    assert listed[20]["pinned"] is False
    assert listed[50]["kept"] == ["the newest", "one of the newest 2"]
    assert "committed, pinned: a paper (ada)" in call(capsys, "ls", run)[1]
    out = call(capsys, "show", run, 10)[1]
    assert "pinned" in out
    assert "a paper (ada)" in out
    assert call_json(capsys, "show", run, 10)[1]["pinned"] is True
    assert call(capsys, "gc", run)[0] == 0
    assert whole(run) == names(10, 40, 50)
    code, document = call_json(capsys, "unpin", run, 10, "--reason", "a paper")
    assert [pin["reason"] for pin in document["pins"]] == ["the best"]
    assert call(capsys, "unpin", run, 10, "--reason", "no such")[0] == cli.EXIT_USAGE
    assert call(capsys, "unpin", run, 10)[0] == 0
    told = [(event["event"], event["reason"]) for event in journal(run, "pin", "unpin")]
    assert told == [
        ("pin", "a paper"), ("pin", "the best"), ("unpin", "a paper"), ("unpin", "the best"),
    ]  # fmt: skip
    assert "will be deleted" in call(capsys, "show", run, 10)[1]
    assert {item["step"]: item for item in call_json(capsys, "ls", run)[1]}[10]["kept"] == []


def cli_login() -> str:
    from ray_ckpt.commands.retention import _login

    return _login()


def test_what_was_never_committed_cannot_be_pinned(run, capsys):
    add_checkpoint(run, 60, commit=False)
    code, _, err = call(capsys, "pin", run, 60, "--reason", "a paper")
    assert code == cli.EXIT_USAGE
    assert "cannot be pinned" in err


def test_evidence_stays_and_is_said_to_be_evidence(run, capsys):
    for step in (30, 20, 10):
        write_quarantine(run / "checkpoints" / checkpoint_name(step, 1), "NaN", time_s=1.0)
    code, document = call_json(capsys, "gc", run, "--retention.quarantined", 2)
    assert code == 0
    gone = {item["name"]: item for item in document["checkpoints"] if item["deleted"]}
    assert gone.keys() == names(10)
    assert "2 newer quarantined ones are kept" in gone[checkpoint_name(10, 1)]["reasons"][0]
    assert whole(run) == names(20, 30, 40, 50)


def test_it_needs_neither_ray_nor_torch(run):
    code = (
        "import sys; from ray_ckpt.cli import main; code = main(sys.argv[1:]);"
        "assert not {'ray', 'torch'} & set(sys.modules), 'loaded'; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "gc", str(run)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert whole(run) == names(40, 50)


def test_a_journal_with_rules_that_nobody_can_read_deletes_nothing(run, capsys):
    with JsonLines(run / JOURNAL_NAME, sync=False) as journal_:
        rules = {"keep_newest": 1, "mode": "median"}
        journal_.append({"time": 2.0, "generation": 1, "event": "retention", "rules": rules})
    assert call(capsys, "gc", run)[0] == 0
    assert whole(run) == names(10, 20, 30, 40, 50)
    assert pins.read_pins(run / "checkpoints" / checkpoint_name(10, 1)) == ()
