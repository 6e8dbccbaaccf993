"""Digests of a training state that do not depend on how it is spread over workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.mapped import PlainReader
from ray_ckpt.checkpoint.restore import flatten, read_entries
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.errors import RestoreError
from ray_ckpt.state.train_state import TrainState

_OF_RANKS = frozenset({"rng", "per_rank"})


def state_digest(state: TrainState) -> dict[str, str]:
    """Digests of the whole tensors of each part; a collective when the model is sharded.

    Returns:
        16 hex digits for ``model``, ``optimizer``, ``progress`` and ``scalars``.
    """
    return {
        part: _digest({"": value} if isinstance(value, torch.Tensor) else dict(flatten(value)))
        for part, value in state.state_dict().items()
        if part not in _OF_RANKS
    }


def checkpoint_digest(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Digests of the parts of a checkpoint on storage, as :func:`state_digest` gives them for a state in memory.

    What belongs to ranks is left out: another world has other ranks.

    Raises:
        RestoreError: the checkpoint's bytes are not those of its manifest.
    """
    faults = verify_files(folder, manifest)
    if faults:
        raise RestoreError(f"{folder}: {faults[0].path}: {faults[0].fault}")
    reader = PlainReader(folder)
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in read_entries(reader, folder, manifest).items()
        if name.partition(".")[0] not in _OF_RANKS
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns of the single process that is asked for
        dcp_load(dict(tensors), storage_reader=reader, no_dist=True)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return {part: _digest(named) for part, named in parts.items()}


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return str(digest.hexdigest())
