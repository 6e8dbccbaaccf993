"""A run that is no longer finite, in real processes: what is saved, restored, left out, and told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_resume import digests, expected_digests
from worlds import events, history, make_config, make_data, open_session, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.config import GuardConfig
from ray_ckpt.errors import NonfiniteError, RollbackError

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", [16] * 12)
    return tmp_path


def _save_once(rank: int, world: int, config: Any) -> None:
    session, state, _ = open_session(rank, config)
    session.restore(state)
    state.progress.step = 1
    session._saving.save()
    session._saving.wait(60)


def test_the_norm_is_the_same_for_whole_copies_and_shards_of_any_world(folder: Path) -> None:
    norms, tensors = {}, set()
    for parallel, world in (("ddp", 1), ("ddp", 3), ("fsdp", 2), ("fsdp", 3)):
        config = make_config(folder, run=f"{parallel}{world}", parallel=parallel)
        run_world(_save_once, world, config)
        (entry,) = usable(list_checkpoints(config.run_dir))
        guard = read_manifest(entry.folder).guard
        assert guard["ok"]
        norms[parallel, world] = guard["param_norm"]
        tensors.add(guard["checked_tensors"])
    first = norms["ddp", 1]
    assert first > 1.0
    assert all(norm == pytest.approx(first, rel=1e-12) for norm in norms.values()), norms
    assert len(tensors) == 1


class _Poison:
    """Puts NaN into one parameter of one rank, for the time of a save after a step."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at

    def __call__(self, session: Any, step: int) -> None:
        weight = next(iter(session._state.model.parameters()))
        if dist.get_rank() == self.rank and step == self.at:
            self.kept = weight.detach().clone()
            local = getattr(weight, "_local_tensor", weight)
            with torch.no_grad():
                local.view(-1)[-1] = math.nan
        if step == self.at:
            session._saving.save()  # as if a save were due between the fault and the next step
            session._saving.wait(60)
        if dist.get_rank() == self.rank and step == self.at:
            with torch.no_grad():
                weight.copy_(self.kept)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_nan_in_one_parameter_of_one_rank_is_set_aside_and_saving_goes_on(
    folder: Path, parallel: str
) -> None:
    config = make_config(
        folder, parallel=parallel, steps=9, guard=GuardConfig(on_nonfinite="go-on")
    )
    run_world(train, 2, config, None, False, _Poison(1, 4))
    assert [e["step"] for e in events(config, "commit")] == [3, 7, 9]
    (event,) = events(config, "quarantine")
    assert (event["step"], event["by"], event["findings"][0]["rank"]) == (4, "guard", 1)
    assert event["findings"][0]["tensor"].startswith("model.")
    assert not events(config, "save_failed")
    assert all(e["guard_s"] > 0 for e in events(config, "commit"))
    entries = list_checkpoints(config.run_dir)
    assert [e.step for e in entries if e.quarantined] == [4]
    assert (entries[-2].folder / ".metadata").exists()
    assert all(read_manifest(e.folder).bitwise_comparable for e in usable(entries))


class _Break:
    """Makes a loss infinite at the global batches given, for whichever rank has the first micro-batch."""

    def __init__(self, *positions: int) -> None:
        self.positions = positions

    def install(self) -> None:
        from ray_ckpt.batch import Batch

        backward = Batch.backward

        def broken(batch: Any, micro: Any, loss: torch.Tensor) -> None:
            position = int(micro.source.positions[0]) // 10
            if position in self.positions and micro.source.index == 0:
                loss = loss * math.inf
            backward(batch, micro, loss)

        Batch.backward = broken  # type: ignore[method-assign]


