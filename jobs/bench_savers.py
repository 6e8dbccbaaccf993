"""Ways to save and restore one sharded state, each behind the same four calls; for jobs/bench_checkpoint.py.

A saver is asked to ``begin`` a save (training stands still), to let ``step`` happen (it may have to wait for a copy),
to ``wait`` until the bytes are safe, and to ``restore``. ``busy`` says whether it still writes.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ray_ckpt.checkpoint.manifest import FileEntry, Manifest, write_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.checkpoint.restore import load, verify_together
from ray_ckpt.checkpoint.restore import with_rng as with_generators
from ray_ckpt.checkpoint.saver import Saver, SaveResult
from ray_ckpt.checkpoint.staging import Stager
from ray_ckpt.config import StagingMode
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.tiers.depot import Depot
from ray_ckpt.tiers.throttle import Throttle
from ray_ckpt.tiers.wire import FileServer, fetch

TENSORS = 16
CPU = torch.device("cpu")


def make_state(total_bytes: int) -> TrainState:
    """A model in shards and its AdamW, of so many bytes over all of 1 or 2 ranks; a third of it parameters."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    rows = max(1, total_bytes // (2 * 3 * TENSORS * 4 * 1024)) * 2 // world
    module = torch.nn.Module()
    for i in range(TENSORS):
        part = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(i))
        whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        module.register_parameter(f"w{i:02d}", torch.nn.Parameter(whole))
    return TrainState(model=module, optimizer=torch.optim.AdamW(module.parameters()))


def local_parts(state: TrainState) -> list[torch.Tensor]:
    """This rank's tensors of a state, as plain ones."""
    found: list[torch.Tensor] = []
    for part in ("model", "optimizer"):
        for tensor in state.state_dict()[part].values():
            found.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return [tensor.detach() for tensor in found]


class SaverUnderTest(Protocol):
    """One way to save."""

    def begin(self, folder: Path) -> None: ...

    def step(self) -> None: ...

    def busy(self) -> bool: ...

    def wait(self) -> None: ...

    def restore(self, folder: Path) -> None: ...

    def place(self, base: Path, name: str) -> Path:
        """Where it saves to."""
        ...


class Plain:
    """``dcp.save``: training stands still until all is written."""

    def __init__(self, state: TrainState, group: dist.ProcessGroup) -> None:
        self.state, self.group = state, group

    def begin(self, folder: Path) -> None:
        dcp_save(self.state.state_dict(), checkpoint_id=folder, process_group=self.group)

    def place(self, base: Path, name: str) -> Path:
        return base / name

    def step(self) -> None:
        pass

    def busy(self) -> bool:
        return False

    def wait(self) -> None:
        pass

    def restore(self, folder: Path) -> None:
        dcp_load(self.state.state_dict(), checkpoint_id=folder, process_group=self.group)


class PlainAsync(Plain):
    """``dcp.async_save`` as its documentation has it."""

    future: Future[Any] | None = None

    def begin(self, folder: Path) -> None:
        self.future = cast(
            "Future[Any]",
            dcp_async_save(self.state.state_dict(), checkpoint_id=folder, process_group=self.group),
        )

    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()


class TorchCheckpointing:
    """Meta's ``torch_checkpointing``: staged by a thread, written by a process, each rank its own file."""

    def __init__(self, state: TrainState, group: dist.ProcessGroup) -> None:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.state, self.future = state, cast("Future[Any] | None", None)
        # Its direct I/O ends in EINVAL (seen with 0.1.1): torch.save writes pieces that are not aligned.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        process = CheckpointProcessConfig(subprocess_init_timeout_secs=180)
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                storage_config=storage, save=AsyncCheckpointSaverConfig(process_config=process)
            )
        )
        self.manager.prewarm_staging(self._items())

    def _items(self) -> dict[str, Any]:
        return {f"t{i:03d}": part for i, part in enumerate(local_parts(self.state))}

    def place(self, base: Path, name: str) -> Path:
        return base / name

    def begin(self, folder: Path) -> None:
        self.future = self.manager.save(str(folder), self._items())

    def step(self) -> None:
        with self.manager.lock():
            pass

    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()
        dist.barrier()

    def restore(self, folder: Path) -> None:
        self.manager.load(str(folder), into=self._items())


class Ours:
    """This project: staging into kept buffers, checksums and fsync while writing, the manifest last."""

    def __init__(self, state: TrainState, group: dist.ProcessGroup, mode: StagingMode) -> None:
        self.state, self.group, self.root = state, group, Path()
        self._number = 0
        self._stager = Stager(mode, state.optimizers)
        self._stager.prepare(self._full())
        self._saver: Saver | None = None

    def _full(self) -> dict[str, Any]:
        return with_generators(self.state.state_dict(), dist.get_rank(), CPU)

    def place(self, base: Path, name: str) -> Path:
        return base / name

    def begin(self, folder: Path) -> None:
        self._number += 1
        self.folder = folder
        self._saver = Saver(
            run_dir=folder,
            generation=1,
            group=self.group,
            stager=self._stager,
            on_result=self._commit,
        )
        self._saver.save(self._number, self._full)

    def step(self) -> None:
        # Without gradients the step changes nothing; what waits for the copy is the hook before it.
        for optimizer in self.state.optimizers:
            optimizer.step()

    def busy(self) -> bool:
        return self._saver is not None and self._saver.busy

    def wait(self) -> None:
        assert self._saver is not None
        self._saver.wait(600)

    def _commit(self, result: SaveResult) -> None:
        assert result.error is None, result.error
        manifest = Manifest(
            run="bench",
            step=result.step,
            sample_offset=0,
            tokens=0,
            world_size=dist.get_world_size(),
            generation=1,
            committed_at=time.time(),
            files=result.files,
            parallel="fsdp",
            guard={},
            metrics={},
            config_fingerprint="",
            data_fingerprint="",
            versions={},
            bitwise_comparable=True,
        )
        write_manifest(self._place(self.folder, result.step), manifest)

    def restore(self, folder: Path) -> None:
        restore_committed(self.state, folder, self.group)

    @staticmethod
    def _place(folder: Path, step: int) -> Path:
        return folder / CHECKPOINTS_DIR / checkpoint_name(step, 1)


