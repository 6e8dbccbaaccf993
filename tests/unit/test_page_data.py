"""What the page tells of a run is what its records say, however they were read, and is told at once."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tracker_core import Run

from ray_ckpt import cli
from ray_ckpt.checkpoint.names import MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import StorageError
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME, read_lines
from ray_ckpt.tracker.lock import RunLock
from ray_ckpt.tracker.recall import recall
from ray_ckpt.view import run_story, shelf_look
from ray_ckpt.view.chronicle import Chronicle
from ray_ckpt.view.curve import MOST_POINTS
from ray_ckpt.view.health import Signs, judge
from ray_ckpt.view.run_view import RunView
from ray_ckpt.view.summary import surviving_steps
from ray_ckpt.view.tail import Tail
from ray_ckpt.view.track import Track


def view_of(run: Run, **options: Any) -> RunView:
    view = RunView(run.dir, clock=lambda: run.clock.now, **options)
    view.update()
    return view


def line(step: int, generation: int = 1, **more: Any) -> dict[str, Any]:
    return {"step": step, "generation": generation, "loss": 2.0, "step_time_s": 0.5, **more}


def rows(view: RunView, **query: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in view.detail(**query)["checkpoints"]["rows"]}


# ---- following a file -------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=3).map(json.dumps),
            st.sampled_from(["", "[1]", '{"torn": ', "\x00", '{"é": "ü"}']),
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 120), max_size=6),
    st.booleans(),
)
def test_a_file_that_grows_is_read_as_one_that_was_read_at_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int], ended: bool
) -> None:
    path = tmp_path_factory.mktemp("tail") / "f"
    data = ("\n".join(lines) + ("\n" if ended else "")).encode()
    tail, found = Tail(path), []
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        path.write_bytes(b"") if not path.exists() else None
        with path.open("ab") as file:
            file.write(data[path.stat().st_size : cut])
        assert not tail.look()
        while tail.behind_bytes:
            found += tail.read()
    assert found == list(read_lines(path))
    assert tail.behind_bytes == 0
    assert tail.read() == []


def test_a_line_longer_than_a_chunk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_ckpt.view.tail.CHUNK_BYTES", 16)
    (tmp_path / "f").write_text(json.dumps({"cause": "x" * 1000}) + '\n{"a": 1}\n')
    tail = Tail(tmp_path / "f")
    tail.look()
    assert [len(str(event)) > 900 for event in (*tail.read(), *tail.read())] == [True, False]


def test_what_is_no_journal_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe has no end, and neither may a line have none."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="no plain file"):
        Tail(tmp_path / "pipe").look()
    monkeypatch.setattr("ray_ckpt.view.tail.CHUNK_BYTES", 16)
    monkeypatch.setattr("ray_ckpt.view.tail.LONGEST_BYTES", 64)
    (tmp_path / "f").write_text("x" * 1000 + '\n{"a": 1}\n')
    tail, found = Tail(tmp_path / "f"), []
    tail.look()
    while tail.behind_bytes:
        found += tail.read()
    assert found == [{"a": 1}]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.begin()
    view = view_of(run)
    assert view.chronicle.events == len(run.journal())
    other = tmp_path / "other"
    other.write_text('{"time": 1.0, "generation": 7, "event": "finished", "step": 3}\n')
    other.replace(run.dir / JOURNAL_NAME)
    view.update()
    assert (view.chronicle.events, view.chronicle.memory.generation) == (1, 7)


# ---- steps ------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 300)), min_size=1, max_size=4))
def test_steps_that_were_done_again_count_once(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, int]]
) -> None:
    """Each attempt makes some steps, and the next one begins some steps further back."""
    track, lines, step = Track(), [], 0
    for generation, (made, back) in enumerate(lives, 1):
        for _ in range(made):
            step += 1
            lines.append(line(step, generation, loss=100 / step + generation, step_time_s=0.25))
        step = max(0, step - back)
    path = tmp_path_factory.mktemp("steps")
    (path / STEPS_NAME).write_text("".join(json.dumps(item) + "\n" for item in lines))
    for item in lines:
        track.add(item)
    standing = [
        item for item in surviving_steps(path).values() if item["step"] <= lines[-1]["step"]
    ]
    assert track.useful_s == pytest.approx(0.25 * len(standing))
    assert track.executed_s == pytest.approx(0.25 * len(lines))
    assert track.best_step == max(item["step"] for item in lines)
    points = track.curve.points()
    assert 0 < len(points) <= MOST_POINTS
    assert [p[0] for p in points] == sorted({p[0] for p in points})
    assert points[-1][0] == lines[-1]["step"]
    losses = [item["loss"] for item in standing]
    assert min(p[2] for p in points) == pytest.approx(min(losses), rel=1e-5)
    assert max(p[3] for p in points) == pytest.approx(max(losses), rel=1e-5)
    assert all(p[2] <= p[1] * (1 + 1e-5) and p[1] <= p[3] * (1 + 1e-5) for p in points)


def test_a_loss_that_is_not_finite_is_counted_and_not_averaged() -> None:
    track = Track()
    for step, loss in enumerate([2.0, math.nan, math.inf, 4.0], 1):
        track.add(line(step, loss=loss))
    assert [p[1] for p in track.curve.points()] == [2.0, None, None, 4.0]
    assert [p[4] for p in track.curve.points()] == [0, 1, 1, 0]


def test_lines_that_say_less_than_they_should_are_passed_over() -> None:
    track = Track()
    for item in ({}, {"step": 1}, line(1, step_time_s=None), line(2), {**line(3), "loss": "high"}):
        track.add(item)
    assert (track.lines, track.best_step) == (1, 2)


# ---- the journal ------------------------------------------------------------------------------------


def story(run: Run) -> None:
    """A run with what can happen to one."""
    run.begin(workers=3)
    run.train(10)
    run.save()
    run.train(10)
    kept = run.save()
    run.core.pin(kept, "in the paper", "ann")
    run.train(5)
    run.core.interruption("node_loss", "node gpu-17 died, with rank 1", group="g1")
    run.begin(workers=2)
    run.train(10)
    failed = run.written(run.step, error="no space left on device")
    assert not run.core.commit(run.generation, failed)
    run.train(5)
    run.save()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    story(made)
    return made


def test_the_page_remembers_what_the_tracker_does(run: Run) -> None:
    view = view_of(run)
    assert view.chronicle.memory == recall(run.dir)
    assert [a.generation for a in view.chronicle.attempts] == [1, 2]
    assert [(a.world_size, a.end) for a in view.chronicle.attempts] == [(3, "node_loss"), (2, "")]
    assert view.chronicle.attempts[1].source == checkpoint_name(20, 1)
    present = view.detail()["run"]["present"]
    assert (present["step"], present["world_size"], present["generation"]) == (35, 2, 2)


def test_reading_in_between_changes_nothing(run: Run) -> None:
    """The fold over a journal that was read line by line is the one over the whole."""
    whole = view_of(run)
    bit = Chronicle()
    for event in read_lines(run.dir / JOURNAL_NAME):
        bit.apply(event)
    assert bit == whole.chronicle


def test_the_table_says_what_ls_says(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", str(run.dir), "--json"]) == 0
    listed = {
        checkpoint_name(c["step"], c["generation"]): c for c in json.loads(capsys.readouterr().out)
    }
    table = rows(view_of(run))
    # The save that failed left a folder without a manifest, which both show.
    assert table.keys() == listed.keys()
    for name, item in listed.items():
        row = table[name]
        for field in ("step", "generation", "bytes", "world_size", "sample_offset", "kept"):
            assert row[field] == item[field], (name, field)
        assert list(row["tiers"]) == item["tiers"]
        assert bool(row["pins"]) == item["pinned"]
    assert table[checkpoint_name(20, 1)]["pins"] == ["in the paper (ann)"]
    assert table[checkpoint_name(10, 1)]["guard"] == "passed"


def test_the_cost_of_an_interruption_is_from_the_last_step_to_the_first_new_one(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    run.begin()
    run.train(10)
    run.save()
    run.train(5)
    run.core.interruption("worker_error", "rank 0 died", group="g1")
    times = [*range(1000, 1015)]
    lines = [line(step, 1, time=float(times[step - 1]), step_time_s=1.0) for step in range(1, 16)]
    lines += [line(step, 2, time=1100.0 + step, step_time_s=2.0) for step in range(11, 17)]
    run.begin()
    (run.dir / STEPS_NAME).write_text("".join(json.dumps(item) + "\n" for item in lines[:15]))
    last = view_of(run).summary()["last_interruption"]
    assert (last["over"], last["cost_s"], last["lost_steps"]) == (False, None, 5)
    assert last["since"] == 1014.0
    (run.dir / STEPS_NAME).write_text("".join(json.dumps(item) + "\n" for item in lines))
    last = view_of(run).summary()["last_interruption"]
    # Step 16 is the first that nobody had made; of the 102 s until its end 10 s were steps 11 to 15 again.
    assert (last["over"], last["cost_s"], last["redone_s"]) == (True, 1116.0 - 1014.0, 10.0)


def test_the_parts_of_goodput_add_up_to_the_wall_time(run: Run) -> None:
    goodput = view_of(run).summary()["goodput"]
    assert sum(goodput["buckets"].values()) == pytest.approx(goodput["wall_s"])
    assert all(seconds >= 0 for seconds in goodput["buckets"].values())


def test_steps_that_were_lost_and_not_made_again_are_not_useful(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.begin()
    run.train(10)
    run.save()
    run.train(30)
    run.core.interruption("worker_error", "rank 0 died", group="g1")
    run.clock.now += 1000
    run.core.request_save("later")
    view = view_of(run)  # a clock that stands still is no clock for the ledger
    buckets = run_story.goodput(view.chronicle, view.track)["buckets"]
    assert buckets["useful steps"] == pytest.approx(5.0)
    assert buckets["steps that were lost"] == pytest.approx(15.0)


def test_what_is_deleted_leaves_the_table_and_what_is_set_aside_stays(run: Run) -> None:
    first, second = checkpoint_name(10, 1), checkpoint_name(20, 1)
    run.core.reject(2, second, [Fault("__0_0.distcp", "checksum differs")])
    run.core._record("delete", name=first, step=10, reason="no rule keeps it")
    # The journal tells that its deletion is done, whatever an older listing of the folder says.
    table = rows(view_of(run))
    assert table[second]["state"] == "quarantined"
    assert "checksum differs" in table[second]["fault"]
    assert first not in table
    assert list(rows(view_of(run), show="trouble")) == [second]


def test_a_checkpoint_that_is_gone_without_a_word_is_told_after_a_second_look(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_look, "LIST_EVERY_S", 0.0)
    view = view_of(run)
    name = checkpoint_name(20, 1)
    folder = run.dir / "checkpoints" / name
    folder.rename(run.dir / "elsewhere")
    view.update(1.0)
    assert rows(view)[name]["state"] == "committed"  # its deletion may be about to be told
    view.update(1.0)
    assert rows(view)[name]["state"] == "missing"
    assert "gone without a word" in " ".join(view.summary()["reasons"])
    (run.dir / "elsewhere").rename(folder)
    view.update(1.0)
    assert rows(view)[name]["state"] == "committed"


def test_what_the_rules_do_not_keep_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker that is killed between a deletion and its line leaves a journal that still names the checkpoint."""
    monkeypatch.setattr(shelf_look, "LIST_EVERY_S", 0.0)
    run = Run(tmp_path / "run")
    run.begin()
    names = []
    for _ in range(4):
        run.train(10)
        names.append(run.save())
    rules = {**run.core._options.retention.to_json(), "keep_newest": 2}
    run.core._record("retention", rules=rules)
    run.core._record("verified", name=names[-1], step=40, verified=names[-1], seconds=0.1)
    for name in (names[0], names[2]):
        shutil.rmtree(run.dir / "checkpoints" / name)
    view = view_of(run)
    view.update(1.0)
    table = rows(view)
    assert names[0] not in table
    assert table[names[2]]["state"] == "missing"


