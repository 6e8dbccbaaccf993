"""A checkpoint that one rank cannot get whole changes nothing on any of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from making import manifest_of
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from worlds import run_world

from ray_ckpt.checkpoint.digest import state_digest
from ray_ckpt.checkpoint.manifest import FileEntry, Manifest
from ray_ckpt.checkpoint.restore import NotBroughtError, load, with_rng
from ray_ckpt.checkpoint.verify import hash_file
from ray_ckpt.checkpoint.writer import ChecksumWriter
from ray_ckpt.state.train_state import TrainState

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


def _state(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(64, 64)
    return TrainState(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )


def _manifest(folder: Path) -> Manifest:
    files = tuple(
        FileEntry(path.name, *hash_file(path))
        for path in sorted(folder.iterdir())
        if path.is_file()
    )
    return manifest_of(run="demo", step=1, world_size=2, files=files)


def _one_rank_lacks(rank: int, world: int, folder: Path, fails_at: int) -> tuple[str, bool, int]:
    """What is told, whether anything changed, and how often files were asked for."""
    dcp_save(with_rng(_state(1).state_dict(), rank, CPU), storage_writer=ChecksumWriter(folder))
    dist.barrier()
    state, calls = _state(2), 0
    before = state_digest(state)

    def bring(paths: Collection[str]) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == fails_at:
            raise NotBroughtError("no copy of it is left")

    text = ""
    try:
        load(state, folder, _manifest(folder), dist.group.WORLD, CPU, bring=bring)
    except NotBroughtError as error:
        text = str(error)
    return text, state_digest(state) == before, calls


def test_a_file_that_one_rank_cannot_get_leaves_the_state_of_all_as_it_was(tmp_path: Path) -> None:
    whole: Any = run_world(_one_rank_lacks, 2, tmp_path / "whole", 0)
    assert [(text, same) for text, same, _ in whole] == [("", False)] * 2
    calls = whole[0][2]
    assert calls > 1
    for fails_at in range(1, calls + 1):
        found: Any = run_world(_one_rank_lacks, 2, tmp_path / str(fails_at), fails_at)
        assert found == [("no copy of it is left", True, fails_at)] * 2
