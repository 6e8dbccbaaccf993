"""A depot: whatever breaks off, a file under its name is whole, and a commit has every file that it promised."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from disk import add_checkpoint, at_every_touch
from hypothesis import given, settings
from hypothesis import strategies as st
from making import manifest_of

from ray_ckpt.checkpoint.listing import NO_MANIFEST
from ray_ckpt.checkpoint.manifest import FileEntry, Manifest, read_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME, checkpoint_name
from ray_ckpt.errors import ConfigError, CopyError, ManifestError, StorageError
from ray_ckpt.tiers.collect import LEAVING_NAME
from ray_ckpt.tiers.depot import Depot

PATHS = (".metadata", "__0_0.distcp", "rank/rng.json")


def content(step: int, path: str) -> bytes:
    return f"{path} of step {step}".encode() * 7


def entry_of(step: int, path: str) -> FileEntry:
    data = content(step, path)
    return FileEntry(path, len(data), xxhash.xxh3_128_hexdigest(data))


def manifest(step: int, generation: int = 1) -> Manifest:
    files = tuple(entry_of(step, path) for path in PATHS)
    return manifest_of(run="demo", step=step, generation=generation, files=files)


def chunks(step: int, path: str, size: int = 10) -> list[bytes]:
    data = content(step, path)
    return [data[at : at + size] for at in range(0, len(data), size)]


def put(depot: Depot, step: int, *paths: str, generation: int = 1) -> None:
    for path in paths:
        depot.put(checkpoint_name(step, generation), entry_of(step, path), chunks(step, path))


def files_below(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir())


@pytest.fixture
def depot(tmp_path: Path) -> Depot:
    return Depot(tmp_path / "base" / "demo-key", sync=True)


# ---- what is there ---------------------------------------------------------------------------------


def test_a_part_is_committed_with_the_files_that_are_here_and_read_back(depot):
    put(depot, 10, *PATHS[:2])
    (before,) = depot.inventory()
    assert (before.manifest, before.paths, before.fault) == (None, (), NO_MANIFEST)
    assert depot.keep(manifest(10), PATHS[:2]) is None
    place = depot.folder(checkpoint_name(10, 1)) / MANIFEST_NAME
    written = place.stat().st_ino
    assert depot.keep(manifest(10), PATHS[:2]) is None
    assert place.stat().st_ino == written
    (holding,) = depot.inventory()
    assert (holding.step, holding.generation, holding.fault) == (10, 1, None)
    assert (holding.manifest, holding.paths) == (manifest(10), PATHS[:2])
    assert depot.verify(holding.name) == []
    (fault,) = depot.verify(holding.name, PATHS)
    assert (fault.path, fault.fault) == (PATHS[2], "missing")
    put(depot, 10, PATHS[2])
    assert depot.verify(holding.name, PATHS) == []


def test_the_newest_comes_first_and_a_damaged_manifest_is_told_from_none(depot):
    for step in (10, 30, 20):
        put(depot, step, *PATHS)
        depot.keep(manifest(step), PATHS)
    place = depot.folder(checkpoint_name(20, 1)) / MANIFEST_NAME
    place.write_bytes(place.read_bytes().replace(b'"step": 20', b'"step": 21'))
    assert [holding.step for holding in depot.inventory()] == [30, 20, 10]
    assert depot.inventory()[1].manifest is None
    assert "damaged" in str(depot.inventory()[1].fault)
    (fault,) = depot.verify(checkpoint_name(20, 1))
    assert fault.path == MANIFEST_NAME


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (PATHS, "rank/rng.json of step-00000010-g1: not here"),
        (("other",), "other is not in the manifest"),
        ((), "no file of step-00000010-g1 is named"),
    ],
)
def test_a_part_that_lacks_a_file_is_refused_in_words(depot, paths, words):
    put(depot, 10, *PATHS[:2])
    assert words in str(depot.keep(manifest(10), paths))
    assert depot.inventory()[0].manifest is None


def test_a_file_of_another_size_or_behind_a_link_is_no_part(depot, tmp_path):
    put(depot, 10, *PATHS)
    folder = depot.folder(checkpoint_name(10, 1))
    os.truncate(folder / PATHS[1], 3)
    assert "has 3 of" in str(depot.keep(manifest(10), PATHS))
    put(depot, 10, PATHS[1])
    (folder / "rank").rename(tmp_path / "rank")
    (folder / "rank").symlink_to(tmp_path / "rank")
    assert "behind a link" in str(depot.keep(manifest(10), PATHS))
    with pytest.raises(StorageError, match="cannot write"):
        depot.put(checkpoint_name(10, 1), entry_of(10, "rank/other"), chunks(10, "rank/other"))
    assert files_below(tmp_path / "rank") == ["rng.json"]


def test_another_manifest_in_the_place_is_never_written_over(depot):
    put(depot, 10, *PATHS)
    depot.keep(manifest(10), PATHS)
    other = manifest_of(run="other", step=10, files=manifest(10).files)
    with pytest.raises(ManifestError, match="already committed"):
        depot.keep(other, PATHS)
    assert depot.inventory()[0].manifest == manifest(10)


def test_a_name_or_path_that_leads_elsewhere_is_refused(depot):
    for name in ("..", "step-1-g1", "", "step-00000010-g1/..", "/etc"):
        with pytest.raises(ConfigError, match="no name of a checkpoint"):
            depot.folder(name)
    for path in ("../x", "/etc/passwd", MANIFEST_NAME, "a/../b"):
        with pytest.raises(ConfigError, match="file path"):
            depot.set_aside(checkpoint_name(10, 1), path)


# ---- bytes -----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_only_the_right_bytes_get_in(data):
    """Flipped, cut, or too long, in chunks of any size: an error that says so, and nothing stays."""
    right = content(10, PATHS[1])
    changed = bytearray(right)
    kind = data.draw(st.sampled_from(["right", "flipped", "cut", "long"]))
    if kind == "flipped":
        changed[data.draw(st.integers(0, len(right) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del changed[data.draw(st.integers(0, len(right) - 1)) :]
    elif kind == "long":
        changed += data.draw(st.binary(min_size=1, max_size=50))
    size = data.draw(st.integers(1, len(right)))
    pieces = [memoryview(changed)[at : at + size] for at in range(0, len(changed), size)]
    name = checkpoint_name(10, 1)
    with tempfile.TemporaryDirectory() as base:
        depot = Depot(Path(base), sync=False)
        if kind == "right":
            depot.put(name, entry_of(10, PATHS[1]), pieces)
            assert (depot.folder(name) / PATHS[1]).read_bytes() == right
        else:
            words = {"flipped": "checksum differs", "cut": "truncated", "long": "too long"}[kind]
            with pytest.raises(CopyError, match=f"{PATHS[1]}: {words}"):
                depot.put(name, entry_of(10, PATHS[1]), pieces)
            assert files_below(Path(base)) == []


def test_a_file_with_a_forged_quick_checksum_does_not_get_in(depot):
    data = content(10, PATHS[0])
    entry = FileEntry(PATHS[0], len(data), xxhash.xxh3_128_hexdigest(data), "0" * 64)
    with pytest.raises(CopyError, match="SHA-256 differs"):
        depot.put(checkpoint_name(10, 1), entry, [data])
    assert files_below(depot.root) == []


def test_what_is_here_is_not_taken_again_and_what_is_bad_is_replaced(depot):
    def never():
        raise AssertionError("a chunk was asked for")
        yield b""

    name = checkpoint_name(10, 1)
    put(depot, 10, *PATHS)
    depot.put(name, entry_of(10, PATHS[1]), never())
    depot.keep(manifest(10), PATHS)
    place = depot.folder(name) / PATHS[1]
    flipped = bytearray(place.read_bytes())
    flipped[5] ^= 4
    place.write_bytes(flipped)
    (fault,) = depot.verify(name)
    assert (fault.path, fault.fault) == (PATHS[1], "checksum differs")
    depot.set_aside(name, PATHS[1])
    depot.set_aside(name, PATHS[1])
    assert depot.inventory()[0].paths == (PATHS[0], PATHS[2])
    assert depot.inventory()[0].manifest == manifest(10)
    place.write_bytes(flipped)
    put(depot, 10, PATHS[1])
    assert depot.verify(name, PATHS) == []


def test_two_who_bring_the_same_file_at_once_leave_one(depot):
    gate, errors = threading.Barrier(4), list[BaseException]()

    def bring():
        def slowly():
            for chunk in chunks(10, PATHS[1]):
                gate.wait(10)
                yield chunk

        try:
            depot.put(checkpoint_name(10, 1), entry_of(10, PATHS[1]), slowly())
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=bring) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert errors == []
    assert files_below(depot.root) == [f"checkpoints/{checkpoint_name(10, 1)}/{PATHS[1]}"]


def test_a_copy_whose_checkpoint_is_dropped_meanwhile_is_told_and_leaves_nothing(depot):
    name = checkpoint_name(10, 1)

    def dropped():
        yield content(10, PATHS[2])
        depot.drop(name)

    with pytest.raises(CopyError, match="dropped meanwhile"):
        depot.put(name, entry_of(10, PATHS[2]), dropped())
    assert depot.inventory() == []


# ---- a tier that is full ---------------------------------------------------------------------------


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_tier_that_gets_full_in_the_middle_refuses_in_words_and_keeps_nothing(depot, monkeypatch):
    real, written = os.write, 0

    def write(handle: int, data: memoryview) -> int:
        nonlocal written
        if written >= 25:
            full()
        written += 3
        return real(handle, data[:3])  # a short write is no error

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StorageError, match=r"__0_0\.distcp: the tier is full .*more space"):
        put(depot, 10, PATHS[1])
    assert written >= 25
    assert files_below(depot.root) == []


def test_what_does_not_fit_is_refused_before_a_byte_is_sent(depot):
    data = FileEntry("big", 1 << 60, "0" * 32)

    def never():
        raise AssertionError("a chunk was asked for")
        yield b""

    with pytest.raises(StorageError, match="the tier is full"):
        depot.put(checkpoint_name(10, 1), data, never())


def test_an_error_at_any_touch_is_told_in_words_and_leaves_no_half(tmp_path):
    """ENOSPC wherever it may come, in a put and in a commit; the same calls then end the work."""

    def work(depot: Depot) -> None:
        put(depot, 10, *PATHS)
        assert depot.keep(manifest(10), PATHS) is None

    told: list[str] = []
    with at_every_touch(told.append):
        work(Depot(tmp_path / "probe", sync=True))
    assert len(told) > 25
    refused = 0
    for at in range(1, len(told) + 1):
        depot, seen = Depot(tmp_path / f"depot-{at}", sync=True), 0

        def fail(what: str, at: int = at) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                full()

        with at_every_touch(fail), contextlib.suppress(StorageError):
            work(depot)
            refused -= 1  # it went on without, such as a check of whether the file is here
        refused += 1
        assert not any(name.endswith(".copying") for name in files_below(depot.root))
        sane(depot, {})
        work(depot)
        assert depot.verify(checkpoint_name(10, 1), PATHS) == []
    assert refused > 15


# ---- whatever breaks off ---------------------------------------------------------------------------


class Crash(BaseException):
    """The process is dead."""


def crash_at(count: int, action: Callable[[], None]) -> bool:
    """Does something until the ``count``-th touch; then nothing touches the disk any more."""
    seen = 0

    def say(what: str) -> None:
        nonlocal seen
        seen += 1
        if seen >= count:
            raise Crash(what)

    try:
        with at_every_touch(say):
            action()
    except Crash:
        return True
    return False


def sane(depot: Depot, promised: dict[int, set[str]]) -> None:
    """What must hold at every instant."""
    committed = {}
    for holding in depot.inventory():
        assert holding.fault in (None, NO_MANIFEST), holding.fault
        folder = depot.folder(holding.name)
        for path in files_below(folder):
            if path in PATHS:  # under its name it is whole
                assert (folder / path).read_bytes() == content(holding.step, path)
            else:
                assert path in (MANIFEST_NAME, LEAVING_NAME) or Path(path).name.startswith(".")
        if holding.manifest is not None:
            committed[holding.step] = set(holding.paths)
            assert depot.verify(holding.name) == []
    for step, paths in promised.items():
        assert paths <= committed[step]


_steps = st.sampled_from([10, 20])
_paths = st.lists(st.sampled_from(PATHS), min_size=1, unique=True)
_actions = st.one_of(
    st.tuples(st.just("put"), _steps, _paths),
    st.tuples(st.just("keep"), _steps, _paths),
    st.tuples(st.just("set_aside"), _steps, _paths),
    st.tuples(st.just("drop"), _steps, st.just([])),
    st.tuples(st.just("sweep"), _steps, st.just([])),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(_actions, st.one_of(st.none(), st.integers(1, 25))), max_size=12),
    st.booleans(),
)
def test_whatever_is_done_and_wherever_it_crashes_there_is_a_commit_or_none(actions, sync):
    promised: dict[int, set[str]] = {}
    with tempfile.TemporaryDirectory() as base:
        depot = Depot(Path(base) / "demo", sync=sync)
        for (kind, step, paths), crash in actions:
            name = checkpoint_name(step, 1)
            answer: list[str | None] = []

            def act(
                kind=kind, step=step, paths=paths, name=name, answer=answer, depot=depot
            ) -> None:
                if kind == "put":
                    put(depot, step, *paths)
                elif kind == "keep":
                    answer.append(depot.keep(manifest(step), paths))
                elif kind == "set_aside":
                    for path in paths:
                        depot.set_aside(name, path)
                elif kind == "drop":
                    depot.drop(name)
                else:
                    depot.sweep([checkpoint_name(20, 1)], 1)

            if kind == "set_aside" and step in promised:
                promised[step] -= set(paths)
            elif kind == "drop":
                promised.pop(step, None)
            if crash is None or not crash_at(crash, act):
                if crash is None:
                    act()
                if answer == [None]:
                    promised.setdefault(step, set()).update(paths)
                if kind == "drop":
                    assert not depot.folder(name).exists()
            else:
                depot = Depot(depot.root, sync=sync)  # another process
            sane(depot, promised)
        # A new process clears up: nothing is left but commits.
        fresh = Depot(depot.root, sync=sync)
        fresh.sweep([], 2)
        sane(fresh, promised)
        assert all(holding.manifest is not None for holding in fresh.inventory())
        assert not any(name.endswith(".copying") for name in files_below(depot.root))


def test_a_drop_that_broke_off_anywhere_is_ended_by_the_next_sweep(tmp_path):
    at = 0
    while True:
        at += 1
        depot = Depot(tmp_path / f"depot-{at}", sync=True)
        put(depot, 10, *PATHS)
        depot.keep(manifest(10), PATHS)
        broke = crash_at(at, lambda depot=depot: depot.drop(checkpoint_name(10, 1)))
        was_committed = depot.inventory() and depot.inventory()[0].manifest is not None
        if was_committed:
            assert depot.verify(checkpoint_name(10, 1), PATHS) == []
        depot.sweep([], 1)  # of the generation that may still write
        left = [p for p in files_below(depot.root) if not was_committed]
        assert left == []
        if not broke:
            break
    assert at > 8


def test_a_checkpoint_that_files_come_for_again_is_not_on_its_way_out_any_more(depot):
    put(depot, 10, *PATHS)
    depot.keep(manifest(10), PATHS)
    name = checkpoint_name(10, 1)
    (depot.folder(name) / MANIFEST_NAME).rename(depot.folder(name) / LEAVING_NAME)  # and died
    (depot.folder(name) / PATHS[0]).unlink()
    put(depot, 10, *PATHS)
    assert depot.sweep([], 1) == []
    assert depot.keep(manifest(10), PATHS) is None


def test_a_sweep_spares_what_is_in_flight_kept_committed_or_just_coming(depot):
    for generation in (1, 2, 3):
        put(depot, 10, PATHS[0], generation=generation)
    put(depot, 20, *PATHS)
    depot.keep(manifest(20), PATHS)
    folder = depot.folder(checkpoint_name(20, 1))
    (folder / ".0123456789abcdef.copying").write_bytes(b"half")
    (folder / ".mine").write_bytes(b"a worker's")

    def meanwhile():
        assert depot.sweep([checkpoint_name(10, 1)], 3) == [checkpoint_name(10, 2)]
        yield content(10, PATHS[1])

    depot.put(checkpoint_name(10, 3), entry_of(10, PATHS[1]), meanwhile())
    names = [holding.name for holding in depot.inventory()]
    assert names == [checkpoint_name(20, 1), checkpoint_name(10, 3), checkpoint_name(10, 1)]
    assert files_below(folder) == sorted([*PATHS, MANIFEST_NAME, ".mine"])


def test_nothing_goes_through_a_link(depot, tmp_path):
    elsewhere = add_checkpoint(tmp_path / "run", 10)
    before = files_below(elsewhere)
    name = checkpoint_name(10, 1)
    depot.folder(name).parent.mkdir(parents=True)
    depot.folder(name).symlink_to(elsewhere)
    (elsewhere / LEAVING_NAME).write_bytes(b"{}")
    with pytest.raises(StorageError, match="is a link"):
        depot.drop(name)
    with pytest.raises(StorageError):
        put(depot, 10, PATHS[1])
    with pytest.raises(StorageError):
        depot.set_aside(name, ".metadata")
    assert "behind a link" in str(depot.keep(read_manifest(elsewhere), [".metadata"]))
    (fault,) = depot.verify(name)
    assert fault.unreadable
    depot.sweep([], 99)
    assert files_below(elsewhere) == sorted([*before, LEAVING_NAME])


def test_what_survives_a_power_cut_was_synced_before_the_commit(tmp_path, monkeypatch):
    """Every file and every folder on its way, before the manifest has its name; in memory there is no need."""
    synced: list[str] = []

    def fsync(handle: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))

    monkeypatch.setattr(os, "fsync", fsync)
    for sync in (True, False):
        depot = Depot(tmp_path / str(sync) / "demo", sync=sync)
        put(depot, 10, *PATHS)
        synced.clear()
        depot.keep(manifest(10), PATHS)
        folder = depot.folder(checkpoint_name(10, 1))
        first = next(at for at, place in enumerate(synced) if MANIFEST_NAME in place)
        needed = {str(folder / path) for path in (*PATHS, "rank", "")}
        needed |= {str(depot.root), str(depot.root.parent)}
        assert (needed <= {place.rstrip("/") for place in synced[:first]}) == sync