class OursInMemory(Ours):
    """The same in the memory tier: files in shared memory."""

    def place(self, base: Path, name: str) -> Path:
        return Path(shared_memory()) / f"{base.name}-{name}"


class PlainProcess(PlainAsync):
    """``dcp.async_save`` with its writer in a process of its own."""

    def begin(self, folder: Path) -> None:
        self.future = cast(
            "Future[Any]",
            dcp_async_save(
                self.state.state_dict(),
                checkpoint_id=folder,
                process_group=self.group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ),
        )


def shared_memory() -> str:
    """A folder in memory."""
    return "/dev/shm"


def copies_over_tcp(place: Path, size: int, count: int) -> list[float]:
    """Times of copies of a file from another process into a depot here, compared on the way, seconds."""
    name, token = checkpoint_name(1, 1), secrets.token_bytes(32)
    source = Depot(place / "there", sync=False)
    data = secrets.token_bytes(1 << 20)
    path = source.folder(name) / "file"
    path.parent.mkdir(parents=True)
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        for _ in range(max(1, size >> 20)):
            file.write(data)
            digest.update(data)
    entry = FileEntry("file", path.stat().st_size, digest.hexdigest())
    context = multiprocessing.get_context("spawn")
    addresses: Queue[tuple[str, int]] = context.Queue()
    server = context.Process(target=_serve, args=(place / "there", token, addresses), daemon=True)
    server.start()
    try:
        address = addresses.get(timeout=60)
        times = []
        for number in range(count):
            into = Depot(place / f"here-{number}", sync=False)
            started = time.perf_counter()
            fetch(address, token, "memory", name, entry, into, Throttle())
            times.append(time.perf_counter() - started)
            shutil.rmtree(into.root)
    finally:
        server.kill()
        server.join()
    return times


def _serve(root: Path, token: bytes, addresses: Any) -> None:
    depot = Depot(root, sync=False)
    with FileServer(
        lambda tier, name, path: depot.find(name, path), host="127.0.0.1", token=token
    ) as server:
        addresses.put(server.address)
        threading.Event().wait()


def restore_committed(state: TrainState, folder: Path, group: dist.ProcessGroup) -> None:
    """Verifies every byte with all ranks, then loads."""
    from ray_ckpt.checkpoint.listing import list_checkpoints, usable

    entry = usable(list_checkpoints(folder))[0]
    assert entry.manifest is not None
    faults = verify_together(entry.folder, entry.manifest, group)
    assert not faults, faults
    load(state, entry.folder, entry.manifest, group, CPU)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))


class RawCopy:
    """One memory copy of a rank's bytes into buffers that are there."""

    def __init__(self, state: TrainState) -> None:
        self.parts = local_parts(state)
        self.buffers = [torch.empty_like(part).copy_(part) for part in self.parts]

    def __call__(self) -> None:
        for buffer, part in zip(self.buffers, self.parts, strict=True):
            buffer.copy_(part)

    def write(self, path: Path) -> None:
        """Writes the bytes to a file, and syncs it."""
        with path.open("wb") as file:
            for part in self.parts:
                file.write(_bytes_of(part))
            file.flush()
            os.fsync(file.fileno())

    def read(self, path: Path) -> None:
        """Reads them back."""
        with path.open("rb", buffering=0) as file:
            for buffer in self.buffers:
                file.readinto(_bytes_of(buffer))


def makers(state: TrainState, group: dist.ProcessGroup) -> dict[str, Callable[[], SaverUnderTest]]:
    """The ways to save that can be tried here, by name."""
    found: dict[str, Callable[[], SaverUnderTest]] = {
        "dcp.save": lambda: Plain(state, group),
        "dcp.async_save": lambda: PlainAsync(state, group),
        "ray_ckpt blocking": lambda: Ours(state, group, "blocking"),
        "ray_ckpt overlapped": lambda: Ours(state, group, "overlapped"),
        "ray_ckpt memory tier": lambda: OursInMemory(state, group, "blocking"),
    }
    if dist.get_world_size() == 1:
        # At two ranks of 1 GiB its writers did not live through a bench of all the others (24 GiB of memory).
        found["dcp.async_save process"] = lambda: PlainProcess(state, group)
    try:
        import torch_checkpointing  # noqa: F401
    except ImportError:
        return found
    return {**found, "torch_checkpointing": lambda: TorchCheckpointing(state, group)}


def remove(folder: Path) -> None:
    """Rank 0 removes what a save left, when all are done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
