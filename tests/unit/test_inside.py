"""Nothing leaves the folder: no path and no link makes a checkpoint read or write anything else."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from making import manifest_of, tracker_of
from torch.distributed.checkpoint.api import CheckpointException

from ray_ckpt.checkpoint.digest import checkpoint_digest
from ray_ckpt.checkpoint.export import export_weights
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import (
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from ray_ckpt.checkpoint.mapped import MappedReader, PlainReader
from ray_ckpt.checkpoint.names import (
    MANIFEST_NAME,
    PINS_NAME,
    QUARANTINE_NAME,
    RECORD_NAMES,
    checkpoint_name,
)
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.checkpoint.verify import Fault, hash_file, verify_files
from ray_ckpt.checkpoint.writer import ChecksumWriter
from ray_ckpt.errors import ConfigError, ManifestError, RayCkptError, RestoreError
from ray_ckpt.state.codec import encode
from ray_ckpt.tiers.collect import LEAVING_NAME, Gate, collect, mend, remove_folder
from ray_ckpt.tiers.pins import DAMAGED, pin, read_pins, unpin
from ray_ckpt.tiers.retention import Verdict
from ray_ckpt.tiers.stock import take_stock
from ray_ckpt.tracker.shelf import discard

DIGEST = "0123456789abcdef" * 2
_watched: list[tuple[Path, list[str]]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """Notes every file that is opened, and every name that is changed, below a watched folder."""
    if not _watched or event not in _EVENTS or not isinstance(args[0], str | bytes | os.PathLike):
        return
    path = Path(os.fsdecode(args[0]))
    # The last part of these is not followed, only the way to it.
    keeps_link = event != "open" or bool(args[2] & os.O_NOFOLLOW)
    real = path.parent.resolve() / path.name if keeps_link else path.resolve()
    for folder, seen in _watched:
        if real.is_relative_to(folder):
            seen.append(f"{event} {path}")


_EVENTS = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}
sys.addaudithook(_hook)


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Asserts that nothing below a folder is opened or changed."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    seen: list[str] = []
    _watched.append((folder.resolve(), seen))
    try:
        yield
    finally:
        _watched.pop()
    assert seen == []
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def make_manifest(files: tuple[FileEntry, ...], step: int = 12) -> Manifest:
    return manifest_of(
        run="demo",
        step=step,
        files=files,
    )


def real_checkpoint(run: Path) -> Path:
    """A small one that DCP can read, with a file in a subfolder."""
    folder = run / "checkpoints" / checkpoint_name(12, 1)
    folder.mkdir(parents=True)
    writer = ChecksumWriter(folder)
    save_tensors(writer)
    (folder / "more").mkdir()
    (folder / "more" / "file").write_bytes(b"content")
    more = FileEntry("more/file", *hash_file(folder / "more" / "file"))
    write_manifest(folder, make_manifest((*writer.entries, more)))
    return folder


def save_tensors(writer: ChecksumWriter) -> None:
    state = {"model": {"weight": torch.ones(3)}, "scalars": encode({"model": {}})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, no_dist=True)


# ---- paths ----------------------------------------------------------------------------------------

PIECES = [
    *("..", ".", "", "a", "A", "b", "...", "..a", "etc", "C:", "~", "$HOME", "%2e%2e"),
    *("a\\..\\..\\b", "\\", "a\0b", "\0", "\n", "\x7f", "\u202e"),
    *(
        "\u2024\u2024",
        "\u2025",
        "\uff0e\uff0e",
        "\uff0e.",
        "\uff0f",
        "..\uff0fx",
        "\uff3c",
        "\ufe68",
    ),
    *("\u00e9", "e\u0301", "\u212a", "K", "k", "\u00df", "ss", "\ud800", "x" * 256, "\u00e9" * 128),
]
ALIKE = ["a", "A", "\u00e9", "e\u0301", "\u00c9", "\u212a", "K", "k", "\u00df", "ss", "a/K", "A/k"]
hard_paths = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), min_size=1, max_size=4).map(
    "/".join
)


def readings(path: str) -> Iterator[str]:
    """What a file system could take a path for."""
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        for text in (path, path.casefold()):
            folded = unicodedata.normalize(form, text)
            yield folded
            yield folded.replace("\\", "/")


@settings(max_examples=300, deadline=None)
@given(hard_paths)
def test_a_path_of_a_manifest_is_inside_however_a_file_system_reads_it(path):
    try:
        FileEntry(path, 1, DIGEST)
    except ValueError:
        return
    for reading in readings(path):
        assert os.path.normpath(f"/root/{reading}") == f"/root/{reading}"
    # It can be given to the system at all.
    assert not (Path("/nonexistent") / path).exists()


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../x",
            "a/../../x",
            "/etc/passwd",
            "//x",
            "a//b",
            "a/",
            ".",
            "..",
            "",
            "a\\..\\x",
            "..\\x",
        ),
        *("a\0b", "a\nb", "\uff0e\uff0e/x", "\u2025/x", "a/\u2024\u2024/x", "..\uff0fx", "\uff3cx"),
        *("\ud800", "x" * 256, "committed.json", "Committed.JSON", "quarantined.json"),
    ],
)
def test_hard_paths_are_refused(path):
    with pytest.raises(ValueError, match="file path"):
        FileEntry(path, 1, DIGEST)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ALIKE) | hard_paths, min_size=1, max_size=6))
def test_no_two_paths_of_a_manifest_can_be_one_file(paths):
    files = []
    for path in paths:
        try:
            files.append(FileEntry(path, 1, DIGEST))
        except ValueError:
            continue
    try:
        manifest = make_manifest(tuple(files))
    except ValueError:
        return
    for reading in zip(*(list(readings(entry.path)) for entry in manifest.files), strict=True):
        assert len(set(reading)) == len(files)


@pytest.mark.parametrize("pair", ["aA", ("\u00e9", "e\u0301"), ("\u212a", "k"), ("\u00df", "ss")])
def test_names_that_differ_in_case_or_composition_alone_are_refused(pair):
    with pytest.raises(ValueError, match="can be one file"):
        make_manifest(tuple(FileEntry(f"{name}/x", 1, DIGEST) for name in pair))


@settings(max_examples=60, deadline=None)
@given(path=hard_paths)
def test_a_sealed_manifest_with_any_path_touches_nothing_outside(path):
    """Whoever can write to the storage writes a manifest that fits: it is refused, or stays inside."""
    with tempfile.TemporaryDirectory() as place:
        run, outside = Path(place) / "in" / "demo", Path(place) / "outside"
        outside.mkdir()
        (outside / "x").write_bytes(b"x")
        folder = run / "checkpoints" / checkpoint_name(12, 1)
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"x")
        document = make_manifest((FileEntry(".metadata", 1, DIGEST),)).to_json()
        for bad in (path, f"{path}/../../../../../outside/x", str(outside / "x")):
            document["files"] = [{"path": bad, "bytes": 1, "checksum": hash_file(outside / "x")[1]}]
            try:
                (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
            except UnicodeEncodeError:
                continue
            with untouched(outside):
                use_all(run, Path(place) / "out")


def use_all(run: Path, out: Path) -> None:
    """Everything that reads, marks or removes a checkpoint."""
    for entry in list_checkpoints(run):
        if entry.manifest is not None:
            verify_files(entry.folder, entry.manifest)
            verify_files(entry.folder, entry.manifest, only=entry.manifest.files)
            with suppress(RayCkptError):
                checkpoint_digest(entry.folder, entry.manifest)
        with suppress(RayCkptError):
            export_weights(entry, out)
    shutil.rmtree(out, ignore_errors=True)
    core = tracker_of(run)
    try:
        attempt = core.begin_attempt(1, [])
        while attempt.plan is not None:
            core.reject(attempt.generation, attempt.plan.name, [Fault("x", "missing")])
    except RestoreError:
        pass
    for entry in list_checkpoints(run):
        with suppress(RayCkptError):
            write_quarantine(entry.folder, "for a test", time_s=1.0)
        discard(entry.folder)


# ---- links ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [".metadata", "__0_0.distcp", "more", "more/file", MANIFEST_NAME, QUARANTINE_NAME, ""]
    ),
    st.booleans(),
)
def test_a_link_to_the_very_same_bytes_outside_is_never_followed(name, relative):
    """Nothing but the link itself would tell: content, sizes and checksums are right."""
    with tempfile.TemporaryDirectory() as text:
        place = Path(text).resolve()
        run, outside = place / "in" / "demo", place / "outside"
        outside.mkdir()
        folder = real_checkpoint(run)
        victim, target = (folder / name if name else folder), outside / "target"
        if name == QUARANTINE_NAME:
            target.write_bytes(b'{"reason": "x"}')
        else:
            victim.rename(target)
        to = Path(os.path.relpath(target, victim.parent)) if relative else target
        victim.symlink_to(to)
        with untouched(outside):
            use_all(run, place / "out")
            for entry in list_checkpoints(run):
                assert not entry.usable


def test_verify_refuses_links_also_in_a_share(tmp_path):
    """Ranks verify their shares, and look for no strangers: a linked folder must not pass there."""
    folder = real_checkpoint(tmp_path / "demo")
    manifest = read_manifest(folder)
    (folder / "more").rename(tmp_path / "more")
    (folder / "more").symlink_to(tmp_path / "more")
    share = [entry for entry in manifest.files if entry.path == "more/file"]
    assert verify_files(folder, manifest, only=share) == [Fault("more/file", "behind a link")]


def test_a_linked_checkpoint_is_neither_read_nor_marked_nor_removed(tmp_path):
    folder = real_checkpoint(tmp_path / "other")
    shelf = tmp_path / "demo" / "checkpoints"
    shelf.mkdir(parents=True)
    (shelf / folder.name).symlink_to(folder)
    with untouched(folder):
        entry = list_checkpoints(tmp_path / "demo")[0]
        assert (entry.usable, entry.committed, entry.unreadable) == (False, True, True)
        with pytest.raises(RestoreError, match="is a link"):
            tracker_of(tmp_path / "demo").begin_attempt(1, [])
        with pytest.raises(ManifestError, match="is a link"):
            write_manifest(shelf / folder.name, make_manifest((FileEntry("a", 1, DIGEST),)))
        discard(shelf / folder.name)
    assert (shelf / folder.name).is_symlink()


def test_housekeeping_goes_through_no_link(tmp_path):
    """Neither to what a checkpoint's folder links to, nor to what lies in one that is deleted."""
    outside = real_checkpoint(tmp_path / "other")
    (outside / LEAVING_NAME).write_bytes(b"{}")
    run = tmp_path / "demo"
    folder = real_checkpoint(run)
    (folder / "to_folder").symlink_to(outside / "more")
    (folder / "to_file").symlink_to(outside / "more" / "file")
    linked = run / "checkpoints" / checkpoint_name(11, 1)
    linked.symlink_to(outside)
    gone = Verdict(name=folder.name, keep=False, reasons=("for a test",))
    behind = Verdict(name=linked.name, keep=False, reasons=("for a test",))
    with untouched(outside):
        mend(run)
        assert take_stock(run, verified=set()).pins[linked.name] == ()
        for act in (lambda: pin(linked, "x", author="y", time_s=1.0), lambda: unpin(linked)):
            with pytest.raises(ConfigError, match="is a link"):
                act()
        outcomes = collect(
            run, [gone, behind], generation=1, newest_generation=lambda: 1, gate=Gate()
        )
        # Once its manifest is gone somebody may put a link in its place.
        assert remove_folder(linked)
    assert [(outcome.name, outcome.kept) for outcome in outcomes] == [
        (linked.name, True),
        (folder.name, False),
    ]
    assert not folder.exists()
    assert linked.is_symlink()


