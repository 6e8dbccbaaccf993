"""One authority: generations grow, stale writers change nothing, no committed checkpoint is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_ckpt.checkpoint import manifest as manifest_module
from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME, QUARANTINE_NAME, checkpoint_name
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import RestoreError, StaleGenerationError, StorageError
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tracker import house, places
from ray_ckpt.tracker.core import Attempt, Directive, RunFacts, TrackerCore, TrackerOptions
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME, JsonLines, read_lines
from ray_ckpt.tracker.memory import PLANNED, RunMemory
from ray_ckpt.view.story import tell

OPTIONS = TrackerOptions(limits=IntervalLimits(), prior_mtbf_s=3600.0)
CONTENT = {".metadata": b"meta", "__0_0.distcp": b"0123456789", "rank/rng-0.json": b"{}"}


class Clock:
    """Seconds since the epoch, as somebody sets them."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


class Run:
    """A run's folder, the tracker in it, and the worker that talks to it."""

    def __init__(self, folder: Path, options: TrackerOptions = OPTIONS) -> None:
        self.dir, self.options, self.clock = folder, options, Clock()
        self.told: list[dict[str, Any]] = []
        self.core = self.open()
        self.step = 0

    def open(self) -> TrackerCore:
        """A tracker that has only what is on the disk, as after a kill."""
        facts = RunFacts(
            run="demo",
            run_dir=str(self.dir),
            config_fingerprint="c0ffee",
            data_fingerprint="da7a",
            parallel="ddp",
            versions={"torch": "2.13.0"},
        )
        self.core = TrackerCore(facts, self.options, clock=self.clock, on_event=self.told.append)
        return self.core

    @property
    def generation(self) -> int:
        return self.core.memory.generation

    def begin(self, workers: int = 2) -> Attempt:
        """An attempt that restores what it is told to, and trains from there."""
        attempt = self.core.begin_attempt(workers, ["node-a"])
        plan = attempt.plan
        self.step = plan.manifest.step if plan else 0
        source = plan.name if plan else ""
        self.core.restored(
            attempt.generation, self.step, 0.5, source, plan.reason if plan else "new"
        )
        return attempt

    def train(self, count: int, step_time_s: float = 0.5) -> Directive:
        records = [
            {"step": self.step + i, "loss": 1.0, "step_time_s": step_time_s}
            for i in range(1, count + 1)
        ]
        self.step += count
        return self.core.steps(self.generation, records)

    def written(self, step: int, **changes: Any) -> dict[str, Any]:
        """What a worker reports of a save whose files it has just written."""
        folder = self.folder(step)
        files = []
        for path, content in CONTENT.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
            digest = manifest_module._digest(content).decode()
            files.append({"path": path, "bytes": len(content), "checksum": digest})
        return {
            "step": step,
            "samples": 24 * step,
            "tokens": 3072 * step,
            "world_size": 2,
            "files": files,
            "stall_s": 0.1,
            "upload_s": 0.2,
            "metrics": {"loss": 1.0},
            "guard": {},
            "error": None,
            "bitwise_comparable": True,
            **changes,
        }

    def save(self, **changes: Any) -> str:
        """Commits the present step; returns the checkpoint's name."""
        assert self.core.commit(self.generation, self.written(self.step, **changes))
        return checkpoint_name(self.step, self.generation)

    def folder(self, step: int, generation: int | None = None) -> Path:
        return self.dir / "checkpoints" / checkpoint_name(step, generation or self.generation)

    def journal(self, *events: str) -> list[dict[str, Any]]:
        lines = list(read_lines(self.dir / JOURNAL_NAME))
        return [line for line in lines if not events or line["event"] in events]

    def fold(self) -> RunMemory:
        memory = RunMemory()
        for event in self.journal():
            memory.apply(event)
        return memory

    def usable(self) -> list[str]:
        """Names of the checkpoints that can be restored, newest first; every byte is looked at."""
        entries = usable(list_checkpoints(self.dir))
        assert all(e.manifest and verify_files(e.folder, e.manifest) == [] for e in entries)
        return [entry.folder.name for entry in entries]

    def everything(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.dir)): path.read_bytes()
            for path in sorted(self.dir.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "demo")


@pytest.fixture
def two(run) -> Run:
    """A run with checkpoints at the steps 10 and 20, now at step 25."""
    run.begin()
    for count in (10, 10, 5):
        run.train(count)
        if count == 10:
            run.save()
    return run


# ---- any history ----------------------------------------------------------------------------------

ACTIONS = [
    "begin", "steps", "steps", "commit", "commit", "repeat", "bad save", "interrupt", "finish",
    "stale", "reopen", "announce", "torn line", "request", "clock",
]  # fmt: skip
KINDS = st.sampled_from(["worker_error", "node_loss", "hang", "resize", "drain", "user_stop"])
FAULTS = ["missing", "size", "metadata", "error", "path"]


def spoil(run: Run, save: dict[str, Any], fault: str) -> dict[str, Any]:
    folder = run.folder(save["step"])
    if fault == "missing":
        (folder / "__0_0.distcp").unlink()
    elif fault == "size":
        (folder / "__0_0.distcp").write_bytes(b"012")
    elif fault == "metadata":
        (folder / ".metadata").unlink()
        save["files"] = [entry for entry in save["files"] if entry["path"] != ".metadata"]
    elif fault == "error":
        save["error"] = "OSError: no space left on device"
    else:
        (folder.parent / "outside").write_bytes(b"x")
        save["files"] += [{"path": "../outside", "bytes": 1, "checksum": "0" * 32}]
    return save


