"""One save: stage, go on training, write in the background, hand the file list to the tracker.

Training stands still for the staging copy alone, or for what is left of it at the optimizer's next step
(:mod:`ray_ckpt.checkpoint.staging`). The rest happens in one background thread per rank, on a gloo group that
nothing else uses: DCP plans and writes, then the ranks' file lists are gathered on rank 0. A rank that failed
still takes part in the gather, so that a full disk on one node is a failed save and not a stuck one.

There is at most one save in flight; a second would double the staging memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ray_ckpt.checkpoint.guard import Scan, report
from ray_ckpt.checkpoint.manifest import FileEntry
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.checkpoint.staging import StagedCopy, Stager
from ray_ckpt.checkpoint.writer import ChecksumWriter
from ray_ckpt.fault_points import fault_point

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
        guard: what the guard found in the state (:func:`ray_ckpt.checkpoint.guard.report`).
        places: node to the files that its ranks wrote.
        paces: node of each rank, and the mean time of its forward passes since the save before, seconds.
    """

    step: int
    files: tuple[FileEntry, ...]
    stall_s: float
    write_s: float
    error: str | None
    guard: dict[str, Any] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)
    paces: list[tuple[str, float | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank tells rank 0."""

    files: list[FileEntry]
    stall_s: float
    error: str | None
    scan: Scan | None = None
    node: str = ""
    pace_s: float | None = None


class Saver:
    """Saves states of one attempt.

    Args:
        run_dir: the run's folder in the tier that ranks write into; on one node, or the same for all ranks.
        node: that this rank is on.
        generation: of this attempt; part of the checkpoints' names.
        group: gloo process group of all ranks that nothing else uses.
        stager: makes the copies.
        signed: whether the manifest will be signed, which takes a SHA-256 of every file.
        on_result: called on rank 0, in the background thread, with the outcome of each save.
        inspect: called on every rank, in the background thread, with the staged copy of its state.
        pace: called on every rank at each save: what rides with its share for the tracker, seconds.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        generation: int,
        group: dist.ProcessGroup,
        stager: Stager,
        on_result: Callable[[SaveResult], None],
        inspect: Callable[[dict[str, Any]], Scan] | None = None,
        signed: bool = False,
        node: str = "",
        pace: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._inspect, self._signed, self._node = inspect, signed, node
        self._run_dir, self._generation, self._group = run_dir, generation, group
        self._on_result = on_result
        self._stager, self._pace = stager, pace
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, state_dict: dict[str, Any]) -> None:
        """Makes the staging buffers, so that the first save costs what the tenth costs."""
        self._stager.prepare(state_dict)

    def save(
        self, step: int, state_dict: Callable[[], dict[str, Any]], run_dir: Path | None = None
    ) -> float:
        """Begins a save of what ``state_dict()`` gives; returns when training may go on.

        Every rank calls this at the same step. Nothing that goes wrong here is raised: the outcome is
        told to ``on_result``.

        Args:
            step: optimizer steps finished in the state.
            state_dict: gives the state.
            run_dir: the run's folder in another tier than the usual one, the same on all ranks.

        Returns:
            The stall so far, seconds.
        """
        if self.busy:
            raise RuntimeError("a save is in flight; wait() for it first")
        started = time.monotonic()
        base = run_dir or self._run_dir
        folder = base / CHECKPOINTS_DIR / checkpoint_name(step, self._generation)
        writer = ChecksumWriter(folder, strong=self._signed)
        copy: StagedCopy | None = None
        error: str | None = None
        try:
            fault_point("save.stage")
            copy = self._stager.begin(state_dict())
        except Exception as caught:  # noqa: BLE001 - a failed save never stops training
            error = _describe(caught)
        stall_s = time.monotonic() - started
        self._thread = threading.Thread(
            target=self._finish,
            args=(step, writer, copy, stall_s, error, self._pace()),
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

    def _look(self, state: dict[str, Any]) -> tuple[Scan | None, str | None]:
        """What the guard sees in the staged copy; or why it could not look, and then nothing is committed."""
        if self._inspect is None:
            return None, None
        try:
            return self._inspect(state), None
        except Exception as caught:  # noqa: BLE001 - a failed save never stops training
            return None, f"the guard could not look at the state ({_describe(caught)})"

    def _finish(
        self,
        step: int,
        writer: ChecksumWriter,
        copy: StagedCopy | None,
        stall_s: float,
        error: str | None,
        pace_s: float | None,
    ) -> None:
        started = time.monotonic()
        state: dict[str, Any] = {}
        scan: Scan | None = None
        if copy is not None:
            try:
                state = copy.finish()
                fault_point("save.staged")
            except Exception as caught:  # noqa: BLE001 - a failed save never stops training
                error = _describe(caught)
        rank = dist.get_rank(self._group)
        shares: list[Any] | None = [None] * dist.get_world_size(self._group) if rank == 0 else None
        try:
            # DCP writes together or not at all: without this the others would wait for a rank without a copy.
            if self._all(error is None):
                # Side by side: the guard's look is arithmetic, and writing mostly waits for the disk.
                with ThreadPoolExecutor(1, "guard") as pool:
                    looking = pool.submit(self._look, state)
                    error = self._write(state, writer)
                    scan, problem = looking.result()
                error = error or problem
            share = _Share(
                files=writer.entries,
                stall_s=stall_s + (copy.waited_s if copy else 0.0),
                error=error,
                scan=scan,
                node=self._node,
                pace_s=pace_s,
            )
            dist.gather_object(share, shares, group=self._group, group_dst=0)
        except RuntimeError as caught:
            # A peer died: the attempt is ending, and nothing was committed.
            logger.warning("save of step %d: a worker left during the save (%s)", step, caught)
            return
        if shares is not None:
            fault_point("save.report")
            self._on_result(_merge(step, shares, time.monotonic() - started))

    def _all(self, good: bool) -> bool:
        flag = torch.tensor(good, dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def _write(self, state: dict[str, Any], writer: ChecksumWriter) -> str | None:
        """Writes this rank's part; what went wrong."""
        try:
            fault_point("save.write")
            dcp_save(state, storage_writer=writer, process_group=self._group)
            fault_point("save.written")
        # DCP's own exception is not an Exception, and would end the thread without a trace.
        except (Exception, CheckpointException) as caught:  # noqa: BLE001
            return _describe(writer.problem or caught)
        return None


def _merge(step: int, shares: list[_Share], write_s: float) -> SaveResult:
    # DCP tells every rank of every failure: once is enough.
    errors = list(dict.fromkeys(share.error for share in shares if share.error))
    files = [entry for share in shares for entry in share.files]
    places: dict[str, list[str]] = {}
    for share in shares:
        places.setdefault(share.node, []).extend(entry.path for entry in share.files)
    return SaveResult(
        step=step,
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        stall_s=max(share.stall_s for share in shares),
        write_s=write_s,
        error="; ".join(errors[:3]) or None,
        guard=report([share.scan for share in shares if share.scan is not None]),
        places={node: paths for node, paths in places.items() if paths},
        paces=[(share.node, share.pace_s) for share in shares],
    )


def _describe(error: BaseException) -> str:
    """One line; of DCP's collected failures the first one, without its traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"on rank {rank}, {_describe(error.failures[rank][0])}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"
