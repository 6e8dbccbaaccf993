"""A dataset of the training function's own, through resumes: the same samples, and the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import history, make_config, make_core, run_world

import ray_ckpt

pytestmark = pytest.mark.dist


def train_own(rank: int, world: int, config: Any, stop_after: int | None = None) -> int:
    """Trains on images with dropout, or leaves after a step; returns where it began."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from ray_ckpt.session import Session
    from ray_ckpt.tracker.client import LocalTracker

    generator = torch.Generator().manual_seed(5)
    images = TensorDataset(
        torch.randn(70, 1, 6, 6, generator=generator), torch.arange(70).remainder(3)
    )
    tracker = LocalTracker(make_core(config)) if rank == 0 else None
    session = Session(config, tracker=tracker, device=torch.device("cpu"))
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()),
        *(torch.nn.Dropout(0.4), torch.nn.Linear(64, 3)),
    )
    model = session.spread(net, (images[0][0][None],))
    assert int(net[1].num_batches_tracked) == 0, "what spread() tries leaves no trace"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.restore(ray_ckpt.TrainState(model=model, optimizer=optimizer))
    started = session.progress.step
    for batch in session.batches(loader=lambda sampler: DataLoader(images, batch_sampler=sampler)):
        for micro in batch:
            x, y = micro.data
            assert x.shape[0] == config.micro_batch
            batch.backward(micro, torch.nn.functional.cross_entropy(model(x), y), tokens=7)
        optimizer.step()
        optimizer.zero_grad()
        session.step_end(lr=0.01)
        session._saving.wait(30)
        if session.progress.step == stop_after:
            session._steward.exchange(flush=True)
            return started
    session.close()
    return started


def test_resumes_with_an_own_dataset_repeat_the_uninterrupted_run(tmp_path: Path) -> None:
    base = make_config(tmp_path, data=(), samples=70, steps=12)  # an epoch is 7 steps
    whole, broken, grown = (replace(base, run=name) for name in ("whole", "broken", "grown"))
    assert run_world(train_own, 2, whole) == [0, 0]
    for stop_after, began in ((5, 0), (8, 3), (None, 6)):
        assert run_world(train_own, 2, broken, stop_after) == [began, began]
    run_world(train_own, 1, grown, 4)
    assert run_world(train_own, 3, grown) == [3, 3, 3]
    rows, again, other = history(whole), history(broken), history(grown)
    assert list(rows) == list(range(1, 13))
    assert [row["loss_hex"] for row in again.values()] == [r["loss_hex"] for r in rows.values()]
    for found in (again, other):
        assert [r["sample_digest"] for r in found.values()] == [
            r["sample_digest"] for r in rows.values()
        ]
    assert {row["tokens"] for row in rows.values()} == {7 * 5}, "as the function counts them"


def shard(rank: int, world: int, config: Any) -> list[bool]:
    import torch
    from torch.distributed.fsdp import FSDPModule

    from ray_ckpt.session import Session
    from ray_ckpt.tracker.client import LocalTracker

    tracker = LocalTracker(make_core(config)) if rank == 0 else None
    session = Session(config, tracker=tracker, device=torch.device("cpu"))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model = session.spread(net, torch.zeros(1, 4), units=[net[0]])
    return [isinstance(module, FSDPModule) for module in (model, net[0], net[1])]


def test_the_units_of_a_model_of_any_shape_are_named(tmp_path: Path) -> None:
    config = make_config(tmp_path, data=(), samples=70, parallel="fsdp")
    assert run_world(shard, 2, config) == [[True, True, False]] * 2


def begin_apart(rank: int, world: int, config: Any) -> list[float]:
    import torch

    from ray_ckpt.session import Session
    from ray_ckpt.tracker.client import LocalTracker

    tracker = LocalTracker(make_core(config)) if rank == 0 else None
    session = Session(config, tracker=tracker, device=torch.device("cpu"))
    torch.manual_seed(rank)  # as in a function that sets no seed
    model = session.spread(torch.nn.Linear(2, 1), {"input": torch.zeros(1, 2)})
    return [value for p in model.parameters() for value in p.flatten().tolist()]


@pytest.mark.parametrize("exact", [False, True])
def test_copies_that_begin_apart_begin_with_the_weights_of_rank_0(
    tmp_path: Path, exact: bool
) -> None:
    config = make_config(tmp_path, data=(), samples=70, exact=exact)
    first, second = run_world(begin_apart, 2, config)
    assert first == second