def of_the_run(memory: RunMemory) -> RunMemory:
    """What is not of a tracker: which one it is, and the time since the last event, which the living one knows."""
    return dataclasses.replace(memory, exposure_s=0.0, tracker=None)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_history_keeps_generations_checkpoints_and_counts(tmp_path_factory, data):
    run = Run(tmp_path_factory.mktemp("run"))
    committed: list[str] = []
    interruptions: list[str] = []
    last_save: dict[str, Any] | None = None
    for _ in range(data.draw(st.integers(5, 40), label="length")):
        action = data.draw(st.sampled_from(ACTIONS))
        generation, is_open = run.generation, run.core.memory.attempt_open
        ended = False
        if action == "begin":
            if is_open:
                interruptions.append("lost")
            attempt = run.begin(data.draw(st.integers(1, 4)))
            assert attempt.generation == generation + 1
            assert (attempt.plan.name if attempt.plan else None) == (
                run.usable()[0] if committed else None
            )
        elif action == "steps" and is_open:
            run.train(data.draw(st.integers(1, 3)))
        elif action in ("commit", "bad save") and is_open and run.step:
            save = run.written(run.step)
            name = run.folder(run.step).name
            if name in committed:
                continue
            if action == "commit":
                assert run.core.commit(generation, save)
                committed.append(name)
                last_save = save
            else:
                save = spoil(run, save, data.draw(st.sampled_from(FAULTS)))
                assert not run.core.commit(generation, save)
                assert not run.folder(run.step).exists()
        elif action == "repeat" and last_save and run.folder(last_save["step"]).exists():
            before = run.everything()
            assert run.core.commit(generation, last_save)
            assert run.everything() == before
        elif action == "interrupt" and is_open:
            kind = data.draw(KINDS)
            run.core.interruption(kind, "somebody said so")
            interruptions.append(kind)
            ended = True
        elif action == "finish" and is_open:
            run.core.finished(generation, run.step)
            ended = True
        elif action == "stale":
            before = run.everything()
            with pytest.raises(StaleGenerationError):
                run.core.steps(generation - 1, [{"step": 1, "step_time_s": 1.0}])
            assert run.everything() == before
        elif action == "request":
            run.core.request_save("somebody asked")
        elif action == "announce":
            run.core.announce()
        elif action == "clock":
            run.clock.now += data.draw(st.sampled_from([-1e6, -1.0, 3600.0]))
        elif action in ("torn line", "reopen"):
            if action == "torn line":
                with (run.dir / JOURNAL_NAME).open("ab") as file:
                    file.write(b'{"time": 1.0, "generation": 99, "event": "attempt_sta')
            before_kill = run.core.memory
            run.open()
            assert of_the_run(run.core.memory) == of_the_run(before_kill)
            assert run.core.memory.exposure_s <= before_kill.exposure_s
        # What the tracker knows is what the journal says, at every instant.
        assert of_the_run(run.fold()) == of_the_run(run.core.memory)
        if ended:
            assert run.fold().exposure_s == run.core.memory.exposure_s
            assert not run.core.memory.attempt_open
        assert run.generation >= generation
        assert sorted(run.usable()) == sorted(committed)
    assert run.core.memory.interruptions.total() == len(interruptions)
    assert all(
        run.core.memory.interruptions[kind] == interruptions.count(kind) for kind in interruptions
    )
    assert run.core.memory.failures == sum(kind not in PLANNED for kind in interruptions)
    generations = [e["generation"] for e in run.journal("attempt_started")]
    assert generations == list(range(1, run.generation + 1))
    # Every executed step was kept or is counted as lost.
    if run.generation:
        if run.core.memory.attempt_open:
            run.core.interruption("user_stop", "the end")
        kept = max(
            (read_manifest(run.dir / "checkpoints" / name).step for name in committed), default=0
        )
        executed = len(list(read_lines(run.dir / STEPS_NAME)))
        # What a finished run lost is told when it is taken up again.
        if run.core.memory.finished_step is None:
            assert run.core.memory.lost_steps + kept == executed
    # The story of each event can be told.
    assert all(isinstance(tell(event), str | None) for event in run.told)


# ---- generations ----------------------------------------------------------------------------------

STALE_CALLS: dict[str, Callable[[TrackerCore, int, dict[str, Any]], object]] = {
    "restored": lambda core, g, save: core.restored(g, 3, 0.1, "step-00000010-g1", "because"),
    "reject": lambda core, g, save: core.reject(g, "step-00000010-g1", [Fault("a", "missing")]),
    "finished": lambda core, g, save: core.finished(g, 300),
    "steps": lambda core, g, save: core.steps(g, [{"step": 99, "step_time_s": 0.1}]),
    "commit": lambda core, g, save: core.commit(g, save),
    "report of a failed save": lambda core, g, save: core.commit(g, {**save, "error": "late"}),
}


