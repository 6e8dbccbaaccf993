"""A run under a key: it resumes with the key, and is refused unchanged with another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from worlds import events, make_config, make_data, run_world, train

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.signature import KEY_VARIABLE
from ray_ckpt.checkpoint.verify import verify_files

pytestmark = pytest.mark.dist

KEY, OTHER = "the key of this run", "a key of another run"


def _train(rank: int, world: int, config: Any, key: str, stop_after: int | None) -> dict[str, Any]:
    """Only rank 0, where the tracker is, has the key."""
    if rank == 0:
        os.environ[KEY_VARIABLE] = key
    return train(rank, world, config, stop_after)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_signed_run_resumes_with_its_key_alone(tmp_path: Path, monkeypatch, parallel) -> None:
    make_data(tmp_path / "data", [16] * 12)
    config = make_config(tmp_path, parallel=parallel)
    run_world(_train, 2, config, KEY, 7)
    before = content(config.run_dir)
    with pytest.raises(AssertionError, match="RAY_CKPT_KEY is probably wrong"):
        run_world(_train, 2, config, OTHER, None)
    assert content(config.run_dir) == before
    assert run_world(_train, 3, config, f"{OTHER},{KEY}", None)[0]["started"] == 6
    assert not events(config, "quarantine")
    monkeypatch.setattr(signature, "_installed", signature._UNSET)
    monkeypatch.setenv(KEY_VARIABLE, f"{OTHER},{KEY}")
    entries = list_checkpoints(config.run_dir)
    assert [entry.step for entry in entries if entry.usable] == [12, 9, 6, 3]
    for entry in entries:
        assert entry.manifest is not None
        assert all(file.sha256 for file in entry.manifest.files)
        assert verify_files(entry.folder, entry.manifest) == []
        assert b"manifest_signature" in (entry.folder / MANIFEST_NAME).read_bytes()
    for path, data in content(config.run_dir).items():
        assert KEY.encode() not in data, path
