"""A line counts when it is whole: no kill, no full disk takes an earlier line or joins two."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.errors import StorageError
from ray_ckpt.tracker import journal as module
from ray_ckpt.tracker.journal import (
    JsonLines,
    LineQueue,
    NotSyncedError,
    newest_lines,
    read_lines,
)

Event = dict[str, Any]


def write(path: Path, *events: Event) -> None:
    with JsonLines(path, sync=False) as lines:
        for event in events:
            lines.append(event)


def read(path: Path) -> list[Event]:
    return list(read_lines(path))


@contextlib.contextmanager
def full_at(size: int) -> Iterator[None]:
    """The disk is full: no file of this process grows past a size. Writes get short, as they do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
events = st.dictionaries(st.text(max_size=8), json_values, max_size=4)


@settings(max_examples=30, deadline=None)
@given(st.lists(events, max_size=6), st.lists(events, max_size=3))
def test_what_is_appended_is_what_is_read(tmp_path_factory, first, later):
    path = tmp_path_factory.mktemp("j") / "run" / "journal.jsonl"  # the folder is made
    write(path, *first)
    write(path, *later)
    assert read(path) == first + later
    assert path.read_bytes().count(b"\n") == len(first + later)


def test_each_line_can_be_read_before_the_file_is_closed(tmp_path):
    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        for n in range(3):
            lines.append({"n": n})
            assert [event["n"] for event in read_lines(path)] == list(range(n + 1))


def test_a_kill_at_any_byte_of_a_line_costs_that_line_only(tmp_path):
    path = tmp_path / "journal.jsonl"
    told = [{"n": n, "text": "zwölf \n \u2028 {}", "more": [1, {"a": "}\n"}]} for n in range(4)]
    write(path, *told)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 4
    for size in range(ends[1], len(whole) + 1):
        path.write_bytes(whole[:size])
        # A line whose end alone is missing is whole: nothing of what it says is.
        survivors = told[: sum(size >= end - 1 for end in ends)]
        assert read(path) == survivors
        write(path, {"after": size})
        assert read(path) == [*survivors, {"after": size}]
        write(path, {"again": size})
        assert read(path) == [*survivors, {"after": size}, {"again": size}]


@pytest.mark.parametrize(
    "junk", [b"\0" * 40, b"\xff\xfe\x00", b"17", b"[1]", b'"text"', b"null", b"{"]
)
def test_what_a_power_cut_left_in_the_middle_is_passed_over(tmp_path, junk):
    path = tmp_path / "journal.jsonl"
    write(path, {"n": 1})
    path.write_bytes(path.read_bytes() + junk)
    write(path, {"n": 2})
    path.write_bytes(path.read_bytes() + junk + b"\n" + b"\n")
    assert read(path) == [{"n": 1}, {"n": 2}]


def test_a_missing_journal_is_empty_and_one_that_cannot_be_read_is_an_error(tmp_path):
    assert read(tmp_path / "none.jsonl") == []
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"folder\.jsonl cannot be read"):
        read(tmp_path / "folder.jsonl")


def test_a_journal_that_cannot_be_opened_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "journal.jsonl", tmp_path):
        with pytest.raises(StorageError) as caught:
            JsonLines(path, sync=True)
        assert str(path) in str(caught.value)
        assert "--storage" in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_without_any_room_is_named():
    with JsonLines(Path("/dev/full"), sync=False) as lines:
        with pytest.raises(StorageError, match=r"/dev/full cannot be written.*Make room"):
            lines.append({"n": 1})


def test_a_full_disk_takes_no_earlier_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        lines.append({"n": 1})
        with full_at(path.stat().st_size):
            for _ in range(2):
                with pytest.raises(StorageError, match=r"journal\.jsonl cannot be written"):
                    lines.append({"n": 2})
        lines.append({"n": 3})
    assert read(path) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("room", [1, 5, 11])