@pytest.mark.parametrize("call", STALE_CALLS)
@pytest.mark.parametrize("reopened", [False, True])
def test_a_stale_generation_is_refused_and_changes_nothing(two, call, reopened):
    stale, save = two.generation, two.written(25)  # the old attempt is still writing this one
    two.core.interruption("node_loss", "gone")
    two.begin()
    if reopened:
        two.open()
    before, status = two.everything(), two.core.status()
    for generation in (stale, two.generation + 1, 0, -1):
        with pytest.raises(StaleGenerationError, match=r"'demo'.*Nothing was changed"):
            STALE_CALLS[call](two.core, generation, save)
        assert two.everything() == before
        assert two.core.status() == status


def test_no_call_is_accepted_before_the_first_attempt(run):
    with pytest.raises(StaleGenerationError):
        run.core.steps(1, [{"step": 1, "step_time_s": 0.1}])


def test_generation_0_is_nobody(run):
    with pytest.raises(StaleGenerationError):
        run.core.steps(0, [{"step": 1, "step_time_s": 0.1}])


def test_generations_grow_over_reopened_and_torn_journals(run):
    given = []
    for _ in range(4):
        given.append(run.begin().generation)
        path = run.dir / JOURNAL_NAME
        with path.open("ab") as file:
            file.write(b'{"generation": 50, "event": "attempt_started", "wor')
        run.open()
    assert given == [1, 2, 3, 4]
    assert run.core.memory.interruptions == {"lost": 3}


def test_a_generation_that_cannot_be_put_on_record_is_not_given_out(run, monkeypatch):
    run.begin()
    run.core.interruption("worker_error", "x")

    def full(self: JsonLines, event: dict[str, Any]) -> None:
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", full)
        for _ in range(2):
            with pytest.raises(StorageError):
                run.core.begin_attempt(2, [])
    assert run.begin().generation == 2
    assert [e["generation"] for e in run.journal("attempt_started")] == [1, 2]


def test_a_tracker_that_takes_up_a_run_says_so_and_changes_nothing_else(two):
    before = two.core.memory
    for _ in range(2):
        lines = len(two.journal())
        two.open().announce()
        event = two.journal()[-1]
        assert (event["event"], event["events_read"]) == ("tracker_started", lines)
        assert (event["host"], event["pid"]) == (platform.node(), os.getpid())
        assert two.told[-1] == event
        assert of_the_run(two.core.memory) == of_the_run(before)
    assert two.train(1).every_steps  # the attempt goes on


def test_a_lost_journal_does_not_give_a_generation_out_twice(two):
    two.core.interruption("node_loss", "x")
    two.begin()
    two.train(5)
    two.save()
    (two.dir / JOURNAL_NAME).unlink()
    two.open()
    assert two.begin().generation == 3


def test_a_damaged_line_does_not_give_a_generation_out_twice(two):
    path = two.dir / JOURNAL_NAME
    path.write_bytes(path.read_bytes().replace(b'"attempt_started"', b'"attempt_started', 1))
    two.open()
    assert two.begin().generation == 2


# ---- interruptions --------------------------------------------------------------------------------


def test_an_attempt_that_ended_without_a_word_is_counted_as_lost(two):
    two.open()
    attempt = two.begin()
    [event] = two.journal("interruption")
    assert (event["kind"], event["step"], event["lost_steps"]) == ("lost", 25, 5)
    assert "without a word" in event["cause"]
    assert attempt.generation == 2
    assert attempt.plan is not None
    assert attempt.plan.name == "step-00000020-g1"
    assert two.core.memory.lost_steps == 5
    assert two.core.memory.failures == 1


def test_a_finished_attempt_was_not_lost(two):
    two.core.finished(two.generation, 25)
    two.open()
    assert two.core.memory.finished_step == 25
    two.begin()
    assert two.journal("interruption") == []
    assert two.core.memory.finished_step is None


@pytest.mark.parametrize("kind", ["user_stop", "resize", "drain", "worker_error", "node_loss"])
def test_who_ends_a_group_whose_run_is_finished_interrupts_nothing(two, kind):
    two.core.finished(two.generation, 25)
    before = len(two.told)
    verdict = two.core.interruption(kind=kind, cause="it came with the last step", group="g")
    assert verdict.go_on
    assert two.told[before:] == []
    assert two.core.memory.finished_step == 25


@pytest.mark.parametrize("reopened", [False, True])
def test_steps_are_lost_once_when_an_attempt_ends_before_it_restored(two, reopened):
    two.core.interruption("node_loss", "x")
    two.core.begin_attempt(2, [])
    if reopened:
        two.open()
    two.core.interruption("node_loss", "again, before anything was restored")
    assert two.core.memory.lost_steps == 5


def test_steps_are_lost_once_when_a_restored_attempt_is_killed_at_once(two):
    two.core.interruption("node_loss", "x")
    two.begin()
    two.open()
    two.begin()
    assert two.core.memory.lost_steps == 5


def test_steps_behind_a_rejected_checkpoint_are_lost_too(two):
    two.core.interruption("node_loss", "x")
    attempt = two.core.begin_attempt(2, [])
    plan = two.core.reject(attempt.generation, "step-00000020-g1", [Fault("a", "missing")])
    two.core.restored(attempt.generation, plan.manifest.step, 0.1, plan.name, plan.reason)
    two.core.interruption("node_loss", "y")
    assert two.core.memory.lost_steps == 15  # 25 executed, 10 kept


