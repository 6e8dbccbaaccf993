"""A training function as an adopter writes it, for runs that are drilled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of some rows."""
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def noisy(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The same, by somebody who is careless with random numbers."""
    torch.rand(7)
    return loss_of(model, tokens)


def train(
    config: Any,
    *,
    loss: Any = loss_of,
    change: Any = lambda model: None,
    on_step: Any = lambda session: None,
) -> dict[str, str]:
    """Trains to the end; ``change`` is done to the new model, ``on_step`` after each step."""
    from model import ModelConfig, Transformer

    import ray_ckpt
    from ray_ckpt.checkpoint.digest import state_digest
    from ray_ckpt.state.schedule import warmup_cosine

    session = ray_ckpt.attach(config)
    shape = ModelConfig(
        vocab_size=31, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, dropout=0.1
    )
    net = Transformer(shape)
    net.init_weights(3)
    change(net)
    model = session.spread(net, torch.zeros(1, config.seq_len - 1, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = warmup_cosine(optimizer, 3, config.steps, 0.1)
    if loss is not None:
        session.validate_with(loss, rows=5)
    state = ray_ckpt.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    session.restore(state)
    for batch in session.batches():
        for micro in batch:
            batch.backward(micro, loss_of(model, micro.tokens))
        session.clip_grad_norm(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.step_end(lr=scheduler.get_last_lr()[0])
        session._saving.wait(60)  # so that the steps of the saves are known
        on_step(session)
    session.close()
    return state_digest(state)


def gelu(model: Any) -> None:
    """A change of the code that no name and no shape tells of: another activation."""
    for block in model.layers:
        block.ffn.forward = lambda x, f=block.ffn: f.down(
            torch.nn.functional.gelu(f.gate(x)) * f.up(x)
        )


def in_a_world(rank: int, world: int, config: Any, loss: Any = loss_of) -> dict[str, str]:
    """For ``run_world``."""
    return train(config, loss=loss)


def reseal(folder: Path, change: Any) -> None:
    """Loads a checkpoint, changes its state dict, and commits that in its place with checksums that fit."""
    import shutil
    from dataclasses import replace

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from ray_ckpt.checkpoint.manifest import read_manifest, write_manifest
    from ray_ckpt.checkpoint.names import MANIFEST_NAME
    from ray_ckpt.checkpoint.writer import ChecksumWriter

    manifest = read_manifest(folder)
    reader = dcp.FileSystemReader(folder)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    change(state)
    for path in folder.iterdir():
        if path.name != MANIFEST_NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / MANIFEST_NAME).unlink()
    writer = ChecksumWriter(folder)
    dcp.save(state, storage_writer=writer, no_dist=True)
    write_manifest(folder, replace(manifest, files=tuple(writer.entries)))
