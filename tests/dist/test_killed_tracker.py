"""A tracker that is killed, or whose disk fails, at each of its points and each time that it comes by.

Forked children without torch.distributed: a life of a tracker is milliseconds here, so that every point is struck,
not a sample of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from disk import add_checkpoint

from ray_ckpt import fault_points
from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.manifest import FileEntry, read_manifest
from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.checkpoint.verify import hash_file, verify_files
from ray_ckpt.errors import RayCkptError
from ray_ckpt.fault_points import arm
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tiers import pins
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tracker.core import RunFacts, TrackerCore, TrackerOptions
from ray_ckpt.tracker.identity import check_identity
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME, read_lines

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill takes nothing from the page cache: only a power cut would, which no test can make."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


OLD, NEW = {"--global-batch": 8, "--seed": 0}, {"--global-batch": 16, "--seed": 0}
ENDED, REFUSED, BROKEN = 0, 3, 4

POINTS = [
    "attempt.begin", "attempt.begun", "segment.start", "segment.recorded", "commit.check", "commit.temporary",
    "commit.rename", "commit.renamed", "commit.placed", "commit.told", "record.temporary", "record.rename",
    "record.renamed", "journal.line", "journal.sync", "steps.line", "pins.write", "pins.written",
    "quarantine.write", "quarantine.written", "collect.end", "collect.ended", "collect.file", "collect.emptied",
    "collect.unmarked", "collect.removed",
]  # fmt: skip
# Where a disk is touched, so that an error can come from there.
TOUCHES = [
    "commit.temporary", "commit.rename", "commit.renamed", "record.temporary", "record.rename", "record.renamed",
    "journal.line", "journal.sync", "steps.line", "collect.end", "collect.ended", "collect.file",
]  # fmt: skip


class Promises:
    """What a life was told is done, on a pipe that outlives it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def give(self, **what: Any) -> None:
        os.write(self.writer, json.dumps(what).encode() + b"\n")

    def taken(self) -> list[dict[str, Any]]:
        text = b""
        try:
            while data := os.read(self.reader, 1 << 16):
                text += data
        except BlockingIOError:
            pass
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


def prepared(run: Path) -> Path:
    """A run of the first segment with three checkpoints, the newest of which is damaged."""
    check_identity(run, OLD)
    for step in (10, 20, 30):
        folder = add_checkpoint(run, step, 1)
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[::-1])
    (run / JOURNAL_NAME).write_text(
        json.dumps({"time": 1.0, "generation": 1, "event": "attempt_started", "world_size": 2})
        + "\n"
    )
    return run


def tracker(run: Path) -> TrackerCore:
    check_identity(run, NEW, "a larger batch")
    facts = RunFacts(
        run=run.name,
        run_dir=str(run),
        config_fingerprint="c0ffee",
        data_fingerprint="da7a",
        parallel="ddp",
        versions={},
        identity=NEW,
        change_reason="a larger batch",
    )
    options = TrackerOptions(
        limits=IntervalLimits(), prior_mtbf_s=3600.0, retention=Rules(keep_newest=2, keep_every_s=0)
    )
    return TrackerCore(facts, options)


def life(run: Path, saves: int, promises: Promises, faults: str, counted: str = "") -> None:
    """One life of a run: takes it up as a worker group does, saves, pins, and finishes."""
    arm(faults)
    core = tracker(run)
    attempt = core.begin_attempt(2, ["a"])
    generation, plan = attempt.generation, attempt.plan
    promises.give(generation=generation)
    while plan is not None:
        folder = run / "checkpoints" / plan.name
        if not (bad := verify_files(folder, read_manifest(folder))):
            break
        plan = core.reject(generation, plan.name, bad)
    step, samples = (plan.manifest.step, plan.manifest.sample_offset) if plan else (0, 0)
    promises.give(restored=step)
    mark = dict(plan.manifest.segment) if plan else None
    core.segment_at(generation, step, samples, mark, plan.name if plan else "")
    core.restored(generation, step, 0.1, plan.name if plan else "", "r")
    for _ in range(saves):
        step, samples = step + 1, samples + 16
        core.steps(generation, [{"step": step, "loss": 1.0, "step_time_s": 0.5}])
        if core.commit(generation, written(run, step, samples, generation)):
            promises.give(commit=step)
            if step % 3 == 0:
                name = checkpoint_name(step, generation)
                core.pin(name, "a paper", "ada")
                promises.give(pin=name)
    core.finished(generation, step)
    if counted and fault_points._armed:
        promises.give(count=fault_points._armed._counts[counted])


def written(run: Path, step: int, samples: int, generation: int) -> dict[str, Any]:
    folder = add_checkpoint(run, step, generation, commit=False)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        "step": step,
        "samples": samples,
        "tokens": samples,
        "world_size": 2,
        "files": [
            asdict(FileEntry(p.relative_to(folder).as_posix(), *hash_file(p))) for p in files
        ],
        "stall_s": 0.1,
        "upload_s": 0.2,
        "metrics": {"loss": 1.0},
        "guard": {},
        "error": None,
        "bitwise_comparable": True,
    }


def in_child(action: Callable[[], None]) -> int:
    """Exit code of a child that does something; minus the signal that ended it."""
    child = os.fork()
    if not child:
        code = BROKEN
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is logged of faults that are meant
            action()
            code = ENDED
        except RayCkptError as error:
            code = REFUSED if str(error).strip() else BROKEN
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("a life of a tracker did not end")
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])


