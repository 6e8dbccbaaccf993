"""What is known of one checkpoint: from its manifest where that can be read, and else from the run's journal.

A manifest on a node cannot be read from here, and the journal tells of every commit. So a checkpoint that only nodes
have has its size, its loss and its times as one in the durable tier has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines
from ray_ckpt.view.chronicle import CheckpointLine, Chronicle
from ray_ckpt.view.human import ago, human_bytes, human_count, human_duration


def chronicle_in(run_dir: Path) -> Chronicle:
    """All that the journal in a folder tells.

    Raises:
        StorageError: it cannot be read.
    """
    chronicle = Chronicle()
    for event in read_lines(run_dir / JOURNAL_NAME):
        chronicle.apply(event)
    return chronicle


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Of one checkpoint; None for what nobody tells.

    Attributes:
        committed_at: first commit, in whatever tier, seconds since the epoch.
        bytes: size of its files.
        files: how many.
        world_size: workers that wrote it.
        sample_offset: samples trained on.
        tokens: the same in tokens.
        loss: of its step.
        validation_loss: measured for drills.
        param_norm: norm of the parameters that the guard saw.
        stall_s: time that training stood still for it, seconds.
        upload_s: time from there to the commit, seconds.
        read_back: tier to when all its bytes there were last read and compared, seconds since the epoch.
    """

    committed_at: float | None = None
    bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    sample_offset: int | None = None
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    param_norm: float | None = None
    stall_s: float | None = None
    upload_s: float | None = None
    read_back: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Fields of a listing for scripts."""
        return {
            "committed_at": self.committed_at,
            "world_size": self.world_size,
            "sample_offset": self.sample_offset,
            "bytes": self.bytes,
            "loss": self.loss,
            "stall_s": self.stall_s,
            "upload_s": self.upload_s,
            "read_back": self.read_back,
        }

    def cells(self, now_s: float) -> tuple[str, str, str, str]:
        """Age, size, workers and samples, as a table shows them."""
        return (
            "-" if self.committed_at is None else ago(self.committed_at, now_s),
            "-" if self.bytes is None else human_bytes(self.bytes),
            "-" if self.world_size is None else str(self.world_size),
            "-" if self.sample_offset is None else human_count(self.sample_offset),
        )

    def fields(self, now_s: float) -> list[tuple[str, str]]:
        """Lines for people, of what is known."""
        when = self.committed_at
        found = {
            "committed_at": when and f"{_moment(when)} ({ago(when, now_s)})",
            "world_size": self.world_size,
            "sample_offset": _counted(self.sample_offset),
            "tokens": _counted(self.tokens),
            "metrics.loss": self.loss,
            "metrics.validation_loss": self.validation_loss,
            "guard.param_norm": self.param_norm,
            "files": self.bytes is not None and f"{self.files}, {human_bytes(self.bytes)}",
        }
        lines = [(name, str(value)) for name, value in found.items() if value not in (None, False)]
        return lines + self.times()

    def times(self) -> list[tuple[str, str]]:
        """What the save took, as lines for people; no manifest tells that."""
        found = {"stall": self.stall_s, "upload": self.upload_s}
        return [(name, human_duration(each)) for name, each in found.items() if each is not None]


def facts_of(entry: Listed, line: CheckpointLine | None, tiers: Collection[str]) -> Facts:
    """What is known of a checkpoint.

    Args:
        entry: what a listing of the durable tier knows.
        line: what the journal tells.
        tiers: that have it.
    """
    known: dict[str, Any] = {}
    if line is not None:
        read = dict(line.read_back)
        if line.verified_at is not None:
            read["durable"] = line.verified_at
        known = {each.name: getattr(line, each.name) for each in fields(Facts)}
        known["read_back"] = {tier: read[tier] for tier in tiers if tier in read}
    if (manifest := entry.manifest) is not None:
        known |= {
            "committed_at": manifest.committed_at,
            "bytes": manifest.total_bytes,
            "files": len(manifest.files),
            "world_size": manifest.world_size,
            "sample_offset": manifest.sample_offset,
            "tokens": manifest.tokens,
            "loss": manifest.metrics.get("loss"),
        }
    return Facts(**known)


def _counted(value: int | None) -> str | None:
    return None if value is None else f"{value} ({human_count(value)})"


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().isoformat(" ", "seconds")