def _train_broken(rank: int, world: int, config: Any, fault: _Break) -> str:
    """Trains with a fault; returns the error that ended it, by its class and words."""
    fault.install()
    try:
        train(rank, world, config)
    except (NonfiniteError, RollbackError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_loss_that_is_not_finite_stops_the_run_on_all_ranks_and_keeps_what_was(
    folder: Path,
) -> None:
    config = make_config(folder, steps=9)
    said = run_world(_train_broken, 2, config, _Break(4))
    assert said[0] == said[1]
    for word in ("NonfiniteError", "step 5", "loss nan", "--guard.on-nonfinite stop", "step 3 is"):
        assert word in said[0]
    assert [e["step"] for e in events(config, "commit")] == [3]
    assert run_world(_train_broken, 2, config, _Break())[0] == ""
    assert [e["kind"] for e in events(config, "interruption")] == ["nonfinite"]
    assert [e["step"] for e in events(config, "commit")] == [3, 6, 9]


def test_a_run_whose_last_state_is_refused_is_not_complete(folder: Path) -> None:
    config = make_config(folder, steps=6, guard=GuardConfig(on_nonfinite="go-on"))
    (said,) = run_world(_train_broken, 1, config, _Break(5))
    for word in ("NonfiniteError", "last step 6", "not committed", "the loss of the step is nan"):
        assert word in said
    assert not events(config, "finished")
    assert len(events(config, "quarantine")) == 1, "it is not saved again and again"
    assert run_world(_train_broken, 1, config, _Break()) == [""]
    assert [e["step"] for e in events(config, "commit")] == [3, 6]


def test_rollbacks_go_further_back_and_end(folder: Path) -> None:
    guard = GuardConfig(on_nonfinite="rollback", max_rollbacks=2)
    config = make_config(folder, steps=12, guard=guard)
    said = [run_world(_train_broken, 1, config, _Break(7))[0] for _ in range(3)]
    assert [word.split(":")[0] for word in said] == ["RollbackError"] * 2 + ["NonfiniteError"]
    assert [e["to_step"] for e in events(config, "trouble")] == [6, 3, 6]
    assert [e["step"] for e in events(config, "restored")] == [0, 6, 3]


def test_a_skip_leaves_out_the_batches_that_led_there_and_nothing_else(folder: Path) -> None:
    guard = GuardConfig(on_nonfinite="rollback-and-skip")
    config = make_config(folder, steps=9, guard=guard)
    assert "RollbackError" in run_world(_train_broken, 2, config, _Break(4))[0]
    assert run_world(_train_broken, 1, config, _Break(4))[0] == ""
    order = expected_digests(config, 11)
    assert digests(config) == order[:3] + order[5:11], "steps 4 and 5 took the batches 5 and 6"
    assert [line["sample_offset"] for line in history(config).values()] == [
        10 * step for step in range(1, 10)
    ]
    # Without its journal a run still knows its order, from the manifest.
    (config.run_dir / "journal.jsonl").unlink()
    longer = make_config(folder, steps=12, guard=guard)
    assert run_world(_train_broken, 2, longer, _Break(4))[0] == ""
    assert digests(longer)[9:] == expected_digests(config, 14)[11:14]


def test_a_state_found_bad_after_its_step_ends_the_attempt(folder: Path) -> None:
    guard = GuardConfig(on_nonfinite="rollback")
    config = make_config(folder, steps=9, guard=guard)
    said = run_world(_train_spoilt, 2, config)
    assert all("RollbackError" in word for word in said)
    (event,) = events(config, "trouble")
    assert event["to_step"] == 3
    assert event["step"] == 6
    assert "optimizer." in event["what"]
    assert [e["step"] for e in events(config, "quarantine")] == [6]
    assert run_world(train, 2, config)[0]["started"] == 3


def _train_spoilt(rank: int, world: int, config: Any) -> str:
    """The optimizer of rank 1 has an infinity that no loss shows."""

    def spoil(session: Any, step: int) -> None:
        if step == 5 and dist.get_rank() == 1:
            first = next(iter(session._state.optimizer.state.values()))
            first["exp_avg_sq"].view(-1)[0] = math.inf  # the update becomes 0: weights stay finite

    try:
        train(rank, world, config, None, False, spoil)
    except (NonfiniteError, RollbackError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
