"""What becomes of a save: a checkpoint that is committed, one that the guard refused, or a failed try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.errors import ManifestError, StorageError, UnsaneStateError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tracker.checkpoint_memory import DURABLE
from ray_ckpt.tracker.keeper import Keeper
from ray_ckpt.tracker.places import Places
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import RunFacts
from ray_ckpt.tracker.sanity import Sanity
from ray_ckpt.tracker.segments import SegmentBook
from ray_ckpt.tracker.shelf import new_manifest
from ray_ckpt.tracker.standing import Standing
from ray_ckpt.tracker.steering import Steering
from ray_ckpt.tracker.stragglers import Stragglers


class Saves:
    """Saves of one run.

    Args:
        facts: what stays the same for the run.
        first_tier: that the workers write into.
        record: puts an event on record.
        standing: where the run stands.
        steering: decides anew after each commit.
        segments: of the run.
        sanity: lets a state pass.
        places: where checkpoints are.
        keeper: keeps them.
        stragglers: looks at what each rank needed.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        facts: RunFacts,
        first_tier: str,
        record: Recorder,
        standing: Standing,
        steering: Steering,
        segments: SegmentBook,
        sanity: Sanity,
        places: Places,
        keeper: Keeper,
        stragglers: Stragglers,
        clock: Callable[[], float],
    ) -> None:
        self._facts, self._first_tier, self._clock = facts, first_tier, clock
        self._record, self._memory = record, record.memory
        self._standing, self._steering, self._segments = standing, steering, segments
        self._sanity, self._places, self._keeper = sanity, places, keeper
        self._stragglers = stragglers

    def commit(self, generation: int, save: dict[str, Any]) -> bool:
        """Makes a written checkpoint usable, or says in the journal why not.

        Args:
            generation: of the writer, which is the present one.
            save: see :meth:`ray_ckpt.tracker.core.TrackerCore.commit`.

        Returns:
            Whether the checkpoint is committed.
        """
        step = int(save["step"])
        name = checkpoint_name(step, generation)
        try:
            manifest, problem = self._put(name, generation, save)
        except UnsaneStateError as error:
            self._places.set_aside(name, self._unchecked_manifest(generation, save), save)
            self._sanity.set_aside(name, save, error)
            self._keeper.after_save()  # of these too only a few are kept
            return False
        if manifest is None and problem:
            self._record("save_failed", step=step, name=name, error=problem)
            self._places.discard(name)
            self._keeper.after_save()  # what may go may be what fills the disk
            return False
        if manifest is None or name in self._memory.committed:
            return True  # the same call again: the answer to the first was lost
        fault_point("commit.placed")
        # Before the commit is on record: a tracker that dies in between is asked again, and pins again.
        self._pin_first_of_segment(name)
        self._record(
            "commit",
            step=step,
            name=name,
            tier=DURABLE if save.get("direct") else self._first_tier,
            bytes=manifest.total_bytes,
            files=len(manifest.files),
            world_size=manifest.world_size,
            sample_offset=manifest.sample_offset,
            tokens=manifest.tokens,
            loss=_finite(manifest.metrics.get("loss")),
            request=int(save.get("request", 0)),
            stall_s=float(save["stall_s"]),
            upload_s=float(save["upload_s"]),
            exposure_s=self._memory.exposure_s,
            param_norm=manifest.guard.get("param_norm"),
            guard_s=manifest.guard.get("seconds"),
            validation_loss=manifest.metrics.get("validation_loss"),
            validation_s=manifest.validation.get("seconds"),
        )
        fault_point("commit.told")
        self._steering.saved(self._standing.step - step, float(save["upload_s"]))
        self._places.committed(name)
        self._stragglers.saved(step, save.get("paces", ()))
        return True

    def manifest(self, generation: int, save: Mapping[str, Any]) -> Manifest:
        """The manifest of a save whose state may be committed.

        Raises:
            UnsaneStateError: it must not.
        """
        self._sanity.check(save["guard"])
        return self._unchecked_manifest(generation, save)

    def _unchecked_manifest(self, generation: int, save: Mapping[str, Any]) -> Manifest:
        return new_manifest(
            self._facts,
            generation,
            save,
            committed_at=self._clock(),
            segment=self._segments.newest,
        )

    def _pin_first_of_segment(self, name: str) -> None:
        """Keeps the first checkpoint of a segment: the way back to what the segment began as."""
        segment = self._segments.newest
        if not segment.number or self._memory.first_of_segment not in ("", name):
            return
        self._places.keep(name, f"first checkpoint of segment {segment.number} ({segment.reason})")

    def _put(self, name: str, generation: int, save: dict[str, Any]) -> tuple[Manifest | None, str]:
        try:
            fault_point("commit.check")
            return self._places.put(name, generation, save)
        except (ManifestError, StorageError, OSError, ValueError) as error:
            return None, str(error)
        except (TypeError, LookupError) as error:
            return None, f"the report of the save cannot be understood ({error!r})"


def _finite(value: float | None) -> float | None:
    """A number that every reader of JSON knows."""
    return value if value is not None and math.isfinite(value) else None
