"""What lies in a run's folder of checkpoints, looked at little by little: a manifest never changes and is read once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ray_ckpt.checkpoint.listing import Listed, look_at
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, parse_checkpoint_name

LIST_EVERY_S = 5.0
_NEWEST = 3  # of these the notes are read at each listing


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What is kept of a manifest and the notes beside it: not the list of files, which is long on many workers.

    Attributes:
        usable: committed, and not set aside.
        committed: a manifest is there, good or damaged.
        unreadable: storage failed, or the signature is not one of a key in use.
        fault: what is wrong; "no manifest" when never committed.
        quarantined: why it must not be used.
        committed_at: seconds since the epoch.
        bytes: size of its files.
        files: how many.
        world_size: workers that wrote it.
        sample_offset: samples trained on.
        segment: number of it.
        metrics: at its step.
    """

    usable: bool
    committed: bool
    unreadable: bool
    fault: str | None
    quarantined: str | None
    committed_at: float | None = None
    bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    sample_offset: int | None = None
    segment: int | None = None
    metrics: Mapping[str, float] | None = None


def seen_of(entry: Listed) -> Seen:
    """What is kept of one line of a listing."""
    more = {}
    if (manifest := entry.manifest) is not None:
        more = {
            "committed_at": manifest.committed_at,
            "bytes": manifest.total_bytes,
            "files": len(manifest.files),
            "world_size": manifest.world_size,
            "sample_offset": manifest.sample_offset,
            "segment": manifest.segment["number"],
            "metrics": dict(manifest.metrics),
        }
    return Seen(
        usable=entry.usable,
        committed=entry.committed,
        unreadable=entry.unreadable,
        fault=entry.fault,
        quarantined=entry.quarantined,
        **more,
    )


class ShelfLook:
    """The checkpoints of one run in a folder.

    Args:
        run_dir: the run's folder.
        clock: seconds that only grow.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = run_dir / CHECKPOINTS_DIR, clock
        self._listed_at: float | None = None
        self._due: list[str] = []
        self._absent: dict[str, int] = {}
        self.entries: dict[str, Seen] = {}
        self.problem = ""
        self.version = 0

    @property
    def behind(self) -> int:
        """How many folders have not been looked at yet."""
        return len(self._due)

    @property
    def listed(self) -> bool:
        """Whether the folder could be listed at least once."""
        return self._listed_at is not None

    @property
    def in_doubt(self) -> bool:
        """Whether something was absent from the last listing and not from the one before."""
        return 1 in self._absent.values()

    def is_missing(self, name: str) -> bool:
        """Whether a checkpoint was in neither of the last two listings; a deletion is told only after it was done."""
        return self.listed and not self.problem and self._absent.get(name, 0) >= 2

    def refresh(
        self, journalled: set[str], go_on: Callable[[], bool], *, now: bool = False
    ) -> None:
        """Lists the folder when it is time, and reads what is new, newest first, for as long as it may.

        Args:
            journalled: names that should be there.
            go_on: whether there is time for one more.
            now: whether to list whatever the time is.
        """
        time_s = self._clock()
        if now or self._listed_at is None or time_s - self._listed_at >= LIST_EVERY_S:
            self._list(journalled)
            self._listed_at = time_s
        while self._due and go_on():
            name = self._due.pop()
            key = parse_checkpoint_name(name)
            assert key is not None, name
            entry = look_at(self._root / name, *key)
            seen = None if entry is None else seen_of(entry)
            if seen != self.entries.get(name):
                self.version += 1
                if seen is None:
                    del self.entries[name]
                else:
                    self.entries[name] = seen

    def _list(self, journalled: set[str]) -> None:
        try:
            with os.scandir(self._root) as items:
                names = {item.name for item in items if parse_checkpoint_name(item.name)}
            problem = ""
        except FileNotFoundError:
            names, problem = set(), ""
        except OSError as error:
            self.version += not self.problem
            self.problem = f"{self._root} cannot be listed ({error.strerror}); mend access to it"
            return
        if problem != self.problem:
            self.problem, self.version = problem, self.version + 1
        for name in self.entries.keys() - names:
            del self.entries[name]
            self.version += 1
        before = self._absent
        self._absent = {name: before.get(name, 0) + 1 for name in journalled - names}
        self.version += any(count == 2 for count in self._absent.values())
        order = sorted(names, key=lambda name: parse_checkpoint_name(name) or (-1, -1))
        waiting = [name for name in order if self._waits(name)]
        fresh = [name for name in order[-_NEWEST:] if name not in waiting]
        self._due = waiting + fresh

    def _waits(self, name: str) -> bool:
        entry = self.entries.get(name)
        return entry is None or not entry.committed or entry.unreadable
