"""Reading a checkpoint back: verify every byte, then load, at any world size.

The ranks share the verification (rank r takes every W-th file) and agree on its outcome before any of
them unpickles DCP's metadata or copies a byte into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.futures import Future

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.mapped import MappedReader
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import RestoreError, StorageError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.state import rng
from ray_ckpt.state.codec import decode
from ray_ckpt.state.parts import Entry
from ray_ckpt.state.train_state import PER_RANK, SCALARS, Saved, TrainState

_RNG = "rng"


def verify_together(folder: Path, manifest: Manifest, group: dist.ProcessGroup) -> list[Fault]:
    """Verifies a checkpoint with all ranks of a group; every rank gets all faults."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    share = manifest.files[rank::world_size]
    faults = verify_files(folder, manifest, only=share) if share else []
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, faults, group=group)
    return [fault for each in everyone for fault in each]


Bring = Callable[[Collection[str]], None]
"""Makes files of a checkpoint readable in its folder, as its manifest has them; raises ``NotBroughtError``."""


class NotBroughtError(StorageError):
    """No copy of a file that a restore needs could be had."""


class BringingReader(MappedReader):
    """Reads files that are brought when it is known that this rank needs them.

    Args:
        folder: where they are then.
        bring: brings them.
        group: of all ranks, each of which reads when all have what they need: else nobody has changed anything.
    """

    def __init__(self, folder: Path, bring: Bring, group: dist.ProcessGroup) -> None:
        super().__init__(folder)
        self._bring, self._group = bring, group

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        paths = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        bring_together(self._bring, paths, self._group)
        return super().read_data(plan, planner)


def bring_together(bring: Bring, paths: Collection[str], group: dist.ProcessGroup) -> None:
    """Brings what each rank needs; every rank calls it.

    Raises:
        NotBroughtError: on every rank, when one of them could not get a file.
    """
    problem = ""
    try:
        bring(paths)
    except Exception as error:  # noqa: BLE001 - the others wait for a word, whatever it was
        problem = str(error) or repr(error)
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    if text := next(filter(None, problems), ""):
        raise NotBroughtError(text)


def load(
    state: TrainState,
    folder: Path,
    manifest: Manifest,
    group: dist.ProcessGroup,
    device: torch.device,
    allow_missing: tuple[str, ...] = (),
    bring: Bring | None = None,
) -> bool:
    """Loads a verified checkpoint into ``state``, in place.

    Args:
        state: to load into.
        folder: of the checkpoint.
        manifest: of the checkpoint.
        group: of all ranks.
        device: of this rank.
        allow_missing: items and tensors that only one side may have, as in ``TrainState.targets``.
        bring: brings the files that this rank needs; its metadata is there already. None when all are there.

    Returns:
        Whether this rank's random generators were restored exactly: they are when the world size is
        that of the save.

    Raises:
        RestoreError: the checkpoint holds other names or shapes than the state; both sides are listed.
        NotBroughtError: on every rank, when one of them could not get a file; the state is as it was.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    same_world = world_size == manifest.world_size
    reader = MappedReader(folder) if bring is None else BringingReader(folder, bring, group)
    entries = read_entries(reader, folder, manifest)
    try:
        documents, own = _read_documents(reader, entries, rank if same_world else None, group)
    except CheckpointException as error:
        raise _not_brought(error) or error from error
    target = state.targets(
        Saved(
            where=str(folder),
            entries={n: e for n, e in entries.items() if not n.startswith(f"{_RNG}.")},
            documents=documents,
            own=own,
        ),
        device,
        allow_missing,
    )
    generators = rng.capture(device)
    if same_world:
        prefix = f"{_RNG}.{rng.rank_key(rank)}."
        generators = _present(generators, entries, prefix)
        target[_RNG] = {rng.rank_key(rank): generators}
    try:
        dcp_load(_to_load(target), storage_reader=reader, process_group=group)
    except (CheckpointException, ValueError) as error:
        if not_brought := _not_brought(error):
            raise not_brought from error
        raise RestoreError(
            f"{folder} is intact but does not fit the model or optimizer ({error}). Use the model and "
            "optimizer of the run that saved it."
        ) from error
    fault_point("restore.loading")
    state.load_state_dict(target)
    if same_world:
        rng.apply(generators, device)
    return same_world


def _not_brought(error: BaseException) -> NotBroughtError | None:
    """That a rank did not get a file; DCP tells every rank of every failure."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next(
        (failure[0] for failure in failures if isinstance(failure[0], NotBroughtError)), None
    )


def read_entries(reader: FileSystemReader, folder: Path, manifest: Manifest) -> dict[str, Entry]:
    """Names, shapes and types of a verified checkpoint's tensors.

    Raises:
        RestoreError: it holds something else than tensors, which only pickle could read; or its tensors are in
            files that the manifest does not name, and that nobody verified.
    """
    whole = reader.read_metadata()
    files = {str(info.relative_path) for info in (whole.storage_data or {}).values()}
    strays = sorted(files - {entry.path for entry in manifest.files})
    if strays:
        raise RestoreError(
            f"{folder}: its metadata speaks of {strays[0]!r}, which is not in its manifest and was not verified. Set "
            "the folder aside and start again: an older one will be used."
        )
    metadata = whole.state_dict_metadata
    strange = sorted(n for n, e in metadata.items() if not isinstance(e, TensorStorageMetadata))
    if strange:
        raise RestoreError(
            f"{folder} holds pickled objects ({', '.join(strange[:5])}), and those are never read. It was not saved "
            "by this package: load its weights in the training function instead."
        )
    return {
        name: Entry(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


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


def _read_documents(
    reader: FileSystemReader,
    entries: Mapping[str, Entry],
    rank: int | None,
    group: dist.ProcessGroup,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The JSON of the items, and of the items that are this rank's own; None when no rank is asked for."""
    own_name = "" if rank is None else f"{PER_RANK}.{rng.rank_key(rank)}.{SCALARS}"
    tensors = {
        name: torch.empty(entries[name].shape, dtype=torch.uint8)
        for name in (SCALARS, own_name)
        if name in entries
    }
    if SCALARS not in tensors:
        raise RestoreError(
            f"{reader.path} has no {SCALARS!r}: it was not saved by this package. Load its weights in the training "
            "function instead."
        )
    dcp_load(dict(tensors), storage_reader=reader, process_group=group)
    own = None
    if rank is not None:
        own = decode(tensors[own_name]) if own_name in tensors else {}
    return decode(tensors[SCALARS]), own


def _present(
    generators: dict[str, torch.Tensor], entries: Mapping[str, Entry], prefix: str
) -> dict[str, torch.Tensor]:
    """The generators that the checkpoint has; on a GPU it may come from a run without."""
    missing = sorted(key for key in generators if prefix + key not in entries and key != "cuda")
    if missing:
        raise RestoreError(
            f"the checkpoint lacks the random generators {missing} of this rank. Set it aside and start again: an "
            "older one will be used."
        )
    return {key: value for key, value in generators.items() if prefix + key in entries}


def _to_load(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target without the documents, which are read already, and may be fewer than the saved ones."""
    return {
        key: _to_load(value) if isinstance(value, Mapping) else value
        for key, value in target.items()
        if key != SCALARS
    }