def test_attempts_without_a_new_step_stop_the_run(two):
    for n in range(3):
        assert two.core.interruption("worker_error", f"crash {n}").go_on
        two.begin()
    two.train(2)  # to step 22: done before, so nothing is won
    verdict = two.core.interruption("worker_error", "crash 3")
    assert not verdict.go_on
    for word in ("3 attempts in a row", "step 22", "crash 3"):
        assert word in verdict.reason


def test_a_new_step_starts_the_count_again(two):
    for _ in range(5):
        assert two.core.interruption("worker_error", "x").go_on
        two.begin()
        assert two.core.interruption("worker_error", "x").go_on
        two.begin()
        two.train(6 + two.core.memory.best_step - two.step)


def test_the_count_of_fruitless_attempts_survives_a_resubmission(run):
    for _ in range(2):
        run.begin()
        assert run.core.interruption("worker_error", "x").go_on
        run.open()
    run.begin()
    assert not run.core.interruption("worker_error", "x").go_on


def test_resizes_in_between_do_not_hide_that_nothing_is_won(run):
    verdicts = []
    for kind in ("worker_error", "resize", "worker_error", "resize", "worker_error"):
        run.begin()
        verdicts.append(run.core.interruption(kind, "x").go_on)
    assert verdicts[-1] is False


def test_attempts_that_commit_are_not_fruitless(run):
    run.begin()
    run.train(100)
    run.core.interruption("node_loss", "x")  # nothing was committed: all is to do again
    for _ in range(4):
        run.begin()
        run.train(20)
        run.save()
        assert run.core.interruption("node_loss", "x").go_on


def test_the_end_of_a_group_is_counted_once_however_often_it_is_told(two):
    first = two.core.interruption("node_loss", "x", group="a")
    before = two.everything()
    assert two.core.interruption("node_loss", "x", group="a") == first
    two.open()  # the answer was lost with the actor, and the call comes again
    assert two.core.interruption("node_loss", "x", group="a") == first
    assert two.everything() == before
    assert two.core.memory.interruptions == {"node_loss": 1}
    assert two.core.memory.lost_steps == 5


def test_groups_whose_attempt_never_began_are_failures_too(two):
    two.core.interruption("worker_error", "x", group="a")
    verdicts = [two.core.interruption("worker_error", f"crash {g}", group=g) for g in "bcd"]
    assert [verdict.go_on for verdict in verdicts] == [True, True, False]
    assert "crash d" in verdicts[-1].reason
    assert two.core.memory.failures == 4
    assert two.core.memory.lost_steps == 5  # none but those of the first


def test_an_attempt_that_committed_is_not_fruitless_even_when_one_is_enough_to_stop(tmp_path):
    run = Run(tmp_path / "demo", dataclasses.replace(OPTIONS, max_fruitless=1))
    run.begin()
    run.train(100)
    assert run.core.interruption("node_loss", "x").go_on
    run.begin()
    run.train(20)
    run.save()
    assert run.core.interruption("node_loss", "x").go_on
    run.begin()
    assert not run.core.interruption("node_loss", "x").go_on


def test_an_interruption_is_on_record_when_the_checkpoints_cannot_be_listed(two, monkeypatch):
    def refuse(run_dir: Path) -> None:
        raise StorageError("cannot list")

    with monkeypatch.context() as patch:
        patch.setattr(house, "list_checkpoints", refuse)
        assert two.core.interruption("node_loss", "the storage went with it").go_on
    [event] = two.journal("interruption")
    assert event["cause"] == "the storage went with it"
    two.begin()  # by now storage tells what was kept
    assert two.core.memory.lost_steps == 5
    assert two.fold() == two.core.memory


def test_a_checkpoint_that_comes_back_gives_its_steps_back(two):
    two.core.interruption("node_loss", "x")
    attempt = two.core.begin_attempt(2, [])
    fault = [Fault("__0_0.distcp", "unreadable: Input/output error")]
    plan = two.core.reject(attempt.generation, "step-00000020-g1", fault)
    two.core.restored(attempt.generation, 10, 0.1, plan.name, plan.reason)
    assert two.core.memory.lost_steps == 15
    two.step = 10
    two.train(2)
    two.core.interruption("node_loss", "y")
    assert two.begin().plan.name == "step-00000020-g1"
    assert two.core.memory.lost_steps == 7  # 27 executed, 20 kept
    assert [e["lost_steps_more"] for e in two.journal("restored")] == [0, 10, -8]


def test_steps_after_the_end_was_told_are_lost_too(two):
    two.core.interruption("resize", "x")  # told before Ray tears the group down
    two.train(2)
    two.begin()
    assert two.core.memory.lost_steps == 7


# ---- commits --------------------------------------------------------------------------------------


def test_a_commit_is_complete_and_says_so(two):
    entry = usable(list_checkpoints(two.dir))[0]
    manifest = entry.manifest
    assert manifest is not None
    assert (manifest.step, manifest.generation, manifest.sample_offset) == (20, 1, 480)
    assert (manifest.config_fingerprint, manifest.data_fingerprint) == ("c0ffee", "da7a")
    assert {file.path for file in manifest.files} == set(CONTENT)
    line = two.journal("commit")[-1]
    assert (line["step"], line["name"], line["files"]) == (20, "step-00000020-g1", 3)
    assert two.core.memory.last_commit_step == 20


