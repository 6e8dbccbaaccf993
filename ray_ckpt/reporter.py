"""Tells Ray Train of commits, in place and without copying, so that ``Result.checkpoint`` is right.

``ray.train.report`` is a barrier: all ranks call it equally often, at a step where all agreed to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name


class Reporter:
    """Reports the newest commit; commits that come before the last was reported are told as one.

    Args:
        run_dir: the run's folder, which is also Ray Train's.
        rank: of this worker.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._waiting: tuple[str, dict[str, Any]] | None = None
        self._unreported: dict[int, dict[str, float]] = {}  # of saves that are not durable yet

    @property
    def waiting(self) -> bool:
        """Whether a commit waits to be reported; False on ranks other than 0."""
        return self._waiting is not None

    def saved(self, step: int, metrics: dict[str, float]) -> None:
        """Notes the metrics of a save, for when it is in the durable tier; called on rank 0, in the background."""
        self._unreported[step] = metrics

    def committed(self, step: int | None, generation: int) -> None:
        """Notes that a save is in the durable tier, if it was not known before; called on rank 0, by two threads."""
        if step is None or step not in self._unreported:
            return
        self._waiting = checkpoint_name(step, generation), {"step": step, **self._unreported[step]}
        self._unreported = {later: each for later, each in self._unreported.items() if later > step}

    def report(self) -> None:
        """Reports what waits; every rank calls it at the same step."""
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        if self._rank != 0 or self._waiting is None:
            ray.train.report({}, checkpoint=None)
            return
        (name, metrics), self._waiting = self._waiting, None
        ray.train.report(
            metrics,
            checkpoint=Checkpoint.from_directory(self._run_dir / CHECKPOINTS_DIR / name),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )
