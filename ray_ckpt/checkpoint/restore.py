"""Reading a checkpoint back: verify every byte, then load, at any world size.

The ranks share the verification (rank r takes every W-th file) and agree on its outcome before any of
them unpickles DCP's metadata or copies a byte into the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import RestoreError
from ray_ckpt.state import rng
from ray_ckpt.state.train_state import SCALARS, TrainState

_RNG = "rng"


def verify_together(folder: Path, manifest: Manifest, group: dist.ProcessGroup) -> list[Fault]:
    """Verifies a checkpoint with all ranks of a group; every rank gets all faults."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    share = manifest.files[rank::world_size]
    faults = verify_files(folder, manifest, only=share) if share else []
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, faults, group=group)
    return [fault for each in everyone for fault in each]


def load(
    state: TrainState,
    folder: Path,
    manifest: Manifest,
    group: dist.ProcessGroup,
    device: torch.device,
) -> bool:
    """Loads a verified checkpoint into ``state``, in place.

    Returns:
        Whether this rank's random generators were restored exactly: they are when the world size is
        that of the save.

    Raises:
        RestoreError: the checkpoint holds other names or shapes than the state; both sides are listed.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    same_world = world_size == manifest.world_size
    reader = FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    target = state.state_dict()
    scalars = saved.get(SCALARS)
    if isinstance(scalars, TensorStorageMetadata):
        target[SCALARS] = torch.empty(scalars.size, dtype=torch.uint8)
    generators = rng.capture(device)
    if same_world:
        prefix = f"{_RNG}.{rng.rank_key(rank)}."
        generators = {k: v for k, v in generators.items() if prefix + k in saved}
        target[_RNG] = {rng.rank_key(rank): generators}
    _compare_names(target, saved, folder)
    try:
        dcp_load(target, storage_reader=reader, process_group=group)
    except (CheckpointException, ValueError) as error:
        raise RestoreError(
            f"{folder} is intact but does not fit the model or optimizer ({error}). Use the model and "
            "optimizer of the run that saved it."
        ) from error
    state.load_state_dict(target)
    if same_world:
        rng.apply(generators, device)
    return same_world


def with_rng(state_dict: dict[str, Any], rank: int, device: torch.device) -> dict[str, Any]:
    """A state dict together with this rank's random generators."""
    return {**state_dict, _RNG: {rng.rank_key(rank): rng.capture(device)}}


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Names (joined with dots, as DCP does) and tensors of a nested state dict."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _compare_names(target: Mapping[str, Any], saved: Mapping[str, Any], folder: Path) -> None:
    here = {name for name, _ in flatten(target)}
    there = {name for name in saved if not name.startswith(f"{_RNG}.")}
    here = {name for name in here if not name.startswith(f"{_RNG}.")}
    if here != there:
        missing, surplus = sorted(here - there), sorted(there - here)
        raise RestoreError(
            f"{folder} does not hold what the training function has. Not in the checkpoint: "
            f"{_some(missing)}. Only in the checkpoint: {_some(surplus)}. Use the model and optimizer "
            "of the run that saved it, or another run name."
        )


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
