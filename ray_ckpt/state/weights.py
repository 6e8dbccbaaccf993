"""Weights from plain safetensors into a model: the start of a new run, or anywhere else.

Tensor by tensor: beside the model one tensor of the file is in memory. Works on a plain model, below DDP, and
sharded by FSDP2, where every rank reads the file and keeps its shards. Needs the extra ``ray-ckpt[export]``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor, distribute_tensor

from ray_ckpt.checkpoint.verify import hash_file
from ray_ckpt.errors import ConfigError, StorageError, WeightsError
from ray_ckpt.state.fit import Allowed
from ray_ckpt.state.parts import Entry, ModulePart

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What :func:`load_weights` did.

    Attributes:
        num_tensors: tensors of the file that were loaded.
        kept: names that the file lacks and that kept their values, as allowed.
        ignored: names that only the file has, as allowed.
    """

    num_tensors: int
    kept: tuple[str, ...]
    ignored: tuple[str, ...]


def require_safetensors() -> Any:
    """The package ``safetensors``, which is optional.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            "reading and writing safetensors needs the package of that name: "
            "pip install safetensors"
        ) from error
    return safetensors


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a file or folder; of a folder, those that its index names.

    Raises:
        ConfigError: there are none, or the index names what is not in the folder.
        StorageError: storage cannot be read.
    """
    try:
        if not path.is_dir():
            if not path.is_file():
                raise ConfigError(f"{path} is not there: give a {SUFFIX} file, or a folder of them")
            if path.suffix != SUFFIX:
                raise ConfigError(f"{path} is not a {SUFFIX} file; other formats are not read")
            return [path]
        index = path / INDEX_NAME
        if not index.exists():
            files = sorted(each for each in path.iterdir() if each.suffix == SUFFIX)
            if not files:
                raise ConfigError(f"{path} has no {SUFFIX} file: give one, or a folder of them")
            return files
        names = _index_names(index)
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror or error})") from error
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ConfigError(f"{index} names {missing[0]!r}, which is not in {path}: copy all files")
    return [path / name for name in names]


def weights_fingerprint(path: Path) -> str:
    """Digest of the content of weight files, 32 hex digits; their names do not count.

    Raises:
        ConfigError: there are none.
        StorageError: storage cannot be read.
    """
    try:
        digests = sorted(hash_file(file.resolve())[1] for file in weight_files(path))
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror or error})") from error
    return str(xxhash.xxh3_128_hexdigest(" ".join(digests).encode()))


def load_weights(
    model: torch.nn.Module,
    path: str | Path,
    allow_missing: Sequence[str] = (),
) -> Loaded:
    """Loads plain safetensors into a model, in place; of a sharded model, on every rank.

    Nothing is changed before all names and shapes were compared. Floating-point values are converted to the
    type that the model has. Names of tied parameters: one of them is enough.

    Args:
        model: plain, wrapped by DDP or the like, or sharded by FSDP2.
        path: a ``.safetensors`` file or a folder of them.
        allow_missing: tensors, by name or by the first parts of it, that only one side may have.

    Returns:
        What was loaded.

    Raises:
        ConfigError: there is no such file, or ``safetensors`` is not installed.
        WeightsError: the file is damaged, or does not fit the model; lists both sides.
        StorageError: storage cannot be read.
    """
    safetensors = require_safetensors()
    path = Path(path)
    part = ModulePart("model", model)
    here, tied = part.tensors(), part.tied_names()
    files = weight_files(path)
    where, there = _entries(safetensors, path, files)
    kept, ignored = _compare(path, here, there, tied, Allowed(tuple(allow_missing)))
    for file in files:
        with _open(safetensors, file) as content:
            for name in sorted(n for n in there if where[n] == file and n in here):
                value = content.get_tensor(name)
                first = tied.get(name)
                if first in there:
                    _check_tied(path, safetensors, where, name, str(first), value)
                else:
                    _copy(here[name], value)
    if kept or ignored:
        logger.warning(
            "%s: not in it, keeps its values: %s; in it, but not used: %s",
            path,
            _some(kept),
            _some(ignored),
        )
    return Loaded(num_tensors=len(set(there) & set(here)), kept=tuple(kept), ignored=tuple(ignored))