def test_a_line_cut_by_a_full_disk_does_not_take_the_next_one(tmp_path, room):
    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        lines.append({"n": 1})
        with full_at(path.stat().st_size + room):
            with pytest.raises(StorageError, match=r"journal\.jsonl cannot be written"):
                lines.append({"n": 2, "text": "x" * 50})
        assert read(path) == [{"n": 1}]
        lines.append({"n": 3})
        lines.append({"n": 4})
    assert read(path) == [{"n": 1}, {"n": 3}, {"n": 4}]


class ShortOnce:
    """A file whose first write takes only some bytes."""

    def __init__(self, file: Any, count: int) -> None:
        self.file, self.count = file, count

    def write(self, data: bytes) -> int:
        count, self.count = self.count, len(data) + self.count
        return int(self.file.write(data[:count]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_short_write_alone_leaves_the_next_line_whole(tmp_path, count):
    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        lines.append({"n": 1})
        lines._file = ShortOnce(lines._file, count)  # type: ignore[assignment]
        with pytest.raises(StorageError, match=r"short write, is the disk full"):
            lines.append({"n": 2})
        lines.append({"n": 3})
    assert read(path) == [{"n": 1}, {"n": 3}]


def test_a_line_that_lacks_only_its_end_is_written_and_not_written_again(tmp_path):
    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        lines._file = ShortOnce(lines._file, len(b'{"n": 1}'))  # type: ignore[assignment]
        lines.append({"n": 1})
        assert read(path) == [{"n": 1}]
        lines.append({"n": 2})
    assert read(path) == [{"n": 1}, {"n": 2}]


def test_lines_wait_in_order_and_one_that_is_no_json_is_not_let_in(tmp_path):
    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        queue = LineQueue(lines)
        queue.add({"n": 1}, {"n": 2})
        with pytest.raises(TypeError):
            queue.add({"n": 3}, {"n": object()})
        with full_at(0):
            for _ in range(2):
                with pytest.raises(StorageError):
                    queue.flush()
        assert (read(path), len(queue)) == ([], 2)
        queue.add({"n": 4})
        queue.flush()
        assert (read(path), len(queue)) == ([{"n": 1}, {"n": 2}, {"n": 4}], 0)


def test_lines_that_were_written_but_not_synced_are_not_written_again(tmp_path, monkeypatch):
    def refuse(handle: int) -> None:
        raise OSError(5, os.strerror(5))

    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        queue = LineQueue(lines)
        queue.add({"n": 1}, {"n": 2})
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "fsync", refuse)
            with pytest.raises(NotSyncedError):
                queue.flush()
        queue.flush()
    assert read(path) == [{"n": 1}, {"n": 2}]


def test_the_newest_lines_are_those_of_the_newest_attempt(tmp_path):
    path = tmp_path / "steps.jsonl"
    told = [
        {"generation": generation, "step": step, "step_time_s": 1.0}
        for generation, step in [(1, 1), (1, 2), (3, 2), (2, 9), (3, 3), (3, 4)]
    ]
    write(path, *told, {"note": "no step"})
    assert newest_lines(path, 2) == (3, told[-2:])
    assert newest_lines(tmp_path / "none.jsonl", 2) == (0, [])


def test_a_line_is_on_the_disk_before_append_returns_when_asked(tmp_path, monkeypatch):
    synced: list[bytes] = []
    path = tmp_path / "journal.jsonl"
    monkeypatch.setattr(module.os, "fsync", lambda handle: synced.append(path.read_bytes()))
    with JsonLines(path, sync=True) as lines:
        lines.append({"n": 1})
    assert [json.loads(data) for data in synced] == [{"n": 1}]
    with JsonLines(path, sync=False) as lines:
        lines.append({"n": 2})
    assert len(synced) == 1


def test_a_disk_that_cannot_promise_is_an_error(tmp_path, monkeypatch):
    def refuse(handle: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(module.os, "fsync", refuse)
    path = tmp_path / "journal.jsonl"
    with JsonLines(path, sync=True) as lines:
        with pytest.raises(StorageError, match=r"journal\.jsonl cannot be written"):
            lines.append({"n": 1})
