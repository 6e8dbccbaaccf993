"""A step that does not end is a hang after its allowance, never before; the suspect is who is not where others wait."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.elastic import callbacks, dumps
from ray_ckpt.elastic.causes import Cause
from ray_ckpt.elastic.dumps import KEPT, folder_of, write_dumps
from ray_ckpt.elastic.hangs import Hang, Watcher
from ray_ckpt.elastic.whereabouts import Here, Look, cut, stacks_of_threads
from ray_ckpt.errors import StorageError
from ray_ckpt.policy.hang import HangRule, Pulse
from ray_ckpt.policy.phases import PHASES, Whereabouts
from ray_ckpt.policy.suspects import LONG, WAITING, needs_long, suspects

RULE = HangRule(factor=10.0, min_s=30.0, long_s=600.0)


def at(step: int, phase: str, left: int = 0) -> Whereabouts:
    return Whereabouts(step, phase, left, 0.0, 0.0)


# ---- how long -------------------------------------------------------------------------------------


@given(st.none() | st.floats(0.001, 1e4), st.booleans())
def test_a_limit_is_never_less_than_the_least_nor_than_the_factor_says(
    usual_s: float | None, long: bool
) -> None:
    limit_s = RULE.limit_s(usual_s, long=long)
    assert limit_s >= RULE.min_s
    assert limit_s >= RULE.factor * (usual_s or 0.0)
    assert limit_s >= RULE.long_s or not (long or usual_s is None)


def test_a_pulse_is_as_old_as_the_last_change() -> None:
    pulse = Pulse(generation=1, step=5, stepped=True, since_s=10.0)
    assert pulse.seen(1, 5, True, 50.0) is pulse
    for changed in ((2, 5, True), (1, 6, True), (1, 5, False)):
        assert pulse.seen(*changed, 50.0).since_s == 50.0


# ---- who ------------------------------------------------------------------------------------------

places = st.builds(
    at,
    st.just(7),
    st.sampled_from(sorted(WAITING)),
    st.integers(0, 3),
)


@given(st.integers(2, 6), st.data())
def test_who_does_not_answer_is_named_and_nobody_else(ranks: int, data: st.DataObject) -> None:
    silent = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1))
    found = {rank: None if rank in silent else data.draw(places) for rank in range(ranks)}
    assert suspects(found).ranks == tuple(sorted(silent))
    assert suspects(dict.fromkeys(range(ranks))).ranks == (), "all silent: nobody can tell"


@given(st.integers(2, 6), st.data())
def test_one_that_is_behind_is_named(ranks: int, data: st.DataObject) -> None:
    one = data.draw(st.integers(0, ranks - 1))
    behind = data.draw(st.sampled_from(["a step", "data", "a pass", "own code"]))
    where = {
        "a step": at(6, data.draw(st.sampled_from(PHASES))),
        "data": at(7, "data"),
        "a pass": at(7, "backward", left=2),
        "own code": at(7, "between"),
    }[behind]
    found = {rank: where if rank == one else at(7, "agree") for rank in range(ranks)}
    if behind == "a pass":
        found = {r: w if r == one else at(7, "forward", left=0) for r, w in found.items()}
    assert suspects(found).ranks == (one,)
    assert f"rank {one}" in suspects(found).why


@given(st.integers(1, 6), places)
def test_where_all_are_the_same_nobody_is_named(ranks: int, place: Whereabouts) -> None:
    assert suspects(dict.fromkeys(range(ranks), place)).ranks == ()


@given(st.dictionaries(st.integers(0, 7), st.none() | places, min_size=1))
def test_suspects_are_ranks_that_there_are_and_never_all(
    found: dict[int, Whereabouts | None],
) -> None:
    named = suspects(found).ranks
    assert set(named) < set(found) or not named


def test_most_are_not_suspected_for_being_behind_the_one() -> None:
    found = {0: at(7, "agree"), 1: at(7, "forward"), 2: at(7, "forward")}
    assert suspects(found).ranks == ()


def test_others_that_are_not_waiting_leave_nobody_to_name() -> None:
    assert suspects({0: at(7, "between"), 1: at(7, "data")}).ranks == ()


@given(st.sampled_from(PHASES))
def test_what_may_take_long_gives_all_the_long_allowance(phase: str) -> None:
    assert needs_long({0: at(7, "agree"), 1: at(7, phase)}) == (phase in LONG)
    assert not needs_long({0: at(7, "agree"), 1: None})


# ---- the watcher ----------------------------------------------------------------------------------


class Stage:
    """A tracker, workers and a clock, as a test sets them."""

    def __init__(self, folder: Path, *wheres: Whereabouts | None) -> None:
        self.now, self.wheres, self.asked = 0.0, list(wheres), 0
        self.status: dict[str, Any] = {
            "generation": 3,
            "attempt_open": True,
            "step": 7,
            "last": {"generation": 3},
            "step_time_s": 1.0,
            "finished_step": None,
        }
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.ended: list[tuple[list[int], list[int]]] = []
        self.on_ask = lambda: None
        self.step_begun_s = 0.0
        self.deaf = False
        self.watcher = Watcher(
            rule=RULE,
            run_dir=folder,
            call=self.call,
            crew=self,
            clock=lambda: self.now,
            time_s=lambda: 1.7e9,
        )
        self.watcher.look()

    def call(self, method: str, **more: Any) -> Any:
        if self.deaf:
            raise StorageError("no answer")
        if method == "status":
            return dict(self.status)
        self.told.append((method, more))
        return 1  # the number of a request, where one is asked for

    @property
    def ranks(self) -> range:
        return range(len(self.wheres))

    def node_id(self, rank: int) -> str:
        return f"id-{rank}"

    def names(self) -> dict[int, str]:
        return {rank: f"node-{rank}" for rank in self.ranks}

    def pid(self, rank: int) -> int:
        return 1000 + rank

    def ask(self) -> dict[int, Look | None]:
        self.asked += 1
        self.on_ask()
        return {
            rank: where
            and Look(
                where=where,
                age_s=1.0,
                step_age_s=self.now - self.step_begun_s,
                stacks="in the middle",
            )
            for rank, where in enumerate(self.wheres)
        }

    def outside(
        self, ranks: Iterable[int], *, look: bool = False, end: bool = False
    ) -> dict[int, str]:
        return dict.fromkeys(ranks, "seen from outside")

    def end(self, ranks: Iterable[int], silent: Iterable[int] = ()) -> None:
        self.ended.append((list(ranks), list(silent)))

    def until_found(self, most_s: float) -> Hang | None:
        begin = self.now
        while self.now - begin < most_s:
            self.now += 1.0
            if hang := self.watcher.look():
                return hang
        return None


def test_a_frozen_worker_is_found_after_the_limit_and_told_with_its_files(tmp_path: Path) -> None:
    stage = Stage(tmp_path, at(8, "backward"), None)
    hang = stage.until_found(100)
    assert hang is not None
    assert stage.now == 30.0
    assert (hang.suspects, hang.nodes, hang.names) == ((1,), ("id-1",), ("node-1",))
    assert hang.text == (
        "no step for 30 s after step 7 (usually 1 s; --elastic.hang-min-s 30): rank 1 did not answer, the others did, "
        "on node node-1"
    )
    assert hang.dumps == "hangs/20231114T221320Z-g3"
    files = {p.name: p.read_text() for p in (tmp_path / hang.dumps).iterdir()}
    assert "in the middle" in files["rank-0000.txt"]
    assert "'backward' of step 8" in files["rank-0000.txt"]
    assert "process 1001: no answer" in files["rank-0001.txt"]
    assert "seen from outside" in files["rank-0001.txt"]
    (told,) = stage.told
    assert told[0] == "hang"
    assert told[1]["suspects"] == [1]
    assert told[1]["dumps"] == hang.dumps
    assert told[1]["where"] == {"backward of step 8": [0], "no answer": [1]}
    stage.watcher.end(hang, lambda seconds: True)
    assert stage.ended == [([1], [1])], "the suspect alone is ended, on its node"
    cause = hang.cause(Cause(kind="worker_error", text="the process of rank 1 died"))
    assert (cause.kind, cause.text) == ("hang", hang.text)
    assert cause.more["suspect_ranks"] == [1]
    assert hang.cause(Cause(kind="node_loss", text="gone")).kind == "node_loss"


def test_steps_that_go_on_are_never_asked_about(tmp_path: Path) -> None:
    stage = Stage(tmp_path, at(8, "agree"), None)
    for step in range(8, 40):
        stage.now += 25.0
        stage.status["step"] = step
        assert stage.watcher.look() is None
    assert stage.asked == 0


def test_slow_steps_have_a_longer_limit(tmp_path: Path) -> None:
    stage = Stage(tmp_path, at(8, "agree"), None)
    stage.status["step_time_s"] = 20.0
    assert stage.until_found(199) is None
    assert stage.asked == 0
    hang = stage.until_found(2)
    assert hang is not None
    assert "--elastic.hang-factor 10" in hang.text


@pytest.mark.parametrize("phase", ["between", "validate", "hold"])
def test_an_evaluation_has_the_long_allowance_and_is_not_asked_about_all_the_time(
    tmp_path: Path, phase: str
) -> None:
    stage = Stage(tmp_path, at(8, phase), at(8, "agree"))
    assert stage.until_found(599) is None
    assert stage.asked < 599 / (30 / 4) + 2
    hang = stage.until_found(20)
    assert hang is not None
    assert "--elastic.hang-long-s 600" in hang.text, (
        "whoever evaluates for longer must know what to change"
    )


@pytest.mark.parametrize(
    "status", [{"attempt_open": False}, {"last": {}}, {"last": {"generation": 2}}]
)
def test_a_start_and_a_first_step_have_the_long_allowance(
    tmp_path: Path, status: dict[str, Any]
) -> None:
    stage = Stage(tmp_path, at(8, "forward"), None)
    stage.status |= status
    assert stage.until_found(600) is None
    assert stage.until_found(2) is not None


def test_a_run_that_goes_on_while_it_is_asked_is_left_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, at(8, "agree"), None)
    stage.on_ask = lambda: stage.status.update(step=stage.status["step"] + 1)
    assert stage.until_found(200) is None
    assert stage.asked >= 5
    assert stage.told == []


def test_steps_that_end_and_are_not_told_are_no_hang(tmp_path: Path) -> None:
    """As after a tracker that was away: what it knows is old."""
    stage = Stage(tmp_path, at(8, "agree"), None)
    stage.on_ask = lambda: setattr(stage, "step_begun_s", stage.now - 2.0)
    assert stage.until_found(200) is None
    assert stage.asked >= 5


def test_a_finished_run_and_a_tracker_that_does_not_answer_are_no_hang(tmp_path: Path) -> None:
    stage = Stage(tmp_path, at(8, "agree"), None)
    stage.deaf = True
    assert stage.until_found(1000) is None
    stage.deaf = False
    stage.status["finished_step"] = 7
    assert stage.until_found(1000) is None
    assert stage.asked == 0


def test_when_nobody_can_be_named_or_the_suspect_does_not_end_it_all_are_ended(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, at(8, "agree"), at(8, "agree"), at(8, "agree"))
    hang = stage.until_found(100)
    assert hang is not None
    assert hang.suspects == ()
    stage.watcher.end(hang, lambda seconds: True)
    assert stage.ended == [([0, 1, 2], [])]
    stage.ended.clear()
    stage.watcher.end(hang, lambda seconds: False)
    assert stage.ended == [([0, 1, 2], []), ([0, 1, 2], [0, 1, 2])]


def test_the_end_of_a_group_that_hung_is_told_as_a_hang_and_the_next_group_is_a_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, at(8, "agree"), None)
    group = callbacks._Group("run", 1.0)
    died = Cause(kind="worker_error", text="the process of rank 1 died")
    monkeypatch.setattr(callbacks, "ask_again", lambda workers, timeout_s: {})
    monkeypatch.setattr(callbacks, "dead_nodes", lambda workers: {})
    monkeypatch.setattr(callbacks, "find_cause", lambda errors, nodes: died)
    monkeypatch.setattr(callbacks, "step_worked_on", lambda workers: 8)
    group.start([])
    assert group.cause() == replace(died, more={"at_step": 8})
    group.hang = stage.until_found(100)
    assert group.cause().kind == "hang"
    assert group.cause().more["suspect_nodes"] == ["id-1"]
    assert group.cause().more["at_step"] == 8
    group.start([])
    assert group.cause().kind == "worker_error"


def test_a_hang_that_is_found_while_a_resize_waits_for_its_save_is_told_as_a_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, at(8, "agree"), None)
    stage.status |= {"saves_settled": 3, "settled_request": 0, "leaving": False}
    hang = stage.until_found(100)
    monkeypatch.setattr(callbacks, "RayTracker", lambda run: stage)
    monkeypatch.setattr(callbacks.time, "sleep", lambda seconds: setattr(group, "hang", hang))
    group = callbacks._Group("run", 1.0)
    group.start([object()])
    decisions = callbacks.ControllerDecisions(group, save_timeout_s=1e9)
    decisions.before_controller_execute_resize_decision(SimpleNamespace(num_workers=3))
    method, told = stage.told[-1]
    assert (method, told["kind"], told["suspect_ranks"]) == ("interruption", "hang", [1])


# ---- files ----------------------------------------------------------------------------------------


def test_only_the_newest_hangs_keep_their_files(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path, 1.7e9 + i, 1) for i in range(KEPT + 3)]
    for folder in folders:
        assert write_dumps(folder, {0: "x" * 10}) == ""
    assert sorted((tmp_path / "hangs").iterdir()) == sorted(folders)[3:]


def test_files_that_cannot_be_written_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("in the way")
    assert write_dumps(folder_of(tmp_path, 1.7e9, 1), {0: "x"}) != ""


def test_a_look_from_outside_tells_what_the_kernel_says_and_ends_only_workers_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dumps, "_spy_says", lambda pid, spy_s: f"py-spy of {pid}")
    text = dumps.look_and_end(os.getpid(), look=True, end=True)
    assert "State: R" in text
    assert f"py-spy of {os.getpid()}" in text
    assert "killed: False" in text, (
        "this process is no worker of Ray, and another may have a worker's number"
    )
    assert "No such" in dumps.look_from_outside(2**22 + 1)


@given(st.text("aä€\n", max_size=300), st.integers(80, 200))
def test_a_cut_text_keeps_its_ends_and_the_limit(text: str, most: int) -> None:
    got = cut(text, most)
    assert len(got.encode()) <= most or got == text
    assert got == text or len(text.encode()) > most


def test_a_process_tells_what_its_threads_do_and_where_it_is() -> None:
    assert "test_a_process_tells_what_its_threads_do" in stacks_of_threads()
    here = Here()
    here.enter("data", 5)
    begun = here.now.step_since_s
    here.enter("forward", left=3)
    assert (here.now.step, here.now.phase, here.now.left) == (5, "forward", 3)
    assert here.now.step_since_s == begun
    here.enter("between", 6)
    assert here.now.step_since_s >= begun
