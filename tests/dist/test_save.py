"""One save: what is in it, and what happens when it goes wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from worlds import events, history, make_config, make_data, open_session, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.config import PolicyConfig

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", [16] * 12)
    return tmp_path


def _save_then_mutate(rank: int, world: int, config: Any) -> dict[str, Any]:
    session, state, model = open_session(rank, config)
    session.restore(state)
    state.progress.step = 5
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    session._saving.save()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    session._saving.wait(60)
    return before


def test_saved_values_are_those_of_the_save_step(folder: Path) -> None:
    """Tensors on the CPU are copied too (pytorch#144657), and plain DCP can read the result."""
    config = make_config(folder)
    before = run_world(_save_then_mutate, 2, config)[0]
    checkpoint = config.run_dir / CHECKPOINTS_DIR / "step-00000005-g1"
    names = {name.removeprefix("module."): value for name, value in before.items()}
    target = {f"model.{name}": torch.full_like(value, 7.0) for name, value in names.items()}
    dcp.load(target, checkpoint_id=checkpoint, no_dist=True)
    for name, value in names.items():
        assert torch.equal(target[f"model.{name}"], value), name


@pytest.mark.parametrize("overlap", [False, True])
def test_every_file_of_a_commit_is_in_its_manifest(folder: Path, overlap: bool) -> None:
    config = make_config(folder, policy=PolicyConfig(interval_steps=1 if overlap else 3))
    run_world(train, 2, config, None, False, None, overlap)
    entries = usable(list_checkpoints(config.run_dir))
    steps = [entry.step for entry in entries]
    if (
        overlap
    ):  # a save that comes too soon waits for the one in flight; the last is never left out
        waited = [s for s, line in history(config).items() if line["save_waits"]]
        assert steps[0] == 12
        assert waited
    else:
        assert steps == [12, 9, 6, 3]
    for entry in entries:
        assert verify_files(entry.folder, read_manifest(entry.folder)) == []


class _FullDisk:
    """Makes the writes of one rank fail, at given steps, as a full disk does."""

    def __init__(self, bad_rank: int, bad_steps: set[int]) -> None:
        self.bad_rank, self.bad_steps = bad_rank, bad_steps

    def __call__(self, session: Any, step: int) -> None:
        from ray_ckpt.checkpoint import writer

        def write(stream: Any, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if not hasattr(self, "good"):
            self.good = writer._HashingStream.write
        bad = dist.get_rank() == self.bad_rank and step + 1 in self.bad_steps
        writer._HashingStream.write = write if bad else self.good  # type: ignore[method-assign]
        session._saving.wait(60)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_a_failed_save_and_no_more(folder: Path, bad_rank: int) -> None:
    config = make_config(folder)
    run_world(train, 2, config, None, False, _FullDisk(bad_rank, {6, 7, 8}))
    failed = events(config, "save_failed")
    assert failed, "the fault was not injected"
    assert all("No space left" in event["error"] for event in failed)
    assert list(history(config)) == list(range(1, 13))
    entries = list_checkpoints(config.run_dir)
    assert usable(entries)[0].step == 12
    assert len(entries) == len(usable(entries)), "a failed save left a folder behind"
    assert 3 in [e.step for e in entries], "an earlier checkpoint was touched"


class _NoCopy:
    """Makes the staging copy of one rank fail, once, after the others may have begun theirs."""

    def __init__(self, bad_rank: int, bad_step: int, late: bool) -> None:
        self.bad_rank, self.bad_step, self.late = bad_rank, bad_step, late

    def __call__(self, session: Any, step: int) -> None:
        from ray_ckpt.checkpoint.staging import StagedCopy

        def fail(*_: Any) -> Any:
            raise RuntimeError("out of memory")

        if dist.get_rank() != self.bad_rank:
            return
        session._saving.wait(60)
        name, owner = (
            ("finish", StagedCopy) if self.late else ("begin", session._saving._saver._stager)
        )
        if step + 1 == self.bad_step:
            self.good = getattr(owner, name)
            setattr(owner, name, fail)
        elif step == self.bad_step:
            setattr(owner, name, self.good)


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_fails_on_one_rank_is_a_failed_save_and_no_wait(
    folder: Path, late: bool
) -> None:
    config = make_config(folder)
    run_world(train, 3, config, None, False, _NoCopy(1, 6, late))
    failed = events(config, "save_failed")
    assert [event["step"] for event in failed] == [6]
    assert "out of memory" in failed[0]["error"]
    steps = [entry.step for entry in usable(list_checkpoints(config.run_dir))]
    assert steps[0] == 12
    assert steps[-1] == 3


def _more_than_there_is(rank: int, world: int, config: Any) -> str:
    from ray_ckpt.checkpoint import memory
    from ray_ckpt.errors import MemoryShortError

    if rank == 1:  # one node in trouble stops all, or the others would wait for it
        memory.available_bytes = lambda: 1000  # type: ignore[assignment]
    session, state, _ = open_session(rank, config)
    with pytest.raises(MemoryShortError) as refused:
        session.restore(state)
    return str(refused.value)


def test_a_node_without_memory_for_saving_is_refused_on_all_ranks(folder: Path) -> None:
    messages = run_world(_more_than_there_is, 2, make_config(folder))
    assert len(set(messages)) == 1
    assert "saving takes" in messages[0]


class _Late:
    """State that one rank alone makes, in its first step: as an optimizer does where other shards are empty."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = dict(state)


def _train_with_late_state(rank: int, world: int, config: Any) -> int:
    session, state, model = open_session(rank, config)
    late = _Late(rank)
    state.register("late", late, per_rank=True)
    session.restore(state)
    for batch in session.batches():
        for micro in batch:
            batch.backward(micro, model(micro.tokens[:, :-1]).square().mean())
        if rank == 1:
            late.tensors = {"made": torch.ones(1000)}
        state.optimizer.step()
        session.step_end(lr=0.1)
        session._saving.wait(60)
    session.close()
    return int(session._saving._prepared_bytes)


def test_state_that_one_rank_makes_in_its_first_step_holds_up_nobody(folder: Path) -> None:
    config = make_config(folder, steps=3, workers="2")
    first, second = run_world(_train_with_late_state, 2, config)
    assert second >= first + 4000, "its buffers were not made"
    assert [entry.step for entry in usable(list_checkpoints(config.run_dir))] == [3]


def _save_often(rank: int, world: int, config: Any) -> list[int]:
    session, state, _ = open_session(rank, config)
    session.restore(state)
    process, sizes = psutil.Process(), []
    for step in range(1, 51):
        state.progress.step = step
        session._saving.save()
        session._saving.wait(60)
        sizes.append(process.memory_info().rss)
    return sizes


def test_memory_does_not_grow_with_saves(folder: Path) -> None:
    """pytorch#170163: 50 saves, no growth beyond noise after the first ten."""
    for sizes in run_world(_save_often, 2, make_config(folder)):
        assert max(sizes[10:]) - sizes[9] < 16 << 20, sizes