@pytest.mark.parametrize("fault", FAULTS)
def test_an_incomplete_save_is_refused_told_and_removed(two, fault):
    before = two.everything()
    save = spoil(two, two.written(25), fault)
    assert two.core.commit(two.generation, save) is False
    [event] = two.journal("save_failed")
    assert (event["step"], event["name"]) == (25, "step-00000025-g1")
    words = {
        "missing": "__0_0.distcp is not there",
        "size": "has 3 bytes, 10 were written",
        "metadata": "metadata",
        "error": "no space left",
        "path": "stay inside",
    }
    assert words[fault] in event["error"]
    assert not two.folder(25).exists()
    (two.dir / "checkpoints" / "outside").unlink(missing_ok=True)
    after = two.everything()
    assert {k: v for k, v in after.items() if "step-" in k} == {
        k: v for k, v in before.items() if "step-" in k
    }
    assert two.core.memory.failed_in_a_row == 1
    # The next save is as good as any.
    two.train(1)
    two.save()
    assert two.core.memory.failed_in_a_row == 0
    assert two.usable()[0] == "step-00000026-g1"


def test_a_save_without_files_is_not_a_checkpoint(two):
    assert not two.core.commit(1, two.written(25, files=[]))
    assert two.usable() == ["step-00000020-g1", "step-00000010-g1"]


@pytest.mark.parametrize(
    "error", [StorageError("disk full"), OSError(28, "No space left on device")]
)
def test_a_manifest_that_cannot_be_written_harms_no_earlier_checkpoint(two, monkeypatch, error):
    def refuse(*_: Any) -> None:
        raise error

    save = two.written(25)
    with monkeypatch.context() as patch:
        patch.setattr(places, "write_manifest", refuse)
        assert two.core.commit(1, save) is False
    assert two.usable() == ["step-00000020-g1", "step-00000010-g1"]
    assert not two.folder(25).exists()
    assert two.core.commit(1, two.written(25))


def test_the_same_commit_again_changes_nothing(two):
    save = two.written(25)
    assert two.core.commit(1, save)
    before = two.everything()
    assert two.core.commit(1, save)
    two.open()
    assert two.core.commit(1, save)
    after = two.everything()
    assert [e["event"] for e in two.journal("commit")] == ["commit"] * 3
    assert {k: v for k, v in after.items() if k != JOURNAL_NAME} == {
        k: v for k, v in before.items() if k != JOURNAL_NAME
    }


def test_a_tracker_that_died_between_manifest_and_journal_does_not_delete_the_checkpoint(
    two, monkeypatch
):
    save = two.written(25)

    class KilledError(BaseException):
        """Stands for SIGKILL: nothing after it runs."""

    def killed(*_: Any, **__: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(two.core._saves, "_record", killed)
        with pytest.raises(KilledError):
            two.core.commit(1, save)
    assert two.usable()[0] == "step-00000025-g1"
    two.open()  # Ray restarts the actor and sends the call again
    assert two.core.commit(1, save)
    assert two.usable()[0] == "step-00000025-g1"
    assert [e["step"] for e in two.journal("commit")] == [10, 20, 25]


@pytest.mark.parametrize("error", [None, "reported late"])
def test_a_late_report_about_an_older_checkpoint_does_not_delete_it(two, error):
    two.core.commit(1, two.written(10, error=error))
    assert two.usable() == ["step-00000020-g1", "step-00000010-g1"]


@pytest.mark.parametrize("damage", [b"", b"{"])
def test_a_damaged_checkpoint_is_nobodys_to_delete(two, damage):
    save = two.written(20)
    (two.folder(20) / MANIFEST_NAME).write_bytes(damage)
    assert two.core.commit(1, save) is False
    assert (two.folder(20) / MANIFEST_NAME).read_bytes() == damage
    assert (two.folder(20) / "__0_0.distcp").exists()


def test_a_folder_that_storage_does_not_tell_about_is_nobodys_to_delete(two, monkeypatch):
    def refuse(path: Path) -> None:
        raise StorageError(f"cannot read {path}: Input/output error")

    save = two.written(20)
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "read_bytes", refuse)
        assert two.core.commit(1, save) is False
    assert two.usable() == ["step-00000020-g1", "step-00000010-g1"]


@pytest.mark.parametrize(
    "entry", [{"path": ".metadata", "bytes": 4, "checksum": "0" * 32, "x": 1}, {}]
)
def test_a_report_of_a_save_that_is_not_understood_is_a_failed_save(two, entry):
    save = two.written(25)
    assert not two.core.commit(1, {**save, "files": [entry]})
    assert "cannot be understood" in two.journal("save_failed")[0]["error"]
    assert not two.folder(25).exists()


def test_who_looks_on_cannot_undo_a_commit(two):
    def refuse(event: dict[str, Any]) -> None:
        raise UnicodeEncodeError("ascii", "\u20ac", 0, 1, "the terminal cannot show it")

    two.core._record._on_event = refuse
    assert two.core.commit(1, two.written(25))
    assert two.usable()[0] == "step-00000025-g1"
    assert two.core.memory.last_commit_step == 25