@pytest.mark.parametrize("target", ["file", "nowhere"])
def test_pins_that_are_a_link_are_a_pin_and_are_not_read(tmp_path, target):
    folder = real_checkpoint(tmp_path / "demo")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"[]")
    (folder / PINS_NAME).symlink_to(outside / target)
    with untouched(outside):
        assert [found.reason for found in read_pins(folder)] == [DAMAGED]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("reader_of", [PlainReader, MappedReader])
def test_a_file_that_became_a_link_after_it_was_verified_is_not_read(tmp_path, name, reader_of):
    folder = real_checkpoint(tmp_path / "demo")
    outside = tmp_path / "outside"
    outside.mkdir()

    def read() -> None:
        target = {"model": {"weight": torch.zeros(3)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(target, storage_reader=reader_of(folder), no_dist=True)
        assert target["model"]["weight"].tolist() == [1, 1, 1]

    read()
    (folder / name).rename(outside / name)
    (folder / name).symlink_to(outside / name)
    with untouched(outside), pytest.raises((OSError, CheckpointException), match="no regular file"):
        read()


@pytest.mark.parametrize("name", RECORD_NAMES)
@pytest.mark.parametrize("change", [str, str.lower, str.title])
def test_no_file_has_the_name_of_a_record_in_any_spelling(name, change):
    with pytest.raises(ValueError, match="reserved"):
        FileEntry(change(name), 1, DIGEST)


def test_a_pipe_in_place_of_a_manifest_is_a_fault_and_never_hangs(tmp_path):
    folder = real_checkpoint(tmp_path / "demo")
    for name in (MANIFEST_NAME, QUARANTINE_NAME):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    entry = list_checkpoints(tmp_path / "demo")[0]
    assert entry.fault == "not a regular file"
    assert entry.quarantined is not None


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp", ""])
def test_a_save_writes_through_no_link(tmp_path, name):
    outside, folder = tmp_path / "outside", tmp_path / "checkpoints" / checkpoint_name(1, 1)
    outside.mkdir()
    (outside / "mine").write_bytes(b"mine")
    if name:
        folder.mkdir(parents=True)
        (folder / name).symlink_to(outside / "mine")
    else:
        folder.parent.mkdir(parents=True)
        folder.symlink_to(outside)
    writer = ChecksumWriter(folder)
    with untouched(outside):
        with pytest.raises((CheckpointException, OSError)):
            save_tensors(writer)
    assert "a link is in the place" in str(writer.problem)


# ---- what DCP reads -------------------------------------------------------------------------------


@pytest.mark.parametrize("stray", ["../../../outside/file", "unverified.distcp", "/outside/file"])
def test_metadata_that_speaks_of_a_file_that_nobody_verified_is_refused(tmp_path, stray):
    run, outside = tmp_path / "demo", tmp_path / "outside"
    folder = real_checkpoint(run)
    outside.mkdir()
    shutil.copy(folder / "__0_0.distcp", outside / "file")
    shutil.copy(folder / "__0_0.distcp", tmp_path / "unverified.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = stray.replace("/outside", str(outside)) if stray[0] == "/" else stray
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = read_manifest(folder)
    document = manifest.to_json()
    for entry in document["files"]:
        if entry["path"] == ".metadata":
            entry["bytes"], entry["checksum"] = hash_file(folder / ".metadata")
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    with untouched(outside):
        with pytest.raises(RestoreError, match="was not verified"):
            checkpoint_digest(folder, read_manifest(folder))
        with pytest.raises(RestoreError, match="was not verified"):
            export_weights(list_checkpoints(run)[0], tmp_path / "out")


@pytest.mark.parametrize("name", ["../../outside", "/tmp", "..", "", "step-1-g1", "a/b"])
def test_a_name_that_a_worker_tells_never_leads_the_tracker_elsewhere(tmp_path, name):
    core = tracker_of(tmp_path / "demo")
    generation = core.begin_attempt(1, []).generation
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RestoreError, match="no checkpoint's name"):
        core.reject(generation, name, [Fault("x", "missing")])
    assert sorted(tmp_path.rglob("*")) == before
