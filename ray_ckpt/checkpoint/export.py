"""Weights out of a checkpoint, as safetensors that everybody reads.

Every byte is verified first. Then file by file: the tensors of one output file are read, written by DCP's own
Hugging Face writer, and let go. So the memory that it takes is about twice the size of an output file and once that
of the largest tensor, whatever the size of the model. Needs neither Ray, nor the model's class, nor the world that
saved it.

The result appears under its name when it is complete. A kill -9 can leave a folder ``.<name>.part-...`` beside it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ray_ckpt.checkpoint.listing import CheckpointEntry
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.mapped import PlainReader
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.checkpoint.restore import read_entries
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.errors import ConfigError, RestoreError, StorageError, WeightsError
from ray_ckpt.state.codec import decode
from ray_ckpt.state.parts import TIED, Entry, is_extra
from ray_ckpt.state.train_state import SCALARS
from ray_ckpt.state.weights import INDEX_NAME, require_safetensors
from ray_ckpt.tracker.identity import read_record

SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
WEIGHTS = ("model", "ema")
FILE_BYTES = 1 << 30
_MODEL_OPTION = "--model."
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        folder: where.
        step: of the checkpoint.
        generation: of the checkpoint.
        what: "model" or "ema".
        files: name and size of each safetensors file.
        tensors: number of tensors.
        parameters: number of their elements.
        bytes: size of their content.
        left_out: name of each tensor that is not in the export, and why.
    """

    folder: str
    step: int
    generation: int
    what: str
    files: dict[str, int]
    tensors: int
    parameters: int
    bytes: int
    left_out: dict[str, str]


