"""A root stays while it is held and for its time after that; then all of it goes, or nothing yet."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import at_every_touch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.errors import StorageError
from ray_ckpt.tiers import janitor as module
from ray_ckpt.tiers.janitor import HOLDERS_NAME, HoldersLock, sweep_stale, watch

FILES = ("a", "checkpoints/step-00000010-g1/x", "checkpoints/step-00000010-g1/rank/y")


def fill(root: Path) -> None:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def found(root: Path) -> set[str]:
    return {name for name in FILES if (root / name).exists()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "base" / "run-key"
    with HoldersLock(root):
        fill(root)
    return root


class Time:
    """A clock that moves only while somebody sleeps; tells what happens then."""

    def __init__(self, events: dict[int, object] | None = None) -> None:
        self.now_s, self.ticks, self.events = 0.0, 0, events or {}

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.ticks += 1
        assert self.ticks < 500, "it never ends"
        if self.ticks in self.events:
            self.events[self.ticks]()


def test_a_root_goes_when_nobody_has_held_it_for_so_long_and_not_before(root):
    time = Time()
    assert watch(root, 30.0, clock=time.clock, sleep=time.sleep)
    assert 30.0 <= time.now_s <= 32.0
    assert list(root.parent.iterdir()) == []
    assert not watch(root, 30.0, clock=time.clock, sleep=time.sleep)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 25), st.integers(1, 25)), max_size=4))
def test_it_goes_after_the_first_gap_that_is_long_enough_whoever_comes_and_goes(spans):
    """Ticks of a tenth of the linger: gaps before and lengths of holds that follow one another."""
    with tempfile.TemporaryDirectory() as base:
        root = Path(base) / "run"
        with HoldersLock(root):
            fill(root)
        events, at, held, tried = {}, 0, list[HoldersLock](), list[bool]()

        def come() -> None:
            tried.append(found(root) == set(FILES))
            held.append(HoldersLock(root))

        def leave() -> None:
            held.pop().close()

        expected: int | None = None
        for gap, length in spans:
            if gap > 10 and expected is None:
                expected = at + 10
            events[at + gap], events[at + gap + length] = come, leave
            at += gap + length
        time = Time(events)
        assert watch(root, 10.0, clock=time.clock, sleep=time.sleep)
        assert time.ticks == (at + 10 if expected is None else expected)
        assert all(tried), "who came back in time found everything"
        assert not root.exists()
        assert not held, "it does not go while it is held"


def test_a_holder_that_comes_and_goes_between_two_looks_is_seen(root):
    def visit() -> None:
        with HoldersLock(root):
            pass

    time = Time({25: visit})
    assert watch(root, 30.0, clock=time.clock, sleep=time.sleep)
    assert time.now_s >= 55.0


def test_several_may_hold_it_and_the_last_one_counts(root):
    first, second = HoldersLock(root), HoldersLock(root)
    first.close()
    first.close()
    assert not module._take_away(root, lambda _: True)
    second.close()
    assert module._take_away(root, lambda _: True)
    assert not root.exists()


def test_who_comes_at_any_touch_of_its_end_gets_all_of_it_or_a_new_one(tmp_path):
    at, kept, fresh = 0, 0, 0
    while True:
        at += 1
        root, seen, locks, refused = tmp_path / f"{at}" / "run", 0, list[HoldersLock](), []
        with HoldersLock(root):
            fill(root)

        def arrive(what: str, at=at, root=root, locks=locks, refused=refused) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                try:
                    locks.append(HoldersLock(root, wait_s=0.0))
                except StorageError as error:
                    refused.append(str(error))

        with at_every_touch(arrive):
            gone = module._take_away(root, lambda _: True)
        if seen < at:
            break
        if not locks:
            assert (
                "locked by another process" in refused[0]
            )  # only while it is renamed: it tries again
            locks.append(HoldersLock(root))
        (lock,) = locks
        assert (root / HOLDERS_NAME).exists()
        assert found(root) == (set() if gone else set(FILES))
        kept, fresh = kept + (not gone), fresh + gone
        assert not module._take_away(root, lambda _: True), "it is held"
        lock.close()
        assert {place.name for place in root.parent.iterdir()} == {"run"}
    assert kept
    assert fresh


def test_an_end_at_any_touch_of_who_comes_leaves_it_a_root(tmp_path):
    at, gone = 0, 0
    while True:
        at += 1
        root, seen = tmp_path / f"{at}" / "run", 0
        with HoldersLock(root):
            fill(root)

        def end(what: str, at=at, root=root) -> None:
            nonlocal seen, gone
            seen += 1
            if seen == at:
                gone += module._take_away(root, lambda _: True)

        with at_every_touch(end):
            lock = HoldersLock(root)
        assert (root / HOLDERS_NAME).exists()
        assert not module._take_away(root, lambda _: True), "it is held"
        lock.close()
        if seen < at:
            break
    assert gone


def before_the_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Does something once, when the next lock's file is open and not yet locked."""
    real = module._try

    def try_(handle: int, how: int) -> bool:
        monkeypatch.setattr(module, "_try", real)
        act()
        return real(handle, how)

    monkeypatch.setattr(module, "_try", try_)


