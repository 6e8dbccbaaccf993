"""Disks that fail or fill up under a run: a save may fail, training goes on, and what was committed stays."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from worlds import events, history, make_config, make_data, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.config import PolicyConfig, RetentionConfig

pytestmark = pytest.mark.dist

EVERY_STEP = PolicyConfig(interval_steps=1)
KEEP_ALL = RetentionConfig(keep_newest=0)

# In staging and in every write of the background writer, on either rank, first and late in it.
AIMS = [
    ("save.stage@1", 0), ("save.stage@1", 1), ("save.staged@1", 0), ("save.staged@1", 1),
    ("save.written@1", 0), ("save.written@1", 1),
    *[(f"save.file@{nth}", rank) for nth in (1, 2, 9, 40) for rank in (0, 1)],
    ("save.file@1+", 1), ("commit.temporary@1", 0), ("commit.rename@1", 0), ("commit.renamed@1", 0),
    ("journal.line@1", 0), ("journal.sync@1", 0), ("steps.line@1", 0),
]  # fmt: skip
BORNE = ("journal", "steps")  # the line waits for the next one: the save is as good as any


class Aims:
    """Puts one fault after the other in; after a failed save one is left out, and then one must be good."""

    def __call__(self, session: Any, step: int) -> None:
        from ray_ckpt.fault_points import arm

        session._saving.wait(60)
        turn, rest = divmod(step, 3)
        aim, rank = AIMS[turn] if turn < len(AIMS) else ("", -1)
        action = ("eio", "enospc")[turn % 2]
        arm(f"{aim}={action}" if rest == 1 and aim and rank == dist.get_rank() else "")


def test_an_error_at_any_write_of_a_save_is_a_failed_save_and_no_more(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    steps = 3 * len(AIMS) + 3
    config = make_config(tmp_path, steps=steps, policy=EVERY_STEP, retention=KEEP_ALL)
    run_world(train, 2, config, None, False, Aims())
    failed = {e["step"]: e["error"] for e in events(config, "save_failed")}
    for turn, (aim, _) in enumerate(AIMS):
        if not aim.startswith(BORNE):
            word = ("Input/output error", "No space left on device")[turn % 2]
            assert word in failed.get(3 * turn + 2, "no error"), (aim, failed)
    assert len(failed) == sum(1 for aim, _ in AIMS if not aim.startswith(BORNE))
    assert list(history(config)) == list(range(1, steps + 1)), "a step or its line is missing"
    entries = list_checkpoints(config.run_dir)
    assert {e.step for e in entries} & failed.keys() == set(), "a failed save left a folder"
    for entry in entries:
        assert verify_files(entry.folder, read_manifest(entry.folder)) == []
    # Every save that was not struck is there, and the journal knows each of them, once.
    steps_told = [e["step"] for e in events(config, "commit")]
    assert sorted(steps_told) == steps_told == sorted(e.step for e in entries)
    assert run_world(train, 2, config)[0]["started"] == steps


def _mount_small(place: Path, size: str, remount: bool = False) -> bool:
    """A disk of so many bytes that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, remount_flag = 0x20000, (1 << 18) | (1 << 14), 1 << 5
    apart = remount or not (
        libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, private, None)
    )
    if not apart:
        return False
    flags = remount_flag if remount else 0
    options = f"size={size}".encode()
    return not libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", flags, options)


def _fill_the_disk(rank: int, world: int, config: Any) -> dict[str, Any]:
    """A run on a disk that is too small for it, and the same run when the disk has grown."""
    place = Path(config.storage)
    if not _mount_small(place, "1400k"):
        return {"mounted": False}
    found: dict[str, Any] = {"mounted": True, "refused": ""}
    try:
        train(rank, world, config)
    except Exception as error:  # noqa: BLE001 - told to the test
        found["refused"] = str(error)
    entries = usable(list_checkpoints(config.run_dir))
    found["bad"] = [e.step for e in entries if verify_files(e.folder, read_manifest(e.folder))]
    found["committed"] = [entry.step for entry in entries]
    found["left"] = len(list_checkpoints(config.run_dir)) - len(entries)
    found["errors"] = [e["error"] for e in events(config, "save_failed")]
    found["free"] = os.statvfs(place).f_bavail
    assert _mount_small(place, "64m", remount=True)
    found["again"] = train(rank, world, config)["started"]
    found["end"] = usable(list_checkpoints(config.run_dir))[0].step
    found["history"] = list(history(config))
    found["finished"] = len(events(config, "finished"))
    return found


def test_a_disk_that_is_really_full_fails_saves_and_nothing_else(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    place = tmp_path / "small"
    place.mkdir()
    config = replace(
        make_config(tmp_path, steps=20, policy=EVERY_STEP, retention=KEEP_ALL), storage=str(place)
    )
    found = run_world(_fill_the_disk, 1, config)[0]
    if not found["mounted"]:
        pytest.skip("a disk cannot be mounted here; the same errors are put in by the test above")
    assert found["errors"], f"the disk was not full: {found}"
    assert any("No space left on device" in error for error in found["errors"])
    assert "Mend the storage and start the run again" in found["refused"]
    assert found["committed"], "there was room for a few"
    assert found["bad"] == []
    assert found["left"] == 0, "what a failed save left takes room from the next"
    assert found["again"] == found["committed"][0]
    assert (found["end"], found["finished"]) == (20, 1)
    assert set(range(found["again"] + 1, 21)) <= set(found["history"])