def export_weights(
    entry: CheckpointEntry, to: Path, *, what: str = "model", file_bytes: int = FILE_BYTES
) -> Exported:
    """Writes the weights of a checkpoint as safetensors, with a ``config.json``.

    Args:
        entry: of the checkpoint, from a listing of its run.
        to: a folder that is empty or does not exist.
        what: "model", or "ema" for averaged weights.
        file_bytes: greatest size of an output file; a larger tensor has a file of its own.

    Raises:
        ConfigError: a wrong argument, or ``safetensors`` is not installed.
        RestoreError: the checkpoint is not committed, quarantined, or damaged.
        StorageError: storage cannot be read or written.
        WeightsError: the weights cannot be written as safetensors.
    """
    require_safetensors()
    if what not in WEIGHTS:
        raise ConfigError(f"--what {what!r}: must be one of {', '.join(WEIGHTS)}")
    if file_bytes < 1:
        raise ConfigError(f"the size of a file is {file_bytes} bytes, must be at least 1")
    manifest = _usable(entry)
    to = Path(os.path.abspath(to))  # noqa: PTH100 - links are the user's, and stay as they are
    _check_target(to, entry.folder)
    _verify(entry.folder, manifest)
    reader = PlainReader(entry.folder)
    entries = read_entries(reader, entry.folder, manifest)
    documents = _documents(reader, entries, entry.folder)
    chosen, left_out = _choose(entries, documents, what, entry.folder)
    plan = _split({name: _size(chosen[name]) for name in chosen}, file_bytes)
    facts = _config(entry, manifest, what, left_out)
    part = to.with_name(f".{to.name}.part-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        part.mkdir(parents=True)
        _write(reader, part, what, chosen, plan)
        (part / CONFIG_NAME).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        files = {p.name: p.stat().st_size for p in sorted(part.glob("*.safetensors"))}
        _sync(part)
        part.rename(to)  # onto nothing, or an empty folder; anything else is refused by the system
        _sync_folder(to.parent)
    except OSError as error:
        raise StorageError(
            f"{to} cannot be written ({error.strerror or error}); nothing was left there. Make room, or give another "
            "folder."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Exported(
        folder=str(to),
        step=entry.step,
        generation=entry.generation,
        what=what,
        files=files,
        tensors=len(chosen),
        parameters=sum(torch.Size(each.shape).numel() for each in chosen.values()),
        bytes=sum(_size(each) for each in chosen.values()),
        left_out=left_out,
    )


def _usable(entry: CheckpointEntry) -> Manifest:
    if entry.quarantined is not None:
        raise RestoreError(f"{entry.folder} is quarantined: {entry.quarantined}. Use another one.")
    if entry.manifest is None:
        reason = entry.fault if entry.committed else "it was never committed"
        raise RestoreError(f"{entry.folder} cannot be used: {reason}. Use another one.")
    return entry.manifest


def _check_target(to: Path, checkpoint: Path) -> None:
    shelf = checkpoint.parent.resolve()
    if to.resolve().is_relative_to(shelf):
        raise ConfigError(
            f"--to {to} is inside {CHECKPOINTS_DIR} of the run, where only checkpoints belong. Give another folder."
        )
    try:
        if to.is_symlink() or (to.exists() and not to.is_dir()):
            raise ConfigError(f"--to {to} is a file or a link; give a folder that is empty or new")
        if to.exists() and any(to.iterdir()):
            raise ConfigError(f"--to {to} is not empty; give a folder that is empty or new")
    except OSError as error:
        raise StorageError(f"--to {to} cannot be read ({error.strerror or error})") from error


def _verify(folder: Path, manifest: Manifest) -> None:
    faults = verify_files(folder, manifest)
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        listed = "; ".join(f"{fault.path}: {fault.fault}" for fault in faults[:_SHOWN])
        raise RestoreError(
            f"{folder} is not as it was committed ({listed}{more}). Nothing was exported: use another checkpoint."
        )


def _documents(
    reader: FileSystemReader, entries: Mapping[str, Entry], folder: Path
) -> dict[str, Any]:
    if SCALARS not in entries:
        raise RestoreError(f"{folder} has no {SCALARS!r}: it was not saved by this package")
    target = {SCALARS: torch.empty(entries[SCALARS].shape, dtype=torch.uint8)}
    _load(reader, target)
    return decode(target[SCALARS])


def _choose(
    entries: Mapping[str, Entry], documents: Mapping[str, Any], what: str, folder: Path
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors to export, by their names in the model, and those that are left out, with the reason."""
    found = _below(entries, what)
    if not found:
        raise ConfigError(
            f"--what {what}: {folder} has no such weights, only those of: "
            f"{', '.join(w for w in WEIGHTS if _below(entries, w)) or 'nothing'}"
        )
    document = documents.get(what)
    tied = document.get(TIED, {}) if isinstance(document, dict) else {}
    names = set(_below(entries, "model"))
    left_out = {}
    for name in found:
        if is_extra(name):
            left_out[name] = "extra state of a module, no weight"
        elif name in tied:
            left_out[name] = f"the same parameter as {tied[name]}"
        elif name not in names:
            left_out[name] = "not a tensor of the model"
    chosen = {name: each for name, each in found.items() if name not in left_out}
    if not chosen:
        raise ConfigError(
            f"--what {what}: the names in {folder} are not those of the model ({', '.join(sorted(found)[:_SHOWN])}): "
            "average a module of the model's shape, such as AveragedModel, to export it."
        )
    return chosen, dict(sorted(left_out.items()))


def _below(entries: Mapping[str, Entry], part: str) -> dict[str, Entry]:
    prefix = f"{part}."
    return {n[len(prefix) :]: e for n, e in entries.items() if n.startswith(prefix)}


def _size(entry: Entry) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in files of at most ``limit`` bytes, in their order; a larger tensor is alone."""
    files: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def _write(
    reader: FileSystemReader,
    folder: Path,
    what: str,
    chosen: Mapping[str, Entry],
    plan: Sequence[Sequence[str]],
) -> None:
    numbers = {name: i for i, names in enumerate(plan, start=1) for name in names}
    for names in plan:
        tensors = {
            name: torch.empty(chosen[name].shape, dtype=chosen[name].dtype) for name in names
        }
        _load(reader, {f"{what}.{name}": tensor for name, tensor in tensors.items()})
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DCP warns of the single process that is asked for
                dcp_save(tensors, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise _cause(error, names) from error
        del tensors
    # The writer's own index is of the last file alone.
    (folder / INDEX_NAME).unlink()
    written = {
        number: f"model-{number:05d}-of-{len(plan):05d}.safetensors" for number in numbers.values()
    }
    if len(plan) == 1:
        (folder / written[1]).rename(folder / SINGLE_NAME)
        return
    index = {
        "metadata": {"total_size": sum(_size(each) for each in chosen.values())},
        "weight_map": {name: written[numbers[name]] for name in sorted(numbers)},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _first(error: CheckpointException) -> BaseException:
    return next((failure[0] for failure in error.failures.values()), error)


def _cause(error: CheckpointException, names: Sequence[str]) -> Exception:
    cause = _first(error)
    if isinstance(cause, OSError):
        return cause
    return WeightsError(
        f"{', '.join(names[:_SHOWN])}: cannot be written as safetensors ({type(cause).__name__}: {cause})"
    )


def _load(reader: FileSystemReader, target: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp_load(target, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise RestoreError(
                f"{reader.path} was as committed, and cannot be read now ({_first(error)}). Try again, or use another "
                "checkpoint."
            ) from error


def _config(
    entry: CheckpointEntry, manifest: Manifest, what: str, left_out: Mapping[str, str]
) -> dict[str, Any]:
    """The model's options as they were given, and where the weights are from."""
    record = read_record(entry.folder.parent.parent)
    options: dict[str, Any] = {}
    if record is not None:
        number = manifest.segment["number"]
        here = [segment.options for segment in record.segments if segment.number == number]
        options = {**record.fixed, **(here[0] if here else {})}
    model = {
        name.removeprefix(_MODEL_OPTION).replace("-", "_"): value
        for name, value in options.items()
        if name.startswith(_MODEL_OPTION)
    }
    origin = {
        name: value
        for name, value in asdict(manifest).items()
        if name not in ("files", "checksum_algorithm", "schema", "guard", "metrics")
    }
    rest = {n: v for n, v in options.items() if not n.startswith(_MODEL_OPTION)}
    more = {"what": what, "options": rest, "left_out": dict(left_out)}
    return {**model, "ray_ckpt": {**origin, **more}}


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
