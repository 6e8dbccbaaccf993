"""Reading by a map gives what DCP's own reader gives, and makes nothing of what a pickle names."""

from __future__ import annotations

import io
import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ray_ckpt.checkpoint import mapped
from ray_ckpt.checkpoint.mapped import Layout, MappedReader, NotMappableError, read_layout
from ray_ckpt.checkpoint.writer import ChecksumWriter, without_crc

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Of any kind, shape and layout: transposed, strided, a part of a larger one, empty."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    whole = torch.randint(0, 100, [n + 1 for n in shape]).to(dtype)
    tensor = whole[tuple(slice(1, None) for _ in shape)] if draw(st.booleans()) else whole
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[::2]
    if tensor.is_floating_point() and draw(st.booleans()):
        return nn.Parameter(tensor)
    return tensor


@given(st.dictionaries(st.sampled_from("abcdef"), tensors(), min_size=1), st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_kind_of_tensor_comes_back_as_it_was(
    state: dict[str, torch.Tensor], ours: bool
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        writer = ChecksumWriter(Path(folder)) if ours else dcp.FileSystemWriter(folder)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
        target: dict[str, Any] = {name: torch.ones_like(t.detach()) for name, t in state.items()}
        dcp.load(target, storage_reader=MappedReader(folder), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor.detach()), name


def _stored(value: Any, compress: bool = False, **replaced: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if not (compress or replaced):
        return buffer.getvalue()
    out = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w", kind) as new:
        for info in old.infolist():
            name = info.filename.partition("/")[2]
            new.writestr(info.filename, replaced.get(name, old.read(info.filename)))
    return out.getvalue()


def _layout(data: bytes, before: bytes = b"", after: bytes = b"") -> Layout:
    return read_layout(io.BytesIO(before + data + after), len(before), len(data))


class _Planted:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/planted-by-a-pickle"),))


NOT_MAPPABLE = {
    "compressed": _stored(torch.ones(3), compress=True),
    "other byte order": _stored(torch.ones(3), byteorder=b"big"),
    "no archive": b"x" * 200,
    "nothing": b"",
    "cut": _stored(torch.ones(100))[:300],
    "a dict": _stored({"a": torch.ones(3)}),
    "two tensors": _stored([torch.ones(3), torch.ones(2)]),
    "a number": _stored(3),
    "conjugate": _stored(torch.ones(3, dtype=torch.complex64).conj()),
    "sparse": _stored(torch.ones(3).to_sparse()),
    "a type without a storage class": _stored(torch.ones(3).to(torch.float8_e4m3fn)),
    "code": _stored(torch.ones(3), **{"data.pkl": pickle.dumps(_Planted())}),
    "a storage that is too short": _stored(torch.ones(30), **{"data/0": b"\0" * 8}),
}


@pytest.mark.parametrize("name", NOT_MAPPABLE)
def test_what_is_not_a_plain_tensor_is_left_to_dcp(name: str) -> None:
    with pytest.raises(NotMappableError):
        _layout(NOT_MAPPABLE[name])
    assert not Path("/tmp/planted-by-a-pickle").exists()


@given(
    start=st.integers(0, 30),
    at=st.integers(0, 10_000),
    flip=st.integers(1, 255),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_a_damaged_item_never_points_out_of_itself(
    start: int, at: int, flip: int, shape: list[int]
) -> None:
    """Bytes are verified before; if one slips through, no byte of another tensor is read for it."""
    data = bytearray(_stored(torch.ones(shape)))
    data[at % len(data)] ^= flip
    try:
        layout = _layout(bytes(data), b"\1" * start, b"\1" * 50)
    except NotMappableError:
        return
    end = layout.offset + layout.numel * layout.dtype.itemsize
    assert start <= layout.offset <= end <= start + len(data)


def test_what_cannot_be_mapped_is_read_all_the_same(tmp_path: Path) -> None:
    state = {
        "small": torch.arange(5.0).to(torch.float8_e4m3fn),
        "plain": torch.arange(12.0).view(3, 4),
    }
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(dict(target), storage_reader=MappedReader(tmp_path), no_dist=True)
    assert torch.equal(target["plain"], state["plain"])
    assert torch.equal(target["small"].float(), state["small"].float())


def test_plain_tensors_are_mapped_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.arange(12.0), "b": nn.Parameter(torch.ones(2, 2))}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", never)
    seen: list[Layout] = []
    tensor_in = mapped.tensor_in

    def counted(view: Any, layout: Layout) -> torch.Tensor:
        seen.append(layout)
        return tensor_in(view, layout)

    monkeypatch.setattr(mapped, "tensor_in", counted)
    target = {"a": torch.zeros(12), "b": torch.zeros(2, 2)}
    dcp.load(dict(target), storage_reader=MappedReader(tmp_path), no_dist=True)
    assert torch.equal(target["a"], state["a"])
    assert len(seen) == 2


def test_files_of_the_program_keep_their_crc_while_ours_do_without(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.pt", tmp_path / "ours.pt"
    with ThreadPoolExecutor(1) as pool, without_crc():
        torch.save(torch.arange(99.0), ours)
        pool.submit(torch.save, torch.arange(99.0), theirs).result()
    torch.save(torch.arange(99.0), again := tmp_path / "again.pt")
    for path in (theirs, again):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is not None, "there is nothing to do without"
    assert torch.equal(torch.load(ours), torch.arange(99.0))
