"""The tracker puts the start of a segment on record before a step of it is made, once, and takes its side for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tracker_core import OPTIONS, Run

from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import ConfigError, RestoreError, StaleGenerationError, StorageError
from ray_ckpt.segment import FIRST, Segment
from ray_ckpt.tiers.pins import read_pins
from ray_ckpt.tracker import segments as segments_module
from ray_ckpt.tracker.core import RunFacts, TrackerCore
from ray_ckpt.tracker.identity import IDENTITY_NAME, check_identity
from ray_ckpt.tracker.journal import JsonLines

OLD, NEW = {"--global-batch": 24, "--seed": 0}, {"--global-batch": 48, "--seed": 0}


class Changing(Run):
    """A run that is started with options, as the driver does it."""

    def __init__(self, folder: Path) -> None:
        self.identity, self.reason = OLD, ""
        check_identity(folder, OLD)
        super().__init__(folder)

    def open(self) -> TrackerCore:
        facts = RunFacts(
            run="demo",
            run_dir=str(self.dir),
            config_fingerprint="c0ffee",
            data_fingerprint="da7a",
            parallel="ddp",
            versions={},
            identity=self.identity,
            change_reason=self.reason,
        )
        self.core = TrackerCore(facts, OPTIONS, clock=self.clock, on_event=self.told.append)
        return self.core

    def start(self, identity: dict[str, Any], reason: str = "") -> Segment:
        """A new driver with these options, and an attempt that restores what it is told to."""
        check_identity(self.dir, identity, reason)
        self.identity, self.reason = identity, reason
        self.open()
        return self.resume()

    def resume(self, bad: int = 0) -> Segment:
        """The next attempt, for which the newest ``bad`` checkpoints are damaged."""
        attempt = self.core.begin_attempt(2, ["a"])
        plan = attempt.plan
        for _ in range(bad):
            plan = self.core.reject(attempt.generation, plan.name, [Fault("a", "checksum differs")])
        self.step, self.samples = (
            (plan.manifest.step, plan.manifest.sample_offset) if plan else (0, 0)
        )
        self.where = {
            "step": self.step,
            "samples": self.samples,
            "mark": dict(plan.manifest.segment) if plan else None,
            "source": plan.name if plan else "",
        }
        segment = self.core.segment_at(attempt.generation, **self.where)
        self.core.restored(attempt.generation, self.step, 0.1, self.where["source"], "r")
        return segment

    def advance(self, steps: int) -> str:
        """Trains and commits; returns the checkpoint's name."""
        self.train(steps)
        self.samples += steps * self.identity["--global-batch"]
        return self.save(samples=self.samples)

    @property
    def record(self) -> list[dict[str, Any]]:
        return json.loads((self.dir / IDENTITY_NAME).read_text())["segments"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture
def run(tmp_path) -> Changing:
    """Committed at steps 3 and 6, with a global batch of 24."""
    run = Changing(tmp_path / "demo")
    assert run.resume() == Segment(options={"--global-batch": 24})
    run.advance(3)
    run.advance(3)
    return run


def test_a_declared_change_is_told_recorded_and_in_the_manifests(run):
    segment = run.start(NEW, "larger batch")
    assert segment.mark() == {
        "number": 1, "start_step": 6, "start_offset": 144, "reason": "larger batch",
    }  # fmt: skip
    [event] = run.journal("segment")
    assert event["step"] == 6
    assert event["sample_offset"] == 144
    assert event["reason"] == "larger batch"
    assert event["changed"] == {"--global-batch": {"old": 24, "new": 48}}
    assert [s["number"] for s in run.record] == [0, 1]
    assert json.loads((run.dir / IDENTITY_NAME).read_text())["fixed"] == {"--seed": 0}
    name = run.advance(1)
    manifest = read_manifest(run.dir / "checkpoints" / name)
    assert manifest.segment == segment.mark()
    assert manifest.sample_offset == 144 + 48
    assert run.core.status()["segment"] == 1


def test_the_new_values_go_on_without_the_option_and_the_old_ones_are_refused(run):
    run.start(NEW, "larger batch")
    assert run.start(NEW).number == 1  # nothing was committed in it yet
    run.advance(2)
    assert run.start(NEW).own_step(run.step) == 2
    assert run.start(NEW, "larger batch").number == 1  # the same command again
    assert len(run.journal("segment")) == 1
    with pytest.raises(ConfigError, match="--change-at-resume"):
        run.start(OLD)
    assert run.start(OLD, "back again").mark()["start_offset"] == 144 + 2 * 48
    assert [s["number"] for s in run.record] == [0, 1, 2]


def test_a_segment_without_a_step_leaves_no_trace_but_its_number(run):
    run.start(NEW, "larger batch")
    segment = run.start(OLD, "it was a mistake")
    assert (segment.number, segment.start_step) == (2, 6)
    assert [s["number"] for s in run.record] == [0, 2]


def test_falling_back_over_the_boundary_starts_the_segment_there(run):
    run.start(NEW, "larger batch")
    run.advance(3)
    segment = run.resume(bad=2)
    assert segment.mark() == {
        "number": 1, "start_step": 3, "start_offset": 72, "reason": "larger batch",
    }  # fmt: skip
    events = run.journal("segment")
    assert [e["step"] for e in events] == [6, 3]
    assert [e["reason"] for e in events] == ["larger batch"] * 2
    assert "from before the segment" in events[1]["cause"]
    assert events[1]["changed"] == {"--global-batch": {"old": 24, "new": 48}}
    assert [s["start_step"] for s in run.record] == [0, 3]
    run.advance(1)
    assert run.resume() == segment
    assert len(run.journal("segment")) == 2


def test_falling_back_to_where_the_segment_began_changes_nothing(run):
    segment = run.start(NEW, "larger batch")
    run.advance(3)
    assert run.resume(bad=1) == segment
    assert len(run.journal("segment")) == 1


def test_a_run_without_checkpoints_begins_with_the_changed_values(tmp_path):
    run = Changing(tmp_path / "demo")
    run.resume()
    run.train(2)
    segment = run.start(NEW, "a typo")
    assert (segment.number, segment.start_step) == (0, 0)
    assert segment.options == {"--global-batch": 48}
    [event] = run.journal("segment")
    assert event["changed"] == {"--global-batch": {"old": 24, "new": 48}}
    assert len(run.record) == 1
    with pytest.raises(ConfigError, match="--global-batch was 48, now 24"):
        run.start(OLD)


def test_the_same_call_again_records_nothing_more(run):
    segment = run.start(NEW, "larger batch")
    before = (run.dir / IDENTITY_NAME).read_bytes()
    assert run.core.segment_at(run.generation, **run.where) == segment
    run.open()  # the tracker died; its answer was lost
    assert run.core.segment_at(run.generation, **run.where) == segment
    assert (run.dir / IDENTITY_NAME).read_bytes() == before
    assert len(run.journal("segment")) == 1


@pytest.mark.parametrize("dies", ["journal", "record"])
def test_a_start_that_cannot_be_put_on_record_is_not_made(run, monkeypatch, dies):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise StorageError("no space left on device")

    before = (run.dir / IDENTITY_NAME).read_bytes()
    with monkeypatch.context() as patch:
        if dies == "record":
            patch.setattr(segments_module, "write_record", refuse)
        else:
            append = JsonLines.append

            def full(self: JsonLines, event: dict[str, Any]) -> None:
                if event["event"] == "segment":
                    refuse()
                append(self, event)

            patch.setattr(JsonLines, "append", full)
        with pytest.raises(StorageError):
            run.start(NEW, "larger batch")
    assert (run.dir / IDENTITY_NAME).read_bytes() == before
    segment = run.resume()
    assert (segment.number, segment.start_step) == (1, 6)
    assert [s["number"] for s in run.record] == [0, 1]
    assert run.fold().segment == 1


def test_a_stale_attempt_starts_no_segment(run):
    run.identity, run.reason = NEW, "larger batch"
    stale = run.generation
    run.open().begin_attempt(2, ["a"])
    with pytest.raises(StaleGenerationError):
        run.core.segment_at(stale, 6, 144, FIRST.mark(), "step-00000006-g1")
    assert run.journal("segment") == []


def test_a_change_that_slipped_past_the_driver_is_refused_by_the_tracker(run):
    """Two drivers looked at the record at once; the one that waited for the lock has the old values."""
    run.start(NEW, "larger batch")
    run.identity, run.reason = OLD, ""
    run.open()
    with pytest.raises(ConfigError, match="--global-batch was 48, now 24"):
        run.resume()
    assert len(run.journal("segment")) == 1


def test_a_record_that_is_not_of_the_checkpoint_is_refused(run):
    """Somebody removed run.json and insists on another batch: positions would not fit the samples."""
    (run.dir / IDENTITY_NAME).unlink()
    with pytest.raises(ConfigError, match="made with other options"):
        run.start(NEW)
    with pytest.raises(RestoreError, match=r"sample 144.*--global-batch 48"):
        run.start(NEW, "insists")
    (run.dir / IDENTITY_NAME).unlink()
    assert run.start(OLD, "these").number == 0


def test_the_first_commit_of_a_segment_is_pinned_and_no_other(run):
    def pinned() -> dict[str, list[str]]:
        folders = sorted((run.dir / "checkpoints").glob("step-*"))
        return {f.name: [p.reason for p in read_pins(f)] for f in folders if read_pins(f)}

    why = "first checkpoint of segment 1 (larger batch)"
    run.advance(1)  # still in segment 0
    run.start(NEW, "larger batch")
    first, _ = run.advance(1), run.advance(1)
    run.open()
    run.advance(1)
    assert pinned() == {first: [why]}
    run.resume(bad=4)
    again = run.advance(1)
    assert pinned() == {first: [why], again: [why]}
