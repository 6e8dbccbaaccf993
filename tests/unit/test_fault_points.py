"""Fault points: all of them known, each strikes when it should, and a run without them does not notice."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_ckpt
from ray_ckpt import fault_points
from ray_ckpt.checkpoint.storing import write_atomically
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.fault_points import (
    FAULT_VARIABLE,
    POINTS,
    WITH_ERRORS,
    arm,
    fault_point,
    parse_faults,
)
from ray_ckpt.tracker.journal import JsonLines, read_lines

PACKAGE = Path(ray_ckpt.__file__).parent


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    arm("")
    yield
    arm("")


def ended_by(action: Callable[[], object]) -> int:
    """How a child that does something ends: the number of the signal, 0 when it came to its end."""
    child = os.fork()
    if not child:
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return os.WSTOPSIG(status)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_every_point_in_the_code_is_in_the_list_and_the_other_way_round() -> None:
    passed: set[str] = set()  # what fault_point() is called with
    words: set[str] = set()  # every string: two names may be chosen from, or stand in a table
    for path in PACKAGE.rglob("*.py"):
        if path.name == "fault_points.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fault_point":
                first = node.args[0]
                parts = [first] if isinstance(first, ast.Constant) else ast.walk(first)
                passed |= {n.value for n in parts if isinstance(n, ast.Constant)} - {0, 1, 2}
    assert passed - POINTS.keys() <= {True, False}
    assert len(passed & POINTS.keys()) > 20
    assert POINTS.keys() <= words, f"in no code: {sorted(POINTS.keys() - words)}"


def test_a_point_where_nothing_is_put_in_costs_nanoseconds() -> None:
    best = min(timeit.repeat(lambda: fault_point("save.file"), number=20_000, repeat=7)) / 20_000
    print(f"{best * 1e9:.0f} ns, with the lambda around it")
    assert best < 1e-6  # tens of nanoseconds; the rest is for a machine that is busy


def test_each_fault_strikes_at_its_turn_and_no_other() -> None:
    arm("save.file@2=eio,save.file@4+=enospc,save.stage=enospc")
    seen = []
    for _ in range(6):
        try:
            fault_point("save.file")
            seen.append(0)
        except OSError as error:
            seen.append(error.errno or -1)
    assert seen == [0, errno.EIO, 0, errno.ENOSPC, errno.ENOSPC, errno.ENOSPC]
    with pytest.raises(OSError, match="No space left"):
        fault_point("save.stage")
    fault_point("save.stage")
    fault_point("commit.check")
    arm("")
    fault_point("save.file")


def test_a_disk_is_slow_for_as_long_as_a_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(fault_points.time, "sleep", slept.append)
    switch, done = tmp_path / "slow", []
    arm(f"save.file@2+=slow:{switch}")
    for text in (None, "0.5", "0.25", "", "torn", "-1", None):
        if text is None:
            switch.unlink(missing_ok=True)
        else:
            switch.write_text(text)
        fault_point("save.file", lambda: done.append(1))
    assert [second for second in slept if second] == [0.5, 0.25]
    assert not done, "all of it comes after the wait"


def test_points_with_errors_are_points() -> None:
    assert POINTS.keys() > WITH_ERRORS


def test_half_is_done_before_a_fault_and_only_then() -> None:
    done: list[int] = []
    arm("save.file@1=sleep:0,save.file@2=eio")
    fault_point("save.file", lambda: done.append(1))
    assert done == [], "all of it comes after the sleep"
    with pytest.raises(OSError):
        fault_point("save.file", lambda: done.append(2))
    assert done == [2]


@pytest.mark.parametrize(
    ("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("sleep:0.001", 0)]
)
def test_signals_reach_this_process_alone(action: str, number: int) -> None:
    def child() -> None:
        arm(f"commit.check={action}")
        fault_point("commit.check")

    assert ended_by(child) == number


def test_a_parent_can_be_killed_from_its_child() -> None:
    def parent() -> None:
        if not os.fork():
            arm("commit.check=kill-parent")
            fault_point("commit.check")
            os._exit(0)
        signal.pause()

    assert ended_by(parent) == signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("commit.rname=kill", "no fault point 'commit.rname'"),
        ("commit.rename=boom", "'boom' in .* is no action"),
        ("commit.rename=sleep:long", "is no action"),
        ("commit.rename=slow:relative", "is no action"),
        ("commit.rename", "is not NAME"),
        ("save.write=eio", "no error can come from 'save.write'"),
        ("commit.rename@0=kill", "counts from 1"),
        ("commit.rename@x=kill", "is not NAME"),
    ],
)
def test_a_mistake_is_told_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arm(text)
    fault_point("commit.rename")  # nothing was put in


def test_a_mistake_in_the_environment_is_told_at_the_start() -> None:
    code = "import ray_ckpt.checkpoint.storing"
    env = {**os.environ, FAULT_VARIABLE: "no.such=kill"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.returncode == 1
    assert "ConfigError: RAY_CKPT_FAULT: there is no fault point 'no.such'" in found.stderr


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(POINTS)),
            st.integers(1, 99),
            st.booleans(),
            st.sampled_from(["kill", "stop", "sleep:1.5"]),
        ),
        max_size=4,
    )
)
def test_what_is_written_is_what_is_understood(faults: list[tuple[str, int, bool, str]]) -> None:
    text = ",".join(f"{n}@{k}{'+' if ever else ''}={action}" for n, k, ever, action in faults)
    found = parse_faults(text)
    assert [
        (n, f.nth, f.ever, f.action) for n in dict.fromkeys(n for n, *_ in faults) for f in found[n]
    ] == sorted(faults, key=lambda f: list(dict.fromkeys(n for n, *_ in faults)).index(f[0]))


@pytest.mark.parametrize("action", ["eio", "enospc"])
@pytest.mark.parametrize("point", ["record.temporary", "record.rename", "record.renamed"])
def test_a_small_file_is_the_old_one_or_the_new_one_whatever_fails(
    tmp_path: Path, point: str, action: str
) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, b"old")
    arm(f"{point}={action}")
    with pytest.raises(StorageError, match=r"run\.json"):
        write_atomically(path, b"new")
    assert path.read_bytes() == (b"new" if point == "record.renamed" else b"old")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"], "a temporary was left"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"


@pytest.mark.parametrize("action", ["eio", "enospc"])
def test_a_line_that_failed_in_its_middle_does_not_take_the_next_one(
    tmp_path: Path, action: str
) -> None:
    """Some file systems write a part of the bytes and then fail."""
    with JsonLines(tmp_path / "j.jsonl", sync=True) as lines:
        lines.append({"n": 1})
        arm(f"journal.line@1={action}")
        with pytest.raises(StorageError, match="cannot be written"):
            lines.append({"n": 2})
        lines.append({"n": 2})
        lines.append({"n": 3})
    assert list(read_lines(tmp_path / "j.jsonl")) == [{"n": 1}, {"n": 2}, {"n": 3}]