def test_a_damaged_manifest_is_no_durable_copy(run: Run) -> None:
    assert view_of(run).summary()["newest_durable"]["step"] == 35
    (run.folder(35) / MANIFEST_NAME).write_text("{")
    view = view_of(run)
    assert rows(view)[checkpoint_name(35, 2)]["state"] == "damaged"
    assert view.summary()["newest_durable"]["step"] == 20
    assert view.summary()["health"] == "attention"


def test_a_run_without_a_journal_shows_what_lies_there(run: Run) -> None:
    (run.dir / JOURNAL_NAME).unlink()
    (run.dir / STEPS_NAME).unlink()
    view = view_of(run)
    states = {row["step"]: row["state"] for row in rows(view).values()}
    assert (states[10], states[20], states[35]) == ("committed", "committed", "committed")
    assert view.summary()["newest_durable"]["step"] == 35


# ---- health -----------------------------------------------------------------------------------------

FINE: dict[str, Any] = {
    "state": "training", "step": 100, "step_s": 0.5, "silent_s": 1.0, "running_s": 7200.0,
    "durable_age_s": 30.0, "durable_every_s": 60.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "on time"),
        ({"state": "finished"}, "ok", "finished at step 100"),
        ({"state": "stopped", "planned_end": True}, "ok", "on purpose"),
        ({"state": "stopped"}, "failing", "ended early"),
        ({"state": "lost"}, "failing", "nobody drives"),
        ({"state": "restarting"}, "attention", "restarting"),
        ({"state": "restarting", "silent_s": 2000.0}, "failing", "half an hour"),
        ({"state": "new"}, "attention", "half an hour"),
        ({"state": "new", "running_s": 60.0}, "ok", "starting"),
        ({"silent_s": 400.0}, "failing", "no step for"),
        ({"durable_age_s": 310.0}, "attention", "three intervals"),
        ({"durable_age_s": 730.0}, "failing", "ten intervals"),
        ({"durable_age_s": None}, "failing", "no durable copy"),
        ({"durable_age_s": None, "running_s": 60.0}, "ok", "on time"),
        ({"failed_in_a_row": 1, "save_error": "disk full"}, "attention", "save failed: disk full"),
        ({"failed_in_a_row": 3, "save_error": "disk full"}, "failing", "3 saves failed"),
        ({"trouble": "loss nan", "trouble_stops": True}, "failing", "loss nan"),
        ({"trouble": "loss nan"}, "attention", "loss nan"),
        ({"refusals": 2}, "attention", "refused 2 saves"),
        ({"fruitless": 2}, "failing", "2 attempts in a row"),
        ({"loop": "the same failure came 3 times"}, "failing", "came 3 times"),
        ({"slow_nodes": ("node-b", "c" * 40)}, "attention", "node node-b, cccccccccccc"),
        ({"excluded_nodes": ("node-b",)}, "attention", "left out after hangs: node node-b"),
        ({"failed_drill": "norm differs"}, "failing", "norm differs"),
        ({"missing": 1}, "failing", "1 checkpoint is gone"),
        ({"damaged": 2}, "attention", "2 checkpoints are committed"),
        ({"problems": ("cannot be listed",)}, "attention", "cannot be listed"),
        ({"refusals": 1, "missing": 1}, "failing", "gone"),
    ],
)
def test_the_verdict_on_a_run_names_the_worst_first(
    changes: dict[str, Any], level: str, words: str
) -> None:
    health = judge(Signs(**{**FINE, **changes}))
    assert health.level == level
    assert words in health.reasons[0]


