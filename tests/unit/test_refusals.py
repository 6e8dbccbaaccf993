"""The tracker commits no state that the guard refuses, keeps a few of those, and says where a run goes back to."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tracker_core import OPTIONS, Run

from ray_ckpt import cli
from ray_ckpt.checkpoint.guard import BadTensor, GuardRule, Scan, report, with_step
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.quarantine import read_quarantine_note
from ray_ckpt.skips import Skip
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tracker.rollback import LEFT
from ray_ckpt.view.place import FolderRun
from ray_ckpt.view.story import tell


def guarded(folder: Path, quarantined: int = 3, **rule: Any) -> Run:
    rules = replace(OPTIONS.retention, quarantined=quarantined)
    return Run(folder, replace(OPTIONS, guard=GuardRule(**rule), retention=rules))


def good(norm: float = 2.0) -> dict[str, Any]:
    return report(
        [Scan(rank=0, bad=(), square_sum=norm**2, names=frozenset({"model.w"}), seconds=0.25)]
    )


def bad(rank: int = 1) -> dict[str, Any]:
    tensor = BadTensor(name="model.w", bad=1, values=4)
    return report(
        [
            Scan(
                rank=rank,
                bad=(tensor,),
                square_sum=math.nan,
                names=frozenset({"model.w"}),
                seconds=0.25,
            )
        ]
    )


def save(run: Run, guard: dict[str, Any]) -> bool:
    """Whether the present step was committed."""
    return run.core.commit(run.generation, run.written(run.step, guard=guard))


def test_a_bad_save_between_good_ones_is_set_aside_and_takes_nothing_with_it(tmp_path):
    """pocket-tts#262 and ultralytics#24986: neither are good checkpoints lost, nor does saving end."""
    run = guarded(tmp_path / "demo")
    run.begin()
    outcomes = []
    for guard in (good(), bad(), good()):
        run.train(5)
        outcomes.append(save(run, guard))
    assert outcomes == [True, False, True]
    assert run.usable() == ["step-00000015-g1", "step-00000005-g1"]
    refused = next(e for e in list_checkpoints(run.dir) if e.step == 10)
    assert (refused.folder / "__0_0.distcp").exists(), "it is kept to be looked at"
    assert "model.w: 1 of 4 values on rank 1" in (refused.quarantined or "")
    note = read_quarantine_note(refused.folder)
    assert note is not None
    assert note["findings"][0]["tensor"] == "model.w"
    assert (note["step"], note["loss"]) == (10, 1.0)
    (event,) = run.journal("quarantine")
    assert (event["step"], event["by"], event["findings"][0]["rank"]) == (10, "guard", 1)
    assert "QUARANTINED step-00000010-g1" in str(tell(event))
    assert run.journal("save_failed") == [], "storage did its part"
    assert [e["guard_s"] for e in run.journal("commit")] == [0.25, 0.25]
    assert read_manifest(run.folder(15)).guard["param_norm"] == 2.0
    assert run.core.refusal(1, 10) == {"reason": event["reason"], "nonfinite": True}
    assert run.core.refusal(1, 15) is None
    assert run.core.status()["refused"] == 1
    run.open()
    assert run.begin().plan.name == "step-00000015-g1"


def test_the_same_refused_save_told_again_is_one_refusal(tmp_path):
    run = guarded(tmp_path / "demo")
    run.begin()
    run.train(5)
    assert not save(run, bad())
    before = run.everything()
    assert not save(run, bad())
    assert run.everything() == before


def test_a_refusal_that_cannot_be_noted_is_no_commit_either(tmp_path, monkeypatch):
    from ray_ckpt.errors import StorageError
    from ray_ckpt.tracker import house

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("no space left on device")

    run = guarded(tmp_path / "demo")
    run.begin()
    run.train(5)
    monkeypatch.setattr(house, "write_quarantine", refuse)
    assert not save(run, bad())
    assert run.usable() == []
    assert len(run.journal("quarantine")) == 1


def test_a_norm_out_of_its_band_is_refused_after_a_restart_too(tmp_path):
    run = guarded(tmp_path / "demo")
    run.begin()
    for norm in (2.0, 2.1, 2.2, 2.3):
        run.train(1)
        assert save(run, good(norm))
    run.open()
    run.begin()
    run.train(1)
    assert not save(run, good(200.0))
    assert "--guard.band-factor" in run.journal("quarantine")[0]["reason"]
    refusal = run.core.refusal(2, 5)
    assert refusal is not None
    assert not refusal["nonfinite"], "a strange norm stops nothing"
    run.train(1)
    assert save(run, good(2.2))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 3))
def test_any_history_keeps_every_good_checkpoint_and_the_newest_of_the_bad(
    tmp_path_factory, history, keep
):
    run = guarded(tmp_path_factory.mktemp("run"), quarantined=keep)
    run.begin()
    for is_good in history:
        run.train(1)
        assert save(run, good() if is_good else bad()) == is_good
    steps = list(enumerate(history, 1))
    there = list_checkpoints(run.dir)
    assert [e.step for e in there if e.usable] == [s for s, ok in reversed(steps) if ok]
    expected = [s for s, ok in reversed(steps) if not ok][:keep]
    assert [e.step for e in there if e.quarantined] == expected


def test_people_see_a_refused_checkpoint_with_its_finding(tmp_path, capsys):
    run = guarded(tmp_path / "demo")
    run.begin()
    for guard in (good(), with_step(good(), loss=math.inf, grad_norm=None)):
        run.train(5)
        save(run, guard)
    for command in (["ls"], ["show"], ["verify"]):
        step = ["10"] if command == ["show"] else []
        code = cli.main([*command, str(run.dir), *step])
        out = capsys.readouterr()
        assert "the loss of the step is inf" in out.out + out.err, command
        assert code == (1 if command == ["show"] else 0)


