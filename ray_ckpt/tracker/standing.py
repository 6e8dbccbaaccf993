"""Where a run stands: the steps that its workers tell, each a line of ``steps.jsonl``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ray_ckpt.errors import StorageError
from ray_ckpt.tracker.journal import STEPS_NAME, JsonLines, LineQueue, newest_lines
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.pace import RECENT_STEPS

logger = logging.getLogger(__name__)


class Standing:
    """Executed steps of one run; begins with what its step lines tell.

    Args:
        run_dir: the run's folder.
        memory: of the run.

    Attributes:
        step: the last step executed, less what is counted as lost.
        last_record: line of the last step that this tracker was told of, empty before the first.
        last_generation: newest attempt that had lines of steps when the tracker began.
        newest_step: of the newest line of ``steps.jsonl``, written or about to be; 0 before the first.
        begun_with_s: the times of the last steps at that moment, seconds.
    """

    def __init__(self, run_dir: Path, memory: RunMemory) -> None:
        self._memory = memory
        self._lines = LineQueue(JsonLines(run_dir / STEPS_NAME, sync=False))
        self.step = memory.kept_step
        self.last_generation, recent = newest_lines(run_dir / STEPS_NAME, RECENT_STEPS)
        if memory.attempt_open and self.last_generation == memory.generation:
            self.step = max(self.step, int(recent[-1]["step"]))
        self.newest_step = int(recent[-1]["step"]) if recent else 0
        self.begun_with_s = [float(line["step_time_s"]) for line in recent]
        self.last_record: dict[str, Any] = {}

    def executed(self, generation: int, records: list[dict[str, Any]]) -> list[float]:
        """Takes the lines of executed steps; returns their times, seconds."""
        # The generation that counts is the one that was checked.
        self._lines.add(*[{**record, "generation": generation} for record in records])
        self.flush()
        for record in records:
            self._memory.exposure_s += float(record["step_time_s"])
            # A step after the attempt's end was told stands on what that end kept.
            is_open = self._memory.attempt_open
            self.step = int(record["step"]) if is_open else self.step + 1
            self.last_record = record
            self.newest_step = int(record["step"])
        return [float(record["step_time_s"]) for record in records]

    def flush(self) -> None:
        """Writes the lines that the disk refused before; raises nothing."""
        try:
            self._lines.flush()
        except StorageError:
            logger.exception("steps.jsonl lags behind by %d lines", len(self._lines))