@pytest.mark.parametrize(
    ("what", "state"),
    [
        (lambda run: run.core.finished(2, 35), "finished"),
        (lambda run: run.core.interruption("user_stop", "SIGTERM", group="g2"), "stopped"),
        (lambda run: run.core.interruption("worker_error", "boom", group="g2"), "restarting"),
        (lambda run: None, "training"),
    ],
)
def test_the_state_of_a_run_in_a_word(run: Run, what: Callable[[Run], Any], state: str) -> None:
    what(run)
    assert view_of(run).state() == state


def test_a_run_that_nobody_drives_is_lost_or_stopped(run: Run) -> None:
    """There is no lock on it in this test, and its last line is old."""
    run.clock.now += 3600
    assert view_of(run).state() == "lost"
    run.core.interruption("worker_error", "boom", group="g2")
    run.clock.now += 3600
    view = view_of(run)
    assert (view.state(), view.summary()["health"]) == ("stopped", "failing")


def test_a_run_whose_driver_was_here_is_lost_sooner(run: Run) -> None:
    """Of this machine the lock tells; of another one perhaps the file system does not."""
    run.clock.now += 30
    assert view_of(run).state() == "training"
    RunLock(run.dir).close()
    assert view_of(run).state() == "lost"
    lock = RunLock(run.dir)
    assert view_of(run).state() == "training"
    lock.close()


