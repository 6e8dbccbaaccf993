"""Any change of any byte of a committed checkpoint is found before it is used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from making import manifest_of

from ray_ckpt.checkpoint import verify as module
from ray_ckpt.checkpoint.manifest import FileEntry, read_manifest, write_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.checkpoint.verify import Fault, hash_file, verify_files
from ray_ckpt.errors import ManifestError

FILES = {".metadata": b"meta" * 5, "__0_0.distcp": bytes(range(256)), "rng/rank-0.json": b"{}"}


def make_checkpoint(run: Path, files: dict[str, bytes] | None = None) -> Path:
    folder = run / "checkpoints" / "step-00000012-g3"
    entries = []
    for name, content in (files or FILES).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        entries.append(FileEntry(name, *hash_file(path)))
    manifest = manifest_of(
        run="demo",
        step=12,
        sample_offset=96,
        tokens=96 * 64,
        world_size=2,
        generation=3,
        files=tuple(entries),
    )
    write_manifest(folder, manifest)
    return folder


def check(folder: Path) -> list[Fault]:
    """What a restore does: first the manifest, then the bytes."""
    try:
        return verify_files(folder, read_manifest(folder))
    except ManifestError as error:
        return [Fault(error.path.name, error.fault)]


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path)


@given(st.binary(max_size=300), st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_the_checksum_does_not_depend_on_the_chunks(content, chunk_bytes):
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        expected = (len(content), xxhash.xxh3_128_hexdigest(content))
        assert hash_file(Path(file.name), chunk_bytes) == expected


def test_a_chunk_size_that_would_read_nothing_is_refused(folder):
    with pytest.raises(ValueError, match="at least 1"):
        hash_file(folder / ".metadata", 0)


def test_an_untouched_checkpoint_has_no_fault(folder):
    assert check(folder) == []


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_flip_truncation_growth_or_removal_of_any_file_is_found(data):
    with tempfile.TemporaryDirectory() as run:
        folder = make_checkpoint(Path(run))
        victim = data.draw(st.sampled_from(all_files(folder)))
        content = victim.read_bytes()
        action = data.draw(st.sampled_from(["flip", "truncate", "grow", "remove", "empty"]))
        if action == "flip":
            position = data.draw(st.integers(0, len(content) - 1))
            bad = bytearray(content)
            bad[position] ^= data.draw(st.integers(1, 255))
            victim.write_bytes(bad)
        elif action == "truncate":
            victim.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        elif action == "grow":
            victim.write_bytes(content + data.draw(st.binary(min_size=1, max_size=4)))
        elif action == "empty":
            victim.write_bytes(b"")
        else:
            victim.unlink()
        faults = check(folder)
    assert [fault.path for fault in faults] == [victim.relative_to(folder).as_posix()]


def test_faults_say_in_words_what_is_wrong(folder):
    (folder / ".metadata").write_bytes(b"meta" * 2)
    (folder / "__0_0.distcp").write_bytes(bytes(255) + b"\1")
    (folder / "rng/rank-0.json").unlink()
    (folder / "foreign.txt").write_text("x")
    assert check(folder) == [
        Fault(".metadata", "truncated: 8 of 20 bytes"),
        Fault("__0_0.distcp", "checksum differs"),
        Fault("foreign.txt", "not in the manifest"),
        Fault("rng/rank-0.json", "missing"),
    ]


def test_a_longer_file_is_not_called_truncated(folder):
    (folder / ".metadata").write_bytes(b"meta" * 6)
    assert check(folder) == [Fault(".metadata", "too long: 24 of 20 bytes")]


def test_the_size_is_looked_at_before_any_byte(folder, monkeypatch):
    monkeypatch.setattr(module, "hash_file", lambda path: pytest.fail(f"read {path}"))
    for path in all_files(folder):
        if path.name != MANIFEST_NAME:
            path.write_bytes(path.read_bytes() + b"x")
    assert len(check(folder)) == len(FILES)


def test_own_records_and_a_killed_writers_temporaries_are_no_strangers(folder):
    write_quarantine(folder, "for a test", time_s=1.0)
    (folder / f".{MANIFEST_NAME}.123.abcd").write_bytes(b"{")
    assert check(folder) == []


def test_a_stranger_in_a_subfolder_is_found(folder):
    (folder / "rng/rank-1.json").write_text("{}")
    assert check(folder) == [Fault("rng/rank-1.json", "not in the manifest")]


def test_links_are_faults_even_to_the_same_bytes(folder, tmp_path):
    for name in (".metadata", "rng"):
        (folder / name).rename(tmp_path / name.strip("."))
        (folder / name).symlink_to(tmp_path / name.strip("."))
    assert check(folder) == [
        Fault(".metadata", "not a regular file"),
        Fault("rng", "not in the manifest"),
        Fault("rng/rank-0.json", "behind a link"),
    ]


def test_a_folder_or_a_pipe_in_place_of_a_file_is_a_fault_and_never_hangs(folder):
    (folder / ".metadata").unlink()
    (folder / ".metadata").mkdir()
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    assert {fault.fault for fault in check(folder)} == {"not a regular file"}


def test_a_file_in_place_of_a_subfolder_is_a_fault(folder):
    (folder / "rng/rank-0.json").unlink()
    (folder / "rng").rmdir()
    (folder / "rng").write_text("")
    assert check(folder) == [
        Fault("rng", "not in the manifest"),
        Fault("rng/rank-0.json", "missing"),
    ]


def test_a_read_error_is_told_from_a_missing_file(folder, monkeypatch):
    def refuse(_: Path) -> tuple[int, str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "hash_file", refuse)
    faults = check(folder)
    assert {fault.fault for fault in faults} == {"unreadable: Input/output error"}
    assert all(fault.unreadable for fault in faults)
    assert not Fault("a", "missing").unreadable


def test_a_rank_can_check_its_share_alone(folder):
    manifest = read_manifest(folder)
    (folder / ".metadata").unlink()
    (folder / "foreign.txt").write_text("x")
    others = [entry for entry in manifest.files if entry.path != ".metadata"]
    assert verify_files(folder, manifest, others) == []
    assert verify_files(folder, manifest, manifest.files[:1]) == [Fault(".metadata", "missing")]
    assert verify_files(folder, manifest, []) == []


def test_a_whole_missing_folder_is_every_file_missing(folder, tmp_path):
    manifest = read_manifest(folder)
    faults = verify_files(tmp_path / "gone", manifest)
    assert {fault.path for fault in faults} == set(FILES)
    assert {fault.fault for fault in faults} == {"missing"}