def _index_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of {SUFFIX} files ({error!r})") from error
    for name in names:
        # Plain names: an index must not lead out of its folder.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SUFFIX):
            raise ConfigError(f"{index} names {name!r}, which is no {SUFFIX} file of its folder")
    return names


def _open(safetensors: Any, file: Path) -> Any:
    try:
        return safetensors.safe_open(str(file), framework="pt", device="cpu")
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{file} is damaged, or no safetensors file ({error})") from error
    except OSError as error:
        raise StorageError(f"{file} cannot be read ({error.strerror or error})") from error


def _entries(
    safetensors: Any, path: Path, files: Sequence[Path]
) -> tuple[dict[str, Path], dict[str, Entry]]:
    """Of each tensor, the file that has it, and its shape and type."""
    where: dict[str, Path] = {}
    there: dict[str, Entry] = {}
    for file in files:
        with _open(safetensors, file) as content:
            for name in content.keys():  # noqa: SIM118 - no dict, and cannot be iterated over
                if name in where:
                    raise WeightsError(
                        f"{path}: {name!r} is in {where[name].name} and in {file.name}, which of them counts cannot "
                        f"be told. Give one file, or a folder with {INDEX_NAME}."
                    )
                piece = content.get_slice(name)
                where[name] = file
                there[name] = Entry(tuple(piece.get_shape()), _dtype(content, name, piece))
    return where, there


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _dtype(content: Any, name: str, piece: Any) -> torch.dtype:
    known = _DTYPES.get(piece.get_dtype())
    return known if known is not None else content.get_tensor(name).dtype


def _compare(
    path: Path,
    here: Mapping[str, torch.Tensor],
    there: Mapping[str, Entry],
    tied: Mapping[str, str],
    allowed: Allowed,
) -> tuple[list[str], list[str]]:
    """Names that keep their values and names that are not used; refuses the rest of the differences."""
    twins: dict[str, set[str]] = {}
    for name, first in tied.items():
        twins.setdefault(first, {first}).add(name)
    present = set(there)
    for group in twins.values():
        present |= group if group & set(there) else set()
    missing, surplus = sorted(set(here) - present), sorted(set(there) - set(here))
    bad_missing = [name for name in missing if name not in allowed]
    bad_surplus = [name for name in surplus if name not in allowed]
    misfits = list(_misfits(here, there))
    if bad_missing or bad_surplus or misfits:
        raise WeightsError(
            f"{path} does not fit the model. Not in the file: {_some(bad_missing)}. Only in the file: "
            f"{_some(bad_surplus)}. Of another shape or type: {_some(misfits, '; ')}. Use the model that these "
            "weights are of; names that may differ are allowed by allow_missing (--saving.allow-missing model.NAME)."
        )
    return missing, surplus


def _misfits(here: Mapping[str, torch.Tensor], there: Mapping[str, Entry]) -> Iterator[str]:
    for name in sorted(set(here) & set(there)):
        ours, saved = Entry.of(here[name]), there[name]
        both_float = ours.dtype.is_floating_point and saved.dtype.is_floating_point
        if ours.shape != saved.shape or not (both_float or ours.dtype == saved.dtype):
            yield f"{name} is {ours} here and {saved} in the file"


def _check_tied(
    path: Path,
    safetensors: Any,
    where: Mapping[str, Path],
    name: str,
    first: str,
    value: torch.Tensor,
) -> None:
    with _open(safetensors, where[first]) as content:
        same = torch.equal(content.get_tensor(first), value)
    if not same:
        raise WeightsError(
            f"{path}: {name} and {first} are one parameter of the model, and have different values in the file. "
            "Use a model that does not tie them."
        )


@torch.no_grad()
def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        whole = value.to(device=target.device_mesh.device_type, dtype=target.dtype)
        # Every rank has read the same: nothing is sent (src_data_rank would send rank 0's).
        value = distribute_tensor(
            whole, target.device_mesh, target.placements, src_data_rank=None
        ).to_local()
        target = target.to_local()
    target.copy_(value)


def _some(names: Sequence[str], comma: str = ", ") -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return comma.join(names[:_SHOWN]) + more