def test_a_root_that_went_before_the_lock_on_it_came_is_made_anew(root, monkeypatch):
    before_the_lock(monkeypatch, lambda: module._take_away(root, lambda _: True))
    with HoldersLock(root):
        assert (root / HOLDERS_NAME).exists()
        assert found(root) == set()
        assert not module._take_away(root, lambda _: True), "it is held"


def test_a_lock_on_a_root_that_went_takes_no_new_one_away(root, monkeypatch):
    new: list[HoldersLock] = []

    def go_and_come() -> None:
        assert module._take_away(root, lambda _: True)
        new.append(HoldersLock(root))
        fill(root)

    before_the_lock(monkeypatch, go_and_come)
    assert not module._take_away(root, lambda _: True)
    assert found(root) == set(FILES)
    new[0].close()


def test_an_end_that_breaks_off_anywhere_leaves_all_of_it_or_nothing_and_the_next_sweep_ends_it(
    tmp_path,
):
    at = 0
    while True:
        at += 1
        root, seen = tmp_path / f"{at}" / "run", 0
        with HoldersLock(root):
            fill(root)

        def fail(what: str, at=at) -> None:
            nonlocal seen
            seen += 1
            if seen >= at:
                raise OSError(errno.EIO, "Input/output error")

        with at_every_touch(fail), contextlib.suppress(OSError):
            module._take_away(root, lambda _: True)
        assert found(root) in (set(), set(FILES))
        if not root.exists():
            assert sweep_stale(root.parent, 1e6) == []
            assert list(root.parent.iterdir()) == []
        if seen < at:
            break
    assert at > 5


def test_a_sweep_takes_what_is_stale_and_nothing_else(tmp_path):
    base = tmp_path / "base"
    assert sweep_stale(base, 10.0) == []
    for name in ("old", "held", "written", "link-target"):
        with HoldersLock(base / name):
            fill(base / name)
    (base / "stranger").mkdir()
    (base / "file").write_text("x")
    (base / "link").symlink_to(base / "link-target")
    (base / ".old.0123456789abcdef.leaving").mkdir()
    now_s = (base / "old").stat().st_mtime + 1e6
    for name in ("written", "link-target"):
        os.utime(base / name / FILES[2], (now_s, now_s))
    with HoldersLock(base / "held"):
        assert sweep_stale(base, 3600.0, now_s=now_s) == ["old"]
    left = {place.name for place in base.iterdir()}
    assert left == {"held", "written", "link-target", "stranger", "file", "link"}
    assert found(base / "written") == found(base / "link-target") == set(FILES)


def test_a_root_behind_a_link_or_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link"):
        HoldersLock(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be locked"):
        HoldersLock(tmp_path / "file")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_root_is_its_users_alone(root):
    assert root.stat().st_mode & 0o777 == 0o700
