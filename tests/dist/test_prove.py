"""The proof itself: it passes what is right, and finds every planted fault where it must show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model import ModelConfig, Transformer
from torch.nn.functional import cross_entropy
from worlds import make_config, make_data

import ray_ckpt
from ray_ckpt.config import Config
from ray_ckpt.prove import prove
from ray_ckpt.prove.plant import FAULTS
from ray_ckpt.state.schedule import warmup_cosine

pytestmark = pytest.mark.dist


def train(config: Config) -> None:
    """A user's training function, as the README shows it."""
    session = ray_ckpt.attach(config)
    shape = ModelConfig(
        vocab_size=31, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, dropout=0.1
    )
    net = Transformer(shape)
    net.init_weights(config.seed)
    model = session.spread(net, torch.zeros(1, config.seq_len - 1, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = warmup_cosine(optimizer, 3, config.steps, 0.1)
    session.restore(ray_ckpt.TrainState(model=model, optimizer=optimizer, scheduler=scheduler))
    for batch in session.batches():
        lr = float(scheduler.get_last_lr()[0])
        for micro in batch:
            logits = model(micro.tokens[:, :-1])
            batch.backward(
                micro, cross_entropy(logits.flatten(0, 1), micro.tokens[:, 1:].flatten())
            )
        norm = session.clip_grad_norm(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.step_end(lr=lr, grad_norm=norm)
    session.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    make_data(folder / "data", [16] * 24)
    return folder


def config(folder: Path, name: str, **changes: object) -> Config:
    base = make_config(folder, global_batch=24, workers="1:4", **changes)
    return replace(base, storage=str(folder / name))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_exact_mode_is_proved_over_four_worlds(folder: Path, parallel: str) -> None:
    report = prove(
        config(folder, f"exact-{parallel}", exact=True, parallel=parallel),
        train,
        script="4x5 kill 3x4 kill 2x3 stop 1x2",
    )
    assert report.identical, report.text()
    assert len(report.resumes) == 3, report.resumes
    assert 0 < report.resumes[0] < report.resumes[1] < report.resumes[2] <= 12
    assert report.tolerance == 0.0


def test_default_mode_is_proved_within_a_measured_tolerance(folder: Path) -> None:
    report = prove(config(folder, "default"), train, script="3x5 kill 2x5")
    assert report.identical, report.text()
    assert 0.0 < report.tolerance < 0.5


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found_where_it_must_show(folder: Path, fault: str) -> None:
    report = prove(
        config(folder, "controls"), train, script="2x5 kill 2x5", fault=fault, reuse=True
    )
    assert not report.identical
    assert report.fault_found, report.text()


@pytest.mark.parametrize("fault", ["rng", "data-order"])
def test_faults_are_found_in_exact_mode_too(folder: Path, fault: str) -> None:
    exact = config(folder, "exact-controls", exact=True)
    report = prove(exact, train, script="2x5 kill 3x5", fault=fault, reuse=True)
    assert report.fault_found, report.text()
