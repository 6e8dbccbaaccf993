"""The tracker's list of segments: which one an attempt trains in, and the record of it in ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_ckpt.errors import RestoreError
from ray_ckpt.segment import Placement, Segment, place
from ray_ckpt.tracker.identity import (
    IDENTITY_NAME,
    RunRecord,
    check_change,
    read_record,
    write_record,
)
from ray_ckpt.tracker.records import RunFacts


class SegmentBook:
    """Reads the list when a tracker starts; the tracker, which holds the run's lock, is all who changes it.

    Args:
        facts: of the start that is made now: its options, and why they are others, if they are.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._dir, self._change = Path(facts.run_dir), facts.change_reason
        self._now = RunRecord.of(facts.identity)
        self._record = read_record(self._dir) or self._now

    @property
    def newest(self) -> Segment:
        """The segment that commits belong to."""
        return self._record.segments[-1]

    def place(
        self, step: int, samples: int, mark: Mapping[str, Any] | None, source: str
    ) -> Placement:
        """Which segment an attempt is in that restored a checkpoint; nothing is changed.

        Args:
            step: where it begins.
            samples: its sample offset.
            mark: what the checkpoint's manifest says of its segment; None for no checkpoint.
            source: the checkpoint's name.

        Raises:
            ConfigError: the options are others than those of the record, and nobody declared it.
            RestoreError: the checkpoint is not of the segment that the record says.
        """
        # Once more: the record may have changed between the driver's look at it and the lock on the run.
        check_change(self._dir, self._record, self._now, self._change)
        placement = place(
            self._record.segments,
            self._now.segments[0].options,
            self._change,
            step=step,
            offset=samples,
            origin=None if mark is None else Segment.from_json(mark),
        )
        segment = placement.segment
        batch = segment.options.get("--global-batch")
        if batch is not None and segment.offset_at(step, batch) != samples:
            raise RestoreError(
                f"{source} is at step {step} and sample {samples}; segment {segment.number} of "
                f"{self._dir / IDENTITY_NAME} is at sample {segment.offset_at(step, batch)} there (since step "
                f"{segment.start_step}, with --global-batch {batch}). The record is not that of this checkpoint: "
                "bring the run's own back, or give the options that it had."
            )
        return placement

    def keep(self, placement: Placement) -> None:
        """Puts the list on record.

        Raises:
            StorageError: the disk refused.
        """
        record = replace(self._record, segments=placement.segments)
        write_record(self._dir, record)
        self._record = record