def test_an_attempt_without_a_step_is_a_start(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.begin()
    assert view_of(run).state() == "new"
    run.train(1)
    assert view_of(run).state() == "training"
    run.core.interruption("worker_error", "boom", group="g")
    run.begin()
    assert view_of(run).state() == "restarting"


# ---- at once ----------------------------------------------------------------------------------------


def big_journal(folder: Path, commits: int, attempts: int) -> None:
    events, step, now = [], 0, 1_700_000_000.0
    for generation in range(1, attempts + 1):

        def tell(event: str, generation: int = generation, **more: Any) -> None:
            nonlocal now
            now += 1
            events.append({"time": now, "generation": generation, "event": event, **more})

        tell("attempt_started", world_size=4, nodes=["a", "b"])
        tell("restored", step=step, source="", seconds=1.0, reason="newest committed checkpoint")
        for _ in range(commits // attempts):
            step += 20
            tell(
                "commit", name=checkpoint_name(step, generation), step=step, tier="durable", bytes=1 << 30, files=8,
                world_size=4, sample_offset=16 * step, stall_s=0.04, upload_s=1.0, exposure_s=float(step),
            )  # fmt: skip
        tell(
            "interruption",
            kind="node_loss",
            cause="node died",
            step=step,
            lost_steps=3,
            exposure_s=float(step),
        )
    folder.mkdir()
    (folder / JOURNAL_NAME).write_text("".join(json.dumps(event) + "\n" for event in events))


def test_ten_thousand_checkpoints_are_told_at_once_and_a_new_one_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big_journal(tmp_path / "big", 10_000, 1000)
    view = RunView(tmp_path / "big", remote="s3://bucket/runs")  # nothing lies in the folder
    used_s = []
    while view.behind_bytes or not used_s:
        began_s = time.thread_time()
        view.update(0.06)
        json.dumps(view.detail())
        used_s.append(time.thread_time() - began_s)
    document = view.detail()
    assert document["checkpoints"]["total"] == 10_000
    assert len(document["checkpoints"]["rows"]) == 50
    assert len(document["attempts"]) == 1000
    # A fifth of that on an idle machine; what is sure is below: nothing is folded twice.
    assert sorted(used_s)[-1] < 1.0, "one answer took too long"
    taken: list[dict[str, Any]] = []
    apply = Chronicle.apply
    monkeypatch.setattr(Chronicle, "apply", lambda self, e: (taken.append(e), apply(self, e)))
    with (tmp_path / "big" / JOURNAL_NAME).open("a") as file:
        file.write('{"time": 1.8e9, "generation": 1000, "event": "finished", "step": 200000}\n')
    began_s, before = time.thread_time(), view.version
    view.update(0.06)
    assert view.detail()["run"]["state"] == "finished"
    assert time.thread_time() - began_s < 1.0
    assert [event["event"] for event in taken] == ["finished"]
    assert view.version > before


def test_where_a_run_stands_is_told_before_all_its_steps_are_read(run: Run) -> None:
    """The journal is short; lines of steps may be gigabytes, and nobody waits for them at night."""
    with (run.dir / STEPS_NAME).open("a") as file:
        for step in range(36, 20_000):
            file.write(json.dumps(line(step, 2, loss=3.0, time=run.clock.now)) + "\n")
    view = RunView(run.dir, clock=lambda: run.clock.now)
    view.update(0.0)  # not even the journal
    assert (view.state(), view.summary()["health"]) == ("reading", "unknown")
    while view.state() == "reading":
        view.update(0.002)
    summary = view.summary()
    assert summary["behind_bytes"] > 0
    assert (summary["state"], summary["present"]["step"], summary["health"]) == (
        "training",
        19_999,
        "ok",
    )
    assert summary["newest_durable"]["step"] == 35
    assert (summary["last_interruption"]["over"], summary["goodput"]["goodput"]) == (True, None)
    view.update()
    assert view.summary()["behind_bytes"] == 0
    assert view.summary()["goodput"]["goodput"] is not None
    assert view.summary()["present"] == summary["present"]


def test_a_durable_copy_is_as_old_as_what_is_in_it(tmp_path: Path) -> None:
    """A checkpoint that was saved in memory an hour ago and got to the disk now is an hour old."""
    folder, now = tmp_path / "run", 1_700_000_000.0
    folder.mkdir()
    name = checkpoint_name(10, 1)
    common = {"name": name, "step": 10, "bytes": 1, "generation": 1}
    events = [
        {"time": now, "generation": 1, "event": "attempt_started", "world_size": 1, "nodes": []},
        {
            "time": now + 1,
            "event": "commit",
            "tier": "memory",
            "files": 1,
            "stall_s": 0,
            "upload_s": 0,
            **common,
        },
        {
            "time": now + 3600,
            "event": "promote",
            "tier": "durable",
            "seconds": 1.0,
            "tries": 1,
            **common,
        },
    ]
    (folder / JOURNAL_NAME).write_text("".join(json.dumps(event) + "\n" for event in events))
    view = RunView(folder, remote="s3://bucket/runs")
    view.update()
    durable = view.summary()["newest_durable"]
    assert (durable["at"], durable["durable_at"]) == (now + 1, now + 3600)