# ---- rollbacks ------------------------------------------------------------------------------------


def to_trouble(run: Run, stop: int, bad_step: int | None = None) -> Any:
    """Trains to ``stop`` with a commit at each fifth step, and reports trouble there."""
    while run.step < stop:
        run.train(1)
        if run.step % 5 == 0 and run.step != stop:
            assert save(run, good())
    skips = run.core.memory.skips
    remedy = run.core.trouble(run.generation, bad_step or stop, "loss nan", skips)
    again = run.core.trouble(run.generation, bad_step or stop, "loss nan", skips)
    assert again == remedy, "the answer to the first call may be lost"
    run.core.interruption("worker_error", "RollbackError", group=f"group {run.generation}")
    return remedy


def test_what_a_rollback_left_never_stands_in_for_what_the_run_goes_back_to(tmp_path):
    """Whole and newer, and of no use: neither who deletes nor who explains may count it as the newest."""
    run = guarded(tmp_path / "demo", on_nonfinite="rollback")
    run.begin()
    to_trouble(run, 17, bad_step=12)
    run.core.unpin("step-00000010-g1")  # so that the rules alone decide
    run.options = replace(run.options, retention=Rules(keep_newest=1, quarantined=1))
    run.open()
    assert run.begin().plan.name == "step-00000010-g1"
    run.core.restored(run.generation, 10, 0.1, "step-00000010-g1", "")
    run.core._keeper.after_save()
    steps = {e.step: e for e in list_checkpoints(run.dir)}
    assert sorted(steps) == [10, 15]
    kept = FolderRun(run.dir).keeping(list_checkpoints(run.dir))
    assert "the newest" in kept.of("step-00000010-g1")["kept"]
    assert all(LEFT in reason for reason in kept.of("step-00000015-g1")["kept"])


def test_each_rollback_in_a_row_goes_one_checkpoint_further_back_and_the_row_has_an_end(tmp_path):
    run = guarded(tmp_path / "demo", on_nonfinite="rollback", max_rollbacks=2)
    run.begin()
    first = to_trouble(run, 17)
    assert first.action == "rollback"
    assert run.begin().plan.name == "step-00000015-g1"
    assert to_trouble(run, 17).action == "rollback"
    plan = run.begin().plan
    assert plan.name == "step-00000010-g1"
    assert "step-00000015-g1 not used: the run was rolled back to before it" in plan.reason
    last = to_trouble(run, 17)
    assert last.action == "stop"
    words = ("step 17", "loss nan", "--guard.max-rollbacks 2", "2 rollbacks in a row", "step 15 is")
    for word in words:
        assert word in last.reason
    assert [e["kind"] for e in run.journal("interruption")] == ["nonfinite"] * 3
    assert [e["lost_steps"] for e in run.journal("interruption")] == [2, 7, 2]
    assert len(run.journal("trouble")) == 3
    assert not run.core.interruption("worker_error", "again", group="group 3").go_on
    run.open()
    assert run.begin().plan.name == "step-00000015-g3", "a new start of a stopped run goes on there"
    assert to_trouble(run, 17).action == "rollback", "and has its rollbacks again"


def test_what_was_left_is_not_restored_after_another_failure_nor_another_start(tmp_path):
    run = guarded(tmp_path / "demo", on_nonfinite="rollback")
    run.begin()
    to_trouble(run, 17)
    run.begin()
    to_trouble(run, 17)
    run.begin()  # at 10
    run.train(1)
    run.core.interruption("node_loss", "a node died")
    run.open()
    assert run.begin().plan.name == "step-00000010-g1"
    run.train(5)
    assert save(run, good())
    run.core.interruption("node_loss", "a node died")
    assert run.begin().plan.name == "step-00000015-g4", "its own course goes on"


def test_a_commit_beyond_the_trouble_ends_the_row(tmp_path):
    run = guarded(tmp_path / "demo", on_nonfinite="rollback", max_rollbacks=1)
    run.begin()
    for stop in (7, 27, 47):
        assert to_trouble(run, stop).action == "rollback"
        run.begin()
    assert to_trouble(run, 48).action == "stop"


def test_a_bad_saved_state_is_told_late_and_nothing_from_it_on_is_restored(tmp_path):
    run = guarded(tmp_path / "demo", on_nonfinite="rollback")
    run.begin()
    to_trouble(run, 17, bad_step=10)
    assert run.begin().plan.name == "step-00000005-g1"


@pytest.mark.parametrize("mode", ["stop", "rollback", "rollback-and-skip"])
def test_trouble_before_the_first_checkpoint(tmp_path, mode):
    run = guarded(tmp_path / "demo", on_nonfinite=mode)
    run.begin()
    remedy = to_trouble(run, 3)
    assert remedy.action == mode
    assert f"--guard.on-nonfinite {mode}" in remedy.reason
    attempt = run.begin()
    assert attempt.plan is None
    assert attempt.skips == ((Skip(from_step=0, steps=3),) if mode == "rollback-and-skip" else ())


def test_holes_are_in_the_journal_and_in_every_later_manifest(tmp_path):
    run = guarded(tmp_path / "demo", on_nonfinite="rollback-and-skip")
    run.begin()
    to_trouble(run, 7)
    run.open()
    attempt = run.begin()
    assert attempt.plan.name == "step-00000005-g1"
    assert attempt.skips == (Skip(from_step=5, steps=2),)
    assert attempt.plan.manifest.skipped == ()
    run.train(5)
    skipped = [asdict(skip) for skip in attempt.skips]
    assert run.core.commit(run.generation, run.written(10, guard=good(), skipped=skipped))
    assert read_manifest(run.folder(10)).skipped == attempt.skips
