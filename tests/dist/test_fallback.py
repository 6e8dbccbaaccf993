"""Nothing is restored from a checkpoint that is not whole; the run goes on from the newest good one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk import add_checkpoint
from worlds import events, history, make_config, make_data, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import encode_manifest, read_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.verify import verify_files

pytestmark = pytest.mark.dist


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _shard(folder: Path) -> Path:
    return folder / max(read_manifest(folder).files, key=lambda entry: entry.bytes).path


def _later_schema(folder: Path) -> None:
    """A manifest of a later version, sealed as this one seals."""
    document = read_manifest(folder).to_json()
    (folder / MANIFEST_NAME).write_bytes(encode_manifest({**document, "schema": 99}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flip a shard": (lambda f: _flip(_shard(f)), "checksum differs"),
    "truncate a shard": (lambda f: _truncate(_shard(f)), "truncated"),
    "remove a shard": (lambda f: _shard(f).unlink(), "missing"),
    "flip the pickle": (lambda f: _flip(f / ".metadata"), "checksum differs"),
    "remove the manifest": (lambda f: (f / MANIFEST_NAME).unlink(), "no manifest"),
    "empty the manifest": (lambda f: (f / MANIFEST_NAME).write_bytes(b""), "empty"),
    "a manifest of a later schema": (_later_schema, "schema is 99, this version reads 1"),
    "half a manifest": (lambda f: _truncate(f / MANIFEST_NAME), "manifest"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_data(folder / "data", [16] * 12)
    run_world(train, 2, make_config(folder), 8)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(
    good: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    config = make_config(folder)
    newest = list_checkpoints(config.run_dir)[0]
    assert newest.step == 6
    spoil, word = DAMAGES[damage]
    spoil(newest.folder)
    result = run_world(train, 2, config)[0]
    assert result["started"] == 3
    restored = events(config, "restored")[-1]
    assert restored["source"] == "step-00000003-g1"
    assert newest.folder.name in restored["reason"]
    assert word in restored["reason"]
    # The second start must not take the damaged one either, and the history is whole.
    assert list(history(config)) == list(range(1, 13))
    assert run_world(train, 2, config)[0]["started"] == 12


def test_a_run_whose_checkpoints_are_all_bad_never_starts_from_zero(
    good: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    config = make_config(folder)
    for entry in list_checkpoints(config.run_dir):
        _flip(_shard(entry.folder))
    with pytest.raises(AssertionError, match="never starts from zero"):
        run_world(train, 2, config)
    assert max(history(config)) == 8, "a step was trained after all"


def test_files_of_equal_size_in_each_others_place_are_found(tmp_path: Path) -> None:
    """Every size is right, and every byte was written by the run."""
    folder = add_checkpoint(tmp_path, 10)
    first, second = folder / "__0_0.distcp", folder / "__1_0.distcp"
    assert first.stat().st_size == second.stat().st_size
    first.rename(folder / "third")
    second.rename(first)
    (folder / "third").rename(second)
    faults = verify_files(folder, read_manifest(folder))
    assert [(f.path, f.fault) for f in faults] == [
        ("__0_0.distcp", "checksum differs"),
        ("__1_0.distcp", "checksum differs"),
    ]


def test_a_shard_of_an_older_checkpoint_in_its_place_is_found(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    config = make_config(folder)
    newest, older, *_ = list_checkpoints(config.run_dir)
    place, other = _shard(newest.folder), _shard(older.folder)
    assert place.name == other.name
    assert place.stat().st_size == other.stat().st_size
    shutil.copyfile(other, place)
    assert run_world(train, 2, config)[0]["started"] == 3
    assert "checksum differs" in events(config, "quarantine")[0]["reason"]
    assert list(history(config)) == list(range(1, 13))


def test_a_file_that_nobody_committed_is_named_and_changes_nothing(
    good: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    config = make_config(folder)
    newest = list_checkpoints(config.run_dir)[0]
    shutil.copyfile(_shard(newest.folder), newest.folder / "__9_9.distcp")
    manifest = read_manifest(newest.folder)
    assert [f"{f.path} {f.fault}" for f in verify_files(newest.folder, manifest)] == [
        "__9_9.distcp not in the manifest"
    ]
    found = run_world(train, 2, config)[0]
    clean = run_world(train, 2, make_config(good))[0]
    assert (found["started"], found["at_start"]) == (6, clean["at_start"])
