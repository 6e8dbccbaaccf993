"""The tracker's list of segments: which one an attempt trains in, and the record of it in ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_ckpt.errors import RestoreError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.segment import Placement, Segment, place
from ray_ckpt.tracker.identity import (
    IDENTITY_NAME,
    RunRecord,
    check_change,
    read_record,
    write_record,
)
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import RunFacts


class SegmentBook:
    """Reads the list when a tracker starts; the tracker, which holds the run's lock, is all who changes it.

    Args:
        facts: of the start that is made now: its options, and why they are others, if they are.
        record: puts an event on record.
    """

    def __init__(self, facts: RunFacts, record: Recorder) -> None:
        self._dir, self._change, self._record = Path(facts.run_dir), facts.change_reason, record
        self._now = RunRecord.of(facts.identity)
        self._list = read_record(self._dir) or self._now

    @property
    def newest(self) -> Segment:
        """The segment that commits belong to."""
        return self._list.segments[-1]

    def enter(
        self, step: int, samples: int, mark: Mapping[str, Any] | None, source: str
    ) -> Segment:
        """The segment that an attempt trains in; where one starts, that is put on record first.

        Args:
            step: where the attempt begins.
            samples: its sample offset.
            mark: what the manifest of the checkpoint it restored says of its segment; None for no checkpoint.
            source: the checkpoint's name, empty for none.

        Raises:
            ConfigError: the options are others than those of the record, and nobody declared it.
            RestoreError: the checkpoint is not of the segment that the record says.
            StorageError: the start of a segment cannot be put on record.
        """
        placement = self._place(step, samples, mark, source)
        segment = placement.segment
        if placement.cause:
            fault_point("segment.start")
            # The journal first: without the line in run.json the next attempt does both again.
            self._record(
                "segment",
                number=segment.number,
                step=segment.start_step,
                sample_offset=segment.start_offset,
                reason=segment.reason,
                cause=placement.cause,
                source=source,
                changed={
                    k: {"old": old, "new": new} for k, (old, new) in placement.changed.items()
                },
                must=True,
            )
            fault_point("segment.recorded")
            self._keep(placement)
        return segment

    def _place(
        self, step: int, samples: int, mark: Mapping[str, Any] | None, source: str
    ) -> Placement:
        """Which segment an attempt is in that restored a checkpoint; nothing is changed."""
        # Once more: the record may have changed between the driver's look at it and the lock on the run.
        check_change(self._dir, self._list, self._now, self._change)
        placement = place(
            self._list.segments,
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

    def _keep(self, placement: Placement) -> None:
        """Puts the list on record."""
        changed = replace(self._list, segments=placement.segments)
        write_record(self._dir, changed)
        self._list = changed
