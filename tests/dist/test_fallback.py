"""Nothing is restored from a checkpoint that is not whole; the run goes on from the newest good one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import events, history, make_config, make_data, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME

pytestmark = pytest.mark.dist


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _shard(folder: Path) -> Path:
    return folder / max(read_manifest(folder).files, key=lambda entry: entry.bytes).path


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flip a shard": (lambda f: _flip(_shard(f)), "checksum differs"),
    "truncate a shard": (lambda f: _truncate(_shard(f)), "truncated"),
    "remove a shard": (lambda f: _shard(f).unlink(), "missing"),
    "flip the pickle": (lambda f: _flip(f / ".metadata"), "checksum differs"),
    "remove the manifest": (lambda f: (f / MANIFEST_NAME).unlink(), "no manifest"),
    "empty the manifest": (lambda f: (f / MANIFEST_NAME).write_bytes(b""), "empty"),
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