# ---- what is offered for a restore ----------------------------------------------------------------


def test_a_run_without_checkpoints_begins_at_the_beginning(run):
    assert run.begin().plan is None
    run.train(3)
    run.core.interruption("worker_error", "before the first save")
    assert run.begin().plan is None
    assert run.core.memory.lost_steps == 3


def test_a_save_that_was_never_committed_is_not_offered(two):
    two.written(25)
    two.core.interruption("node_loss", "x")
    plan = two.begin().plan
    assert plan is not None
    assert plan.name == "step-00000020-g1"
    assert "step-00000025-g1 not used: no manifest" in plan.reason
    assert not (two.folder(25, 1) / QUARANTINE_NAME).exists()


@pytest.mark.parametrize("damage", [b"", b'{"schema": 1', b"\0" * 400])
def test_a_corrupt_manifest_is_quarantined_and_the_next_older_offered(two, damage):
    folder = two.folder(20)
    (folder / MANIFEST_NAME).write_bytes(damage)
    two.core.interruption("node_loss", "x")
    plan = two.begin().plan
    assert plan is not None
    assert plan.name == "step-00000010-g1"
    assert "step-00000020-g1" in plan.reason
    assert "manifest" in plan.reason
    assert (folder / QUARANTINE_NAME).exists()
    [event] = two.journal("quarantine")
    assert event["name"] == folder.name
    # It is told once, not at every attempt.
    two.begin()
    assert len(two.journal("quarantine")) == 1


def test_a_flipped_digit_in_the_newest_manifest_is_seen(two):
    path = two.folder(20) / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"sample_offset": 480', b'"sample_offset": 481'))
    plan = two.begin().plan
    assert plan is not None
    assert plan.name == "step-00000010-g1"


def test_a_rejected_checkpoint_is_never_offered_again(two):
    two.begin()
    fault = [Fault("__0_0.distcp", "checksum differs")]
    plan = two.core.reject(2, "step-00000020-g1", fault)
    assert plan.name == "step-00000010-g1"
    assert "step-00000020-g1 not used: __0_0.distcp: checksum differs" in plan.reason
    [event] = two.journal("quarantine")
    assert event["faults"] == [{"path": "__0_0.distcp", "fault": "checksum differs"}]
    two.open()
    assert two.begin().plan.name == "step-00000010-g1"
    with pytest.raises(RestoreError, match="never starts from zero"):
        two.core.reject(3, "step-00000010-g1", fault)


def test_a_checkpoint_that_storage_would_not_give_is_skipped_not_condemned(two):
    two.begin()
    fault = [Fault("__0_0.distcp", "unreadable: Input/output error")]
    plan = two.core.reject(2, "step-00000020-g1", fault)
    assert plan.name == "step-00000010-g1"
    assert [e["name"] for e in two.journal("skipped")] == ["step-00000020-g1"]
    assert two.journal("quarantine") == []
    # Storage is back at the next attempt: so is the checkpoint.
    assert two.begin().plan.name == "step-00000020-g1"


def test_a_manifest_that_storage_would_not_give_is_skipped_not_condemned(two, monkeypatch):
    real, blocked = manifest_module.read_bytes, {"step-00000020-g1"}

    def flaky(path: Path) -> bytes | None:
        if path.parent.name in blocked:
            raise StorageError(f"cannot read {path}: Input/output error")
        return real(path)

    monkeypatch.setattr(manifest_module, "read_bytes", flaky)
    plan = two.begin().plan
    assert plan is not None
    assert plan.name == "step-00000010-g1"
    assert "step-00000020-g1 not used: unreadable" in plan.reason
    blocked.add("step-00000010-g1")
    with pytest.raises(RestoreError, match="never starts from zero"):
        two.core.begin_attempt(2, [])
    blocked.clear()
    assert two.begin().plan.name == "step-00000020-g1"
    assert two.journal("quarantine") == []


def test_the_reason_why_nothing_can_be_restored_is_told_for_each(two):
    two.begin()
    fault = [Fault("__0_0.distcp", "unreadable: Input/output error")]
    two.core.reject(2, "step-00000020-g1", fault)
    with pytest.raises(RestoreError) as caught:
        two.core.reject(2, "step-00000010-g1", fault)
    assert "None" not in str(caught.value)
    assert "unreadable" in str(caught.value)


def test_a_damaged_newer_save_of_the_same_step_is_named(two):
    two.core.interruption("node_loss", "x")
    two.begin()
    two.train(5)
    two.save()
    two.begin()
    two.core.steps(3, [])
    two.step = 25
    two.save()
    (two.folder(25, 3) / MANIFEST_NAME).write_bytes(b"")
    plan = two.begin().plan
    assert plan is not None
    assert plan.name == "step-00000025-g2"
    assert "step-00000025-g3" in plan.reason


def _delete_manifests(run: Run) -> None:
    for path in run.dir.rglob(MANIFEST_NAME):
        path.unlink()


def _delete_folders(run: Run) -> None:
    shutil.rmtree(run.dir / "checkpoints")


def _damage_and_forget(run: Run) -> None:
    for path in run.dir.rglob(MANIFEST_NAME):
        path.write_bytes(b"{")
    (run.dir / JOURNAL_NAME).unlink()


