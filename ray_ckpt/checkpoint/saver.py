"""One save: stage, go on training, write in the background, hand the file list to the tracker.

Training stands still for the staging copy alone. Buffers are made once, by :meth:`Saver.prepare`, before
the first step, and reused (a fresh stager costs several copies each time). The rest happens in one
background thread per rank, on a gloo group that nothing else uses: DCP plans and writes, then the ranks'
file lists are gathered on rank 0. A rank that failed still takes part in the gather, so that a full disk
on one node is a failed save and not a stuck one.

There is at most one save in flight; a second would double the staging memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from ray_ckpt.checkpoint.manifest import CHECKPOINTS_DIR, FileEntry, checkpoint_name
from ray_ckpt.checkpoint.writer import ChecksumWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """What all ranks together say of one save; made on rank 0.

    Attributes:
        step: optimizer steps finished in the saved state.
        files: every file, of all ranks.
        stall_s: longest time a rank stood still, seconds.
        write_s: time from the end of the stall until the last rank's files were on the disk, seconds.
        error: what went wrong on which rank; None when all files are in place.
    """

    step: int
    files: tuple[FileEntry, ...]
    stall_s: float
    write_s: float
    error: str | None


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank tells rank 0."""

    files: list[FileEntry]
    stall_s: float
    error: str | None


class Saver:
    """Saves states of one attempt.

    Args:
        run_dir: the run's folder, the same on all ranks.
        generation: of this attempt; part of the checkpoints' names.
        group: gloo process group of all ranks that nothing else uses.
        signed: whether the manifest will be signed, which takes a SHA-256 of every file.
        on_result: called on rank 0, in the background thread, with the outcome of each save.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        generation: int,
        group: dist.ProcessGroup,
        on_result: Callable[[SaveResult], None],
        signed: bool = False,
    ) -> None:
        self._signed = signed
        self._run_dir, self._generation, self._group = run_dir, generation, group
        self._on_result = on_result
        self._stager = DefaultStager(staging_options())
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, state_dict: dict[str, Any]) -> None:
        """Makes the staging buffers, so that the first save costs what the tenth costs."""
        self._stager.stage(state_dict)

    def save(self, step: int, state_dict: Callable[[], dict[str, Any]]) -> float:
        """Begins a save of what ``state_dict()`` gives; returns when the state may change again.

        Every rank calls this at the same step. Nothing that goes wrong here is raised: the outcome is
        told to ``on_result``.

        Returns:
            The stall, seconds.
        """
        if self.busy:
            raise RuntimeError("a save is in flight; wait() for it first")
        started = time.monotonic()
        folder = self._run_dir / CHECKPOINTS_DIR / checkpoint_name(step, self._generation)
        writer = ChecksumWriter(folder, strong=self._signed)
        future: Any = None
        error: str | None = None
        try:
            future = async_save(
                state_dict(),
                storage_writer=writer,
                async_stager=self._stager,
                process_group=self._group,
            )
        except Exception as caught:  # noqa: BLE001 - a failed save never stops training
            error = _describe(caught)
        stall_s = time.monotonic() - started
        self._thread = threading.Thread(
            target=self._finish,
            args=(step, writer, future, stall_s, error),
            name=f"save-{step}",
            daemon=True,  # a peer that died must not keep this process from ending
        )
        self._thread.start()
        return stall_s

    def wait(self, timeout_s: float) -> bool:
        """Waits for the save in flight; False when it is still not done."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def close(self, timeout_s: float) -> bool:
        """Waits for the save in flight and gives the buffers back."""
        done = self.wait(timeout_s)
        if done:
            self._stager.close()
        return done

    def _finish(
        self, step: int, writer: ChecksumWriter, future: Any, stall_s: float, error: str | None
    ) -> None:
        started = time.monotonic()
        if error is None:
            try:
                future.result()
            # DCP's own exception is not an Exception, and would end the thread without a trace.
            except (Exception, CheckpointException) as caught:  # noqa: BLE001
                error = _describe(writer.problem or caught)
        share = _Share(writer.entries, stall_s, error)
        rank = dist.get_rank(self._group)
        shares: list[Any] | None = [None] * dist.get_world_size(self._group) if rank == 0 else None
        try:
            dist.gather_object(share, shares, group=self._group, group_dst=0)
        except RuntimeError as caught:
            # A peer died: the attempt is ending, and nothing was committed.
            logger.warning("save of step %d: a worker left during the save (%s)", step, caught)
            return
        if shares is not None:
            self._on_result(_merge(step, shares, time.monotonic() - started))


def _merge(step: int, shares: list[_Share], write_s: float) -> SaveResult:
    # DCP tells every rank of every failure: once is enough.
    errors = list(dict.fromkeys(share.error for share in shares if share.error))
    files = [entry for share in shares for entry in share.files]
    return SaveResult(
        step=step,
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        stall_s=max(share.stall_s for share in shares),
        write_s=write_s,
        error="; ".join(errors[:3]) or None,
    )


def _describe(error: BaseException) -> str:
    """One line; of DCP's collected failures the first one, without its traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"on rank {rank}, {_describe(error.failures[rank][0])}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def staging_options() -> StagingOptions:
    """Blocking staging into reused buffers; pinned where there is a GPU."""
    import torch

    gpu = torch.cuda.is_available()
    return StagingOptions(
        use_pinned_memory=gpu,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=gpu,
    )
