"""Reads DCP's files by mapping them, and copies from there straight into the state.

DCP's own reader makes a tensor of each stored one (``torch.load``) and copies that: several copies of every byte.
The bytes of a tensor lie in the file as they lie in memory, inside a zip archive that ``torch.save`` wrote without
compression. So the archive's directory is read, the file is mapped, and the target copies from the map: once, only
what the new layout needs.

What is not stored in this way (another byte order, a compressed archive, another kind of pickle) is left to DCP's own
reader; nothing is guessed. The small pickle that tells shape and layout of a tensor is read by an unpickler that knows
a handful of names and makes nothing of what they name.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import struct
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ray_ckpt.checkpoint.paths import NotPlainFileError, open_plain

_LOCAL_HEADER = struct.Struct(
    "<4s22xHH"
)  # of a zip member: signature, lengths of name and extra field
_LOCAL_SIGNATURE = b"PK\x03\x04"
_FEW_BYTES = 1 << 16  # a pickle of one tensor is some hundred bytes; more is something else
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stored tensor lies in its file.

    Attributes:
        dtype: of its elements.
        offset: of its first element in the file, bytes.
        numel: elements of the storage, from there.
        size: of the tensor.
        stride: elements.
    """

    dtype: torch.dtype
    offset: int
    numel: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class NotMappableError(Exception):
    """Stored in another way than ``torch.save`` stores a tensor; to be read by DCP's own reader."""


class PlainReader(FileSystemReader):
    """DCP's file reader; what became a link since it was verified is not followed, whatever is read."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.fs = _PlainFiles()


class MappedReader(PlainReader):
    """The same, with the copies of tensors from a map of the file."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = defaultdict(list)
        left: list[ReadItem] = []
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if item.type == LoadItemType.TENSOR and not place.transform_descriptors:
                per_file[place.relative_path].append(item)
            else:
                left.append(item)
        for name, items in per_file.items():
            left += self._copy_from(Path(self.path) / name, items, planner)
        # Also when nothing is left: it is DCP's to say that all is done.
        return super().read_data(LoadPlan(left), planner)

    def _copy_from(self, path: Path, items: list[ReadItem], planner: LoadPlanner) -> list[ReadItem]:
        """Copies what can be mapped; returns the rest."""
        left: list[ReadItem] = []
        with self.fs.create_stream(path, "rb") as stream:
            file = cast("IO[bytes]", stream)
            view = _mapped(file)
            for item in items:
                place = self.storage_data[item.storage_index]
                try:
                    layout = read_layout(file, place.offset, place.length)
                except NotMappableError:
                    left.append(item)
                    continue
                source = narrow_tensor_by_index(
                    tensor_in(view, layout), item.storage_offsets, item.lengths
                )
                target = planner.resolve_tensor(item).detach()
                if target.size() != source.size():
                    raise ValueError(
                        f"{item.dest_index.fqn}: {list(source.size())} in the checkpoint, {list(target.size())} here"
                    )
                target.copy_(source)
                planner.commit_tensor(item, target)
        return left


class _PlainFiles(FileSystem):
    """Opens what is a file of the checkpoint itself, and nothing else."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        assert mode == "rb", mode  # for reading only
        try:
            handle = open_plain(Path(path))
        except NotPlainFileError as error:
            raise OSError(
                f"{path} is no regular file any more: it was changed since it was verified"
            ) from error
        with open(handle, "rb") as file:
            yield file


def tensor_in(view: mmap.mmap, layout: Layout) -> torch.Tensor:
    """A tensor whose memory is a part of a map."""
    if math.prod(layout.size) == 0:
        return torch.empty(layout.size, dtype=layout.dtype)
    flat = torch.frombuffer(view, dtype=layout.dtype, count=layout.numel, offset=layout.offset)
    return flat.as_strided(layout.size, layout.stride)


def read_layout(file: IO[bytes], start: int, length: int) -> Layout:
    """Where the tensor in one stored item lies.

    Args:
        file: that holds the item.
        start: where the item begins in it.
        length: of the item, bytes.

    Raises:
        NotMappableError: it is not a plain tensor of ``torch.save`` in this machine's byte order.
    """
    try:
        with zipfile.ZipFile(cast("IO[bytes]", _Slice(file, start, length))) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
                raise NotMappableError("compressed")
        if _few_bytes(file, start, members["byteorder"]).decode() != sys.byteorder:
            raise NotMappableError("another byte order")
        stored = _TensorPickle(_few_bytes(file, start, members["data.pkl"])).read()
        member = members[f"data/{stored.key}"]
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, EOFError, RuntimeError) as error:
        raise NotMappableError(str(error)) from error
    return stored.layout(_place(file, start, member), member.file_size, start + length)


def _place(file: IO[bytes], start: int, member: zipfile.ZipInfo) -> int:
    """Where the content of a member of the archive at ``start`` begins in the file."""
    at = start + member.header_offset
    file.seek(max(at, 0))
    header = file.read(_LOCAL_HEADER.size)
    if at < start or len(header) < _LOCAL_HEADER.size or header[:4] != _LOCAL_SIGNATURE:
        raise NotMappableError("no archive member where one should be")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    return at + _LOCAL_HEADER.size + name_bytes + extra_bytes


def _few_bytes(file: IO[bytes], start: int, member: zipfile.ZipInfo) -> bytes:
    """The content of a small member; not by ``zipfile``, which asks for a CRC that our writer leaves out."""
    if member.file_size > _FEW_BYTES:
        raise NotMappableError("more than a tensor")
    file.seek(_place(file, start, member))
    content = file.read(member.file_size)
    if len(content) < member.file_size:
        raise NotMappableError("a member that is cut off")
    return content


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the pickle of a tensor says."""

    key: str
    dtype: torch.dtype
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def layout(self, data: int, data_bytes: int, end: int) -> Layout:
        item = self.dtype.itemsize
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        last = self.first + (reach + 1 if math.prod(self.size) else 0)
        if (
            min(self.first, *self.stride, 0) < 0
            or last * item > data_bytes
            or data + data_bytes > end
        ):
            raise NotMappableError("it reaches out of its storage")
        return Layout(
            self.dtype, data + self.first * item, last - self.first, self.size, self.stride
        )


class _TensorPickle(pickle.Unpickler):
    """Reads the pickle of one tensor without making anything that it names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def read(self) -> _Stored:
        try:
            found = self.load()
        except (pickle.UnpicklingError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise NotMappableError(str(error)) from error
        if not isinstance(found, _Stored):
            raise NotMappableError(f"a {type(found).__name__}, not a tensor")
        return found

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
            ("collections", "OrderedDict"): dict,
        }
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) not in known:
            raise NotMappableError(f"{module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        kind, dtype, key, _location, _numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise NotMappableError("no storage")
        return str(key), dtype


def _rebuild(storage: Any, first: int, size: Any, stride: Any, *more: Any) -> _Stored:
    if len(more) > 2 and more[2]:
        raise NotMappableError("a conjugate or negative view")
    key, dtype = storage
    return _Stored(key, dtype, int(first), tuple(map(int, size)), tuple(map(int, stride)))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


class _Slice:
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = to + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise zipfile.BadZipFile("not an archive")
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if count < 0 else min(count, left))
        self._at += len(data)
        return data


def _mapped(file: IO[bytes]) -> mmap.mmap:
    # Copy on write, and nobody writes: torch warns of memory that it may not write to.
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view.madvise(mmap.MADV_WILLNEED)
    # Not closed here: a map ends when the last tensor in it does.
    return view