@pytest.mark.parametrize("harm", [_delete_manifests, _delete_folders, _damage_and_forget])
def test_a_run_whose_checkpoints_are_gone_never_starts_from_zero(two, harm):
    harm(two)
    two.open()
    before = two.generation
    for _ in range(2):
        with pytest.raises(RestoreError, match=r"'demo'.*never starts from zero.*--run"):
            two.core.begin_attempt(2, [])
    assert two.generation == before


# ---- disks and clocks -----------------------------------------------------------------------------


class FullDisk:
    """Lets no line through while it is full."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full, real = False, JsonLines.append

        def append(lines: JsonLines, event: dict[str, Any]) -> None:
            if self.full:
                raise StorageError(f"{lines.path} cannot be written")
            real(lines, event)

        patch.setattr(JsonLines, "append", append)


def test_lines_wait_while_the_disk_is_full_and_come_in_order(two, monkeypatch):
    disk = FullDisk(monkeypatch)
    disk.full = True
    two.train(5)
    two.save()  # the checkpoint's own bytes had room
    two.core.request_save("because")
    assert two.core.memory.last_commit_step == 30
    assert [e["step"] for e in two.journal("commit")] == [10, 20]
    disk.full = False
    two.train(1)
    two.core.interruption("worker_error", "x")
    assert [e["step"] for e in two.journal("commit")] == [10, 20, 30]
    times = [e["time"] for e in two.journal()]
    assert times == sorted(times)
    steps = list(read_lines(two.dir / STEPS_NAME))
    assert [record["step"] for record in steps] == list(range(1, 32))
    assert {record["generation"] for record in steps} == {1}
    assert two.fold() == two.core.memory


def test_a_failed_sync_does_not_put_a_line_down_twice(two, monkeypatch):
    def refuse(handle: int) -> None:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        two.core.interruption("worker_error", "x")
    two.begin()
    assert len(two.journal("interruption")) == 1
    assert two.fold() == two.core.memory


def test_a_generation_that_the_disk_does_not_promise_to_keep_is_not_given_out(run, monkeypatch):
    def refuse(handle: int) -> None:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError):
            run.core.begin_attempt(2, [])
    assert run.fold() == run.core.memory
    assert run.begin().generation == 2
    assert [e["generation"] for e in run.journal("attempt_started")] == [1, 2]


def test_a_record_that_cannot_be_written_does_not_block_those_after_it(two):
    with pytest.raises(TypeError):
        two.core.steps(1, [{"step": 26, "step_time_s": 0.5, "loss": object()}])
    two.core.steps(1, [{"step": 27, "step_time_s": 0.5}])
    assert [r["step"] for r in read_lines(two.dir / STEPS_NAME)][-1] == 27


def test_a_clock_that_goes_back_breaks_nothing(two):
    first = two.core.memory.first_time
    two.clock.now -= 1e7
    two.train(5)
    two.save()
    two.open()
    plan = two.begin().plan
    assert plan is not None
    assert plan.name == "step-00000030-g1"  # the newest by step, whatever the clock said
    assert two.core.memory.first_time == first
    assert two.core.memory.exposure_s >= 0
    assert two.core.memory.lost_steps == 0


# ---- decisions ------------------------------------------------------------------------------------


def test_the_decision_follows_what_is_measured_and_explains_itself(run):
    attempt = run.begin()
    assert attempt.directive.every_steps == OPTIONS.limits.first_steps
    assert attempt.directive.reason.startswith("first: ")
    run.train(10)
    run.save(stall_s=0.1)
    small = run.train(1)
    assert small.reason.startswith("exact: stall C 100 ms, MTBF M ")
    for _ in range(3):
        run.train(5)
        run.save(stall_s=10.0)
    large = run.train(1)
    assert "stall C 10 s" in large.reason
    assert large.every_steps == pytest.approx(10 * small.every_steps, rel=0.05)
    decisions = run.journal("decision")
    assert len(decisions) >= 2
    assert "stall C 100 ms" in decisions[0]["reason"]
    assert "stall C 10 s" in decisions[-1]["reason"]


def test_failures_shorten_the_interval_and_planned_ends_do_not(run):
    def after(kind: str) -> int:
        run.core.interruption(kind, "x")
        run.begin()
        return run.train(5).every_steps

    run.begin()
    run.train(10)
    run.save(stall_s=1.0)
    calm = run.train(5).every_steps
    # Not less: the time that went by without a failure counts too.
    assert after("resize") >= calm
    assert after("drain") >= calm
    assert after("node_loss") < 0.8 * calm


@pytest.mark.parametrize("reopened", [False, True])
def test_a_run_that_shrinks_knows_its_new_failure_rate_at_once(run, reopened):
    # Spot nodes: a machine is lost in three weeks, a job by itself in a day.
    run.options = dataclasses.replace(
        OPTIONS, prior_mtbf_s=86400.0, prior_per_1000_worker_days=50.0
    )
    run.open()
    run.begin(512)
    run.train(10)
    run.save(stall_s=1.0)
    for _ in range(30):
        run.train(20, step_time_s=100.0)
        run.core.interruption("node_loss", "x")
        run.begin(512)
    large = run.core.status()["mtbf_s"]
    assert large == pytest.approx(2000, rel=0.25)
    run.core.interruption("resize", "to fewer workers")
    if reopened:
        run.open()
    reason = run.begin(64).directive.reason
    small = run.core.status()["mtbf_s"]
    assert 3 * large < small < 8 * large
    assert "at 64 workers (30 failures seen, 90 %: " in reason
    run.core.interruption("resize", "to as many as before")
    run.begin(512)
    assert run.core.status()["mtbf_s"] == pytest.approx(large, rel=0.01)


def test_steps_that_an_upload_slows_are_a_cost_of_the_save(run):
    run.begin()
    run.train(10, step_time_s=1.0)
    for _ in range(3):
        written = run.written(run.step, stall_s=0.1, upload_s=10.0)
        run.train(8, step_time_s=1.25)
        assert run.core.commit(run.generation, written)
        run.train(20, step_time_s=1.0)
    assert "upload U 10 s slowing steps by 20 %" in run.train(1).reason
    # Dearer by 2 s each than the stall alone.
    assert run.core.status()["decision"]["every_steps"] > 90


def test_one_odd_save_does_not_move_the_interval(run):
    run.begin()
    for stall_s in (1.0, 1.0, 60.0):
        run.train(10)
        run.save(stall_s=stall_s)
    assert "stall C 1 s" in run.train(5).reason


def test_a_new_attempt_does_not_forget_what_was_measured(two):
    two.train(5)
    two.core.interruption("resize", "x")
    assert "nothing measured" not in two.begin().directive.reason


@pytest.mark.parametrize("reopened", [False, True])
def test_the_pace_of_the_attempt_before_holds_until_a_few_steps_tell_the_new_one(two, reopened):
    before = two.train(5, step_time_s=0.5)
    two.core.interruption("resize", "to fewer workers")
    if reopened:
        two.open()
    begun = two.begin(1).directive
    assert begun.every_steps == pytest.approx(before.every_steps, rel=0.1)
    now = two.train(3, step_time_s=5.0)
    assert now.every_steps == pytest.approx(begun.every_steps / 10, rel=0.1)
    assert two.journal("decision")[-1]["every_steps"] == now.every_steps


def test_requests_for_a_save_reach_the_workers(two):
    seen = two.train(1).save_request
    number = two.core.request_save("a drain is coming")
    assert two.train(1).save_request == number > seen
    assert two.journal("save_requested")[-1]["reason"] == "a drain is coming"


def test_the_number_of_a_request_grows_over_a_restart_of_the_tracker(two):
    number = two.core.request_save("one")
    two.open()
    assert two.core.request_save("two") > number


def test_failed_saves_in_a_row_reach_the_workers(two):
    for n in (1, 2):
        two.core.commit(1, two.written(25, error="no"))
        assert two.train(1).failed_in_a_row == n
    two.save()
    assert two.train(1).failed_in_a_row == 0


def test_the_status_is_plain_values(two):
    status = json.loads(json.dumps(two.core.status()))
    assert (status["step"], status["commits"], status["last_commit_step"]) == (25, 2, 20)
    assert status["step_time_s"] == 0.5
    assert status["decision"]["formula"] == "exact"


# ---- beside another tracker -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["commit", "steps", "restored", "begin_attempt", "reject"])
def test_a_tracker_that_was_frozen_while_another_took_over_changes_nothing(two, call):
    """Storage that gives locks for a time only lets a second tracker in while the first one sleeps."""
    frozen, generation = two.core, two.generation
    save = two.written(30)
    two.open()
    two.begin()
    before = two.everything()
    calls: dict[str, Callable[[], Any]] = {
        "commit": lambda: frozen.commit(generation, save),
        "steps": lambda: frozen.steps(generation, [{"step": 26, "step_time_s": 0.5, "loss": 1.0}]),
        "restored": lambda: frozen.restored(generation, 0, 0.1, "", "r"),
        "begin_attempt": lambda: frozen.begin_attempt(2, ["a"]),
        "reject": lambda: frozen.reject(
            generation, "step-00000020-g1", [Fault("x", "checksum differs")]
        ),
    }
    with pytest.raises(StaleGenerationError, match=r"another tracker has taken over.*attempt 2"):
        calls[call]()
    assert two.everything() == before
    two.train(1)  # and the other one is not harmed
    two.save()


def test_a_line_of_somebody_else_in_the_journal_stops_nobody(two):
    with JsonLines(two.dir / JOURNAL_NAME, sync=False) as journal:  # as `ray-ckpt gc` leaves it
        journal.append({"time": 1.0, "generation": 1, "event": "unpin", "name": "x"})
    two.train(1)
    two.save()


def test_records_that_are_gone_are_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin()
    run.train(5)
    name = run.save()
    for gone in (JOURNAL_NAME, STEPS_NAME):
        (tmp_path / gone).unlink()
    run.open()
    assert run.begin().plan is not None
    told = {alert["name"]: alert["problem"] for alert in run.journal("alert")}
    assert name in told[JOURNAL_NAME]
    assert "ends at step 0, and the run goes on from step 5" in told[STEPS_NAME]
    run.core.interruption("worker_error", "again")
    run.begin()
    assert len(run.journal("alert")) == 2
    run.train(2)
    run.save()
    run.open()
    run.begin()
    assert len(run.journal("alert")) == 2, "what is there again is not missed"