class Story:
    """A run through several lives, and what was promised in them."""

    def __init__(self, run: Path) -> None:
        self.run, self.promises = prepared(run), Promises()
        self.generations, self.newest, self.pinned, self.count = [1], 20, set[str](), 0

    def live(self, faults: str, counted: str = "") -> int:
        code = in_child(lambda: life(self.run, 5, self.promises, faults, counted))
        self.check(faults)
        return code

    def check(self, faults: str) -> None:
        """What must hold whenever a life ends, however it does."""
        for promise in self.promises.taken():
            if "generation" in promise:
                assert promise["generation"] > self.generations[-1], "given out twice"
                self.generations.append(promise["generation"])
            if "restored" in promise:
                assert promise["restored"] >= self.newest, f"{faults}: went back before a commit"
            if "commit" in promise:
                assert promise["commit"] > self.newest, f"{faults}: a step was committed again"
                self.newest = promise["commit"]
            if "count" in promise:
                self.count = promise["count"]
            if "pin" in promise:
                self.pinned.add(promise["pin"])
        entries = [e for e in list_checkpoints(self.run) if e.folder.name != "step-00000030-g1"]
        for entry in entries:
            if entry.committed and entry.quarantined is None:
                assert entry.manifest is not None, f"{faults}: {entry.folder.name}: {entry.fault}"
                assert verify_files(entry.folder, entry.manifest) == [], faults
        good = {entry.folder.name for entry in usable(entries)}
        steps = [entry.step for entry in usable(entries)]
        assert max(steps) >= self.newest, f"{faults}: step {self.newest} was committed and is lost"
        self.newest = max(steps)  # a commit that nobody was told of counts as well
        assert self.pinned <= good, f"{faults}: a pinned one is gone"

    def end(self, disk_lost_lines: bool = False) -> None:
        """What is there when a life came to its end without a fault.

        Args:
            disk_lost_lines: whether the disk took no more lines of steps until the process was gone.
        """
        assert self.live("") == ENDED
        events = list(read_lines(self.run / JOURNAL_NAME))
        assert events[-1]["event"] in ("finished", "delete", "pin", "verified")
        generations = [e["generation"] for e in events]
        assert generations == sorted(generations)
        started = [e["generation"] for e in events if e["event"] == "attempt_started"]
        assert len(set(started)) == len(started)
        assert any(e["event"] == "finished" for e in events)
        # The damaged one was condemned once, is never offered again, and stays as evidence.
        bad = next(e for e in list_checkpoints(self.run) if e.folder.name == "step-00000030-g1")
        assert bad.quarantined
        # One segment was begun, and every line of a step is of the attempt that made it.
        segments = [e for e in events if e["event"] == "segment"]
        assert {e["number"] for e in segments} == {1}
        steps = [line["step"] for line in read_lines(self.run / STEPS_NAME)]
        if not disk_lost_lines:
            assert set(range(21, self.newest + 1)) <= set(steps)
        # What no rule keeps is gone at last, whoever began to delete it.
        good = usable(list_checkpoints(self.run))
        assert len([e for e in good if not pins.read_pins(e.folder)]) <= 2
        self.promises.close()


# By default some of the times that a life comes by a point, and all of them where there is time for it.
STRIDES = [4, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_and_any_time_loses_nothing(
    tmp_path: Path, point: str, stride: int
) -> None:
    for nth in count(1, stride):
        story = Story(tmp_path / f"run-{nth}")
        code = story.live(f"{point}@{nth}=kill")
        if code != ENDED:
            assert code == -signal.SIGKILL, f"{point}@{nth}: exit code {code}"
        story.end()
        if code == ENDED:
            break
    print(f"{point}: {(nth - 1) // stride} kills")
    assert nth > 1, "no life comes by this point"


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("ever", ["", "+"])
@pytest.mark.parametrize("point", TOUCHES)
def test_a_disk_that_fails_at_any_touch_loses_nothing(
    tmp_path: Path, point: str, ever: str, stride: int
) -> None:
    """Once, or from then on: the run goes on, or stops in words; and goes on when the disk is mended."""
    codes = Counter[int]()
    for nth in range(1, 1 + touches(tmp_path / "count", point), stride):
        story = Story(tmp_path / f"run-{nth}")
        code = story.live(f"{point}@{nth}{ever}={('eio', 'enospc')[nth // stride % 2]}")
        codes[code] += 1
        assert code in (ENDED, REFUSED), f"{point}@{nth}: exit code {code}"
        story.end(disk_lost_lines=(point, ever) == ("steps.line", "+"))
    print(f"{point}: {codes}")
    assert codes, "no life comes by this point"


def touches(run: Path, point: str) -> int:
    """How often a life comes by a point."""
    story = Story(run)
    assert story.live(f"{point}@1=sleep:0", counted=point) == ENDED
    return story.count


def test_a_run_killed_in_one_life_after_the_other_loses_nothing(tmp_path: Path) -> None:
    chance, at = random.Random(5), Counter[str]()
    for number in range(25):
        story = Story(tmp_path / f"run-{number}")
        for _ in range(chance.randint(2, 6)):
            point = chance.choice(POINTS)
            fault = f"{point}@{chance.randint(1, 6)}=kill"
            if story.live(fault) == ENDED:
                break
            at[point] += 1
        else:
            story.end()
    print(at.total(), sorted(at.items()))
    assert at.total() > 25
