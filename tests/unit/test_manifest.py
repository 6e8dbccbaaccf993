"""Only committed is readable, and a commit is all or nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.checkpoint import manifest as module
from ray_ckpt.checkpoint import storing
from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.manifest import (
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from ray_ckpt.checkpoint.names import (
    MANIFEST_NAME,
    QUARANTINE_NAME,
    checkpoint_name,
    parse_checkpoint_name,
)
from ray_ckpt.checkpoint.paths import folded, path_fault
from ray_ckpt.checkpoint.quarantine import read_quarantine, write_quarantine
from ray_ckpt.checkpoint.storing import write_atomically
from ray_ckpt.errors import ManifestError, StorageError
from ray_ckpt.segment import Segment

DIGEST = "0123456789abcdef" * 2


def make_manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "run": "demo",
        "step": 1200,
        "sample_offset": 9600,
        "tokens": 614_400,
        "world_size": 2,
        "generation": 3,
        "committed_at": 1_700_000_000.25,
        "files": (FileEntry(".metadata", 10, DIGEST), FileEntry("__0_0.distcp", 20, DIGEST)),
        "parallel": "ddp",
        "guard": {"max_abs": 1.5},
        "metrics": {"loss": 2.5},
        "config_fingerprint": "c0ffee",
        "data_fingerprint": "da7a",
        "versions": {"torch": "2.13.0"},
        "bitwise_comparable": True,
    }
    return Manifest(**{**values, **changes})


def folder_for(manifest: Manifest, run: Path) -> Path:
    folder = run / "checkpoints" / manifest.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def commit(run: Path, **changes: Any) -> Path:
    manifest = make_manifest(**changes)
    folder = folder_for(manifest, run)
    write_manifest(folder, manifest)
    return folder


counts = st.integers(min_value=0, max_value=2**62)
plain = st.text(alphabet=st.characters(), max_size=20)
segment = st.text(
    alphabet=st.characters(blacklist_characters="/\\", blacklist_categories=["Cc", "Cs"]),
    min_size=1,
    max_size=8,
).filter(lambda text: path_fault(text) is None)
file_paths = st.lists(segment, min_size=1, max_size=3).map("/".join)
entries = st.builds(
    FileEntry, file_paths, counts, st.text(alphabet="0123456789abcdef", min_size=32, max_size=32)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=5,
)
manifests = st.builds(
    Manifest,
    run=plain,
    step=counts,
    sample_offset=counts,
    tokens=counts,
    world_size=st.integers(1, 10_000),
    generation=counts,
    committed_at=st.floats(allow_nan=False, allow_infinity=False),
    files=st.lists(entries, min_size=1, max_size=4, unique_by=lambda e: folded(e.path)).map(tuple),
    parallel=plain,
    guard=st.dictionaries(plain, json_values, max_size=3),
    metrics=st.dictionaries(plain, st.floats(), max_size=3),
    config_fingerprint=plain,
    data_fingerprint=plain,
    versions=st.dictionaries(plain, plain, max_size=3),
    bitwise_comparable=st.booleans(),
    segment=st.builds(
        lambda number, step, offset, reason: Segment(
            number=number,
            start_step=step if number else 0,
            start_offset=offset if number else 0,
            reason=reason,
        ).mark(),
        st.integers(0, 3),
        counts,
        counts,
        plain,
    ),
)


@settings(max_examples=60, deadline=None)
@given(manifests)
def test_what_is_committed_is_what_is_read(manifest):
    with tempfile.TemporaryDirectory() as run:
        folder = folder_for(manifest, Path(run))
        write_manifest(folder, manifest)
        found = read_manifest(folder)
        strict = json.loads((folder / MANIFEST_NAME).read_bytes(), parse_constant=pytest.fail)
    # NaN differs from itself, so metrics are compared by what they print.
    assert repr(found) == repr(manifest)
    assert strict["step"] == manifest.step


@given(counts, counts)
def test_a_checkpoint_has_one_name(step, generation):
    assert parse_checkpoint_name(checkpoint_name(step, generation)) == (step, generation)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "latest",
        "step-1200-g3",
        "step-00001200",
        "step-00001200-g03",
        "step-000001200-g3",
        "step-00001200-g3.tmp",
        ".step-00001200-g3",
        "step-00001200-g3\n",
        "step-٠٠٠٠١٢٠٠-g3",
    ],
)
def test_any_other_name_is_no_checkpoint(name):
    assert parse_checkpoint_name(name) is None


def test_names_sort_by_step():
    assert checkpoint_name(1200, 3) == "step-00001200-g3"
    names = [checkpoint_name(step, 1) for step in (9, 10, 99_999, 10_000_000)]
    assert names == sorted(names)


def test_any_changed_bit_of_a_manifest_is_found(tmp_path):
    folder = commit(tmp_path)
    path = folder / MANIFEST_NAME
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        with pytest.raises(ManifestError) as caught:
            read_manifest(folder)
        assert caught.value.fault != "missing"


def test_any_half_written_manifest_is_found(tmp_path):
    folder = commit(tmp_path)
    path = folder / MANIFEST_NAME
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(ManifestError) as caught:
            read_manifest(folder)
        assert caught.value.fault != "missing"
    path.write_bytes(good + b" ")
    with pytest.raises(ManifestError, match="checksum differs"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"step": "1200"}, "step is '1200', must be int"),
        ({"step": True}, "step is True, must be int"),
        ({"step": 1200.0}, "step is 1200.0, must be int"),
        ({"step": -1}, "must not be negative"),
        ({"step": 1300}, "manifest of step-00001300-g3, not of step-00001200-g3"),
        ({"generation": 4}, "manifest of step-00001200-g4"),
        ({"world_size": 0}, "at least one writer"),
        ({"committed_at": None}, "committed_at is None"),
        ({"committed_at": 10**400}, "too large"),
        ({"run": 5}, "run is 5"),
        ({"guard": []}, "guard is"),
        ({"metrics": [1]}, "metrics is"),
        ({"metrics": {"loss": "low"}}, "metrics.loss is 'low'"),
        ({"metrics": {"loss": True}}, "metrics.loss is True"),
        ({"bitwise_comparable": 1}, "bitwise_comparable is 1"),
        ({"segment": 1}, "segment is 1"),
        ({"segment": {}}, "segment.number is missing"),
        ({"segment": {**Segment().mark(), "start_step": -1}}, "start_step of a segment is -1"),
        ({"segment": {**Segment().mark(), "number": True}}, "number of a segment is True"),
        ({"segment": {**Segment().mark(), "reason": None}}, "reason or options of segment 0"),
        ({"checksum_algorithm": "crc32"}, "checksum_algorithm is 'crc32'"),
        ({"schema": 2}, "schema is 2, this version reads 1"),
        ({"schema": True}, "schema is True"),
        ({"schema": None}, "schema is None"),
        ({"files": []}, "files is empty"),
        ({"files": {}}, "files is"),
        ({"files": ["a"]}, "an item of files"),
        ({"files": [{"path": "a", "bytes": 1}]}, "an item of files"),
        ({"files": [{"path": "a", "bytes": 1.5, "checksum": DIGEST}]}, "bytes is 1.5"),
        ({"files": [{"path": "a", "bytes": -1, "checksum": DIGEST}]}, "bytes is -1"),
        ({"files": [{"path": "a", "bytes": 1, "checksum": "abc"}]}, "not 32 hex"),
        ({"files": [{"path": "a", "bytes": 1, "checksum": DIGEST}] * 2}, "names 'a' twice"),
        *(
            ({"files": [{"path": path, "bytes": 1, "checksum": DIGEST}]}, "file path")
            for path in ("/etc/passwd", "../x", "a/../../x", "a\\b", "C:\\x", "", ".", "a//b", "a/")
        ),
        ({"files": [{"path": MANIFEST_NAME, "bytes": 1, "checksum": DIGEST}]}, "reserved"),
        ({"files": [{"path": 7, "bytes": 1, "checksum": DIGEST}]}, "path is 7"),
    ],
)
def test_a_sealed_manifest_with_a_wrong_value_is_refused(tmp_path, change, fault):
    folder = commit(tmp_path)
    document = {**make_manifest().to_json(), **change}
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    with pytest.raises(ManifestError) as caught:
        read_manifest(folder)
    assert fault in str(caught.value)
    assert str(folder / MANIFEST_NAME) in str(caught.value)


def test_a_manifest_from_before_runs_could_skip_is_read_as_one_that_skips_nothing(tmp_path):
    folder = commit(tmp_path)
    document = make_manifest().to_json()
    del document["skipped"]
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    assert read_manifest(folder).skipped == ()


@pytest.mark.parametrize(
    "bad", [None, {}, [3], [{"from_step": 1}], [{"from_step": -1, "steps": 2}]]
)
def test_a_hole_that_is_none_is_refused(tmp_path, bad):
    folder = commit(tmp_path)
    document = {**make_manifest().to_json(), "skipped": bad}
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    with pytest.raises(ManifestError, match="skip"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "name", sorted(set(make_manifest().to_json()) - {"segment", "skipped", "validation"})
)
def test_every_field_is_required(tmp_path, name):
    folder = commit(tmp_path)
    document = make_manifest().to_json()
    del document[name]
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    with pytest.raises(ManifestError, match=name):
        read_manifest(folder)


def test_a_manifest_of_before_segments_is_of_the_first(tmp_path):
    folder = commit(tmp_path)
    document = make_manifest().to_json()
    first = document.pop("segment")
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    found = read_manifest(folder)
    assert found == make_manifest()
    assert found.segment == first == Segment().mark()


def test_a_manifest_keeps_the_segment_it_was_made_in(tmp_path):
    segment = Segment(number=2, start_step=900, start_offset=7200, reason="cleaned data")
    commit(tmp_path, segment=segment.mark())
    found = list_checkpoints(tmp_path)[0].manifest
    assert Segment.from_json(found.segment) == segment


def test_fields_of_a_later_version_are_left_alone(tmp_path):
    folder = commit(tmp_path)
    document = {**make_manifest().to_json(), "colour": "green"}
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    assert read_manifest(folder) == make_manifest()


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\xff\xfe", b"[]", b"null", b"{", b"NaN", b"[" * 200_000, b"9" * 9000]
)
def test_what_is_no_manifest_is_refused(tmp_path, content):
    folder = commit(tmp_path)
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        read_manifest(folder)
    assert caught.value.fault != "missing"


def test_a_folder_without_manifest_is_missing_one(tmp_path):
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path)
    assert caught.value.fault == "missing"
    assert pickle.loads(pickle.dumps(caught.value)).fault == "missing"  # it crosses processes


def test_not_a_number_is_no_time():
    with pytest.raises(ValueError, match="not a time"):
        make_manifest(committed_at=math.nan)


def test_a_strange_loss_does_not_prevent_a_commit(tmp_path):
    manifest = make_manifest(metrics={"loss": math.nan, "norm": math.inf}, guard={"x": [math.nan]})
    folder = folder_for(manifest, tmp_path)
    write_manifest(folder, manifest)
    found = read_manifest(folder)
    assert math.isnan(found.metrics["loss"])
    assert found.metrics["norm"] == math.inf


def test_a_commit_is_never_changed(tmp_path):
    folder = commit(tmp_path)
    write_manifest(folder, make_manifest())  # the same once more is harmless
    with pytest.raises(ManifestError, match="already committed"):
        write_manifest(folder, make_manifest(tokens=1))
    assert read_manifest(folder) == make_manifest()


def test_a_manifest_is_not_written_into_another_checkpoint(tmp_path):
    folder = folder_for(make_manifest(step=1), tmp_path)
    with pytest.raises(ManifestError, match="does not belong"):
        write_manifest(folder, make_manifest(step=2))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, stage):
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(*((os, "fsync") if stage == "fsync" else (Path, "replace")), refuse)
    with pytest.raises(StorageError, match="No space left"):
        write_atomically(path, b"new")
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("file", b"old")]


def test_a_commit_that_failed_after_the_rename_is_taken_back(tmp_path, monkeypatch):
    def refuse(_: Path) -> None:
        raise OSError(5, "Input/output error")

    manifest = make_manifest()
    folder = folder_for(manifest, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(storing, "sync_folder", refuse)
        with pytest.raises(StorageError, match="Input/output error"):
            write_manifest(folder, manifest)
    assert list(folder.iterdir()) == []


def test_committing_again_on_a_failing_disk_does_not_take_the_commit_back(tmp_path, monkeypatch):
    folder = commit(tmp_path)
    monkeypatch.setattr(module, "write_atomically", lambda *_: pytest.fail("wrote again"))
    write_manifest(folder, make_manifest())
    assert read_manifest(folder) == make_manifest()


def test_a_writer_killed_before_the_rename_has_not_committed(tmp_path, monkeypatch):
    def die(*_: Any) -> None:
        raise KeyboardInterrupt  # like SIGKILL in that no handler of ours runs

    manifest = make_manifest()
    folder = folder_for(manifest, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            write_manifest(folder, manifest)
    assert [entry.fault for entry in list_checkpoints(tmp_path)] == ["no manifest"]
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest


def failing_reads(monkeypatch, times: int) -> list[Path]:
    real, tries = storing.read_plain, []

    def read_plain(path: Path) -> bytes:
        if path.name == MANIFEST_NAME:
            tries.append(path)
            if len(tries) <= times:
                raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(storing, "read_plain", read_plain)
    return tries


def test_a_flaky_read_is_tried_again(tmp_path, monkeypatch):
    folder = commit(tmp_path)
    tries = failing_reads(monkeypatch, times=2)
    assert read_manifest(folder) == make_manifest()
    assert len(tries) == 3


def test_an_error_is_not_an_absence(tmp_path, monkeypatch):
    folder = commit(tmp_path)
    failing_reads(monkeypatch, times=1000)
    with pytest.raises(StorageError, match="Input/output error"):
        read_manifest(folder)
    [entry] = list_checkpoints(tmp_path)
    assert entry.committed  # so nobody takes this run for an empty one
    assert not entry.usable
    assert entry.unreadable
    assert "Input/output error" in str(entry.fault)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    commit(tmp_path)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        list_checkpoints(tmp_path)


def test_the_listing_is_newest_first_and_tells_usable_from_not(tmp_path):
    commit(tmp_path, step=100, generation=9)
    commit(tmp_path, step=200, generation=2)
    newest = commit(tmp_path, step=200, generation=10)
    folder_for(make_manifest(step=300), tmp_path)
    damaged = commit(tmp_path, step=250)
    (damaged / MANIFEST_NAME).write_bytes(b"{")
    (tmp_path / "checkpoints" / "notes.txt").write_text("a foreign file")
    (tmp_path / "checkpoints" / checkpoint_name(7, 7)).write_text("a file, not a folder")
    found = list_checkpoints(tmp_path)
    keys = [(entry.step, entry.generation) for entry in found]
    assert keys == [(300, 3), (250, 3), (200, 10), (200, 2), (100, 9)]
    assert [entry.usable for entry in found] == [False, False, True, True, True]
    assert [entry.committed for entry in found] == [False, True, True, True, True]
    assert usable(found)[0].folder == newest


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert list_checkpoints(tmp_path) == []
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_quarantined_checkpoint_is_listed_and_never_offered(tmp_path):
    folder = commit(tmp_path)
    findings = [{"path": "a", "fault": "checksum differs"}]
    write_quarantine(folder, "a bit flipped", time_s=1.0, findings=findings)
    write_quarantine(folder, "another reason", time_s=2.0)
    [entry] = list_checkpoints(tmp_path)
    assert entry.quarantined == "a bit flipped"
    assert entry.manifest == make_manifest()
    assert usable([entry]) == []
    note = json.loads((folder / QUARANTINE_NAME).read_text())
    assert note == {"time": 1.0, "reason": "a bit flipped", "findings": findings}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_quarantine_note_still_keeps_it_out(tmp_path, content):
    folder = commit(tmp_path)
    (folder / QUARANTINE_NAME).write_bytes(content)
    assert read_quarantine(folder) is not None
    assert usable(list_checkpoints(tmp_path)) == []


def test_manifests_are_compared_by_value():
    assert make_manifest() == make_manifest()
    assert replace(make_manifest(), step=1) != make_manifest()
    assert make_manifest().total_bytes == 30
