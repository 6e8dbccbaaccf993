"""What lies in a run's folder, as retention looks at it: checkpoints, and files that were never committed."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path

from ray_ckpt.checkpoint.drilled import Drilled, read_drills
from ray_ckpt.checkpoint.listing import NO_MANIFEST, CheckpointEntry, Listed, list_checkpoints
from ray_ckpt.errors import StorageError
from ray_ckpt.tiers.collect import LEAVING_NAME
from ray_ckpt.tiers.pins import Pin, read_pins
from ray_ckpt.tiers.retention import Record, Verdict

Passed = Callable[[CheckpointEntry], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Orphan:
    """A folder without a manifest: a save that is in flight or came to nothing, or a half-deleted checkpoint.

    Attributes:
        name: of the folder.
        generation: attempt that wrote it.
        written_at: when the last of its files was written, seconds since the epoch.
        leaving: whether it was a checkpoint whose deletion did not come to its end.
        pinned: why it is pinned, one sentence a pin.
    """

    name: str
    generation: int
    written_at: float
    leaving: bool = False
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    """What there is, newest first.

    Attributes:
        records: the committed checkpoints, and saves that were set aside before their commit.
        orphans: folders without a manifest.
        pins: name of a checkpoint to its pins, where they could be read.
        drills: name of a checkpoint to its drills, oldest first, where there are any.
    """

    records: tuple[Record, ...]
    orphans: tuple[Orphan, ...]
    pins: Mapping[str, tuple[Pin, ...]]
    drills: Mapping[str, tuple[Drilled, ...]] = field(default_factory=dict)


def take_stock(
    run_dir: Path,
    *,
    verified: AbstractSet[str],
    in_use: Mapping[str, str] | None = None,
    passed: Passed = lambda entry: None,
) -> Stock:
    """Looks at every checkpoint folder of a run; reads small files only and changes nothing.

    Args:
        run_dir: the run's folder.
        verified: names of the checkpoints whose bytes were read and compared.
        in_use: name to what it is used for, in words.
        passed: why a checkpoint, although it is whole, is never restored; None when it may be.

    Raises:
        StorageError: the folder cannot be listed.
    """
    return stock_of(list_checkpoints(run_dir), verified=verified, in_use=in_use, passed=passed)


def stock_of(
    entries: Sequence[CheckpointEntry],
    *,
    verified: AbstractSet[str],
    in_use: Mapping[str, str] | None = None,
    passed: Passed = lambda entry: None,
) -> Stock:
    """The same for a listing that is there already."""
    records, orphans, pins, drills = [], [], {}, {}
    for entry in entries:
        name = entry.folder.name
        try:
            # Pins behind a link are another folder's, which stays whatever is said here.
            found = () if entry.folder.is_symlink() else read_pins(entry.folder)
            pins[name] = found
            pinned = tuple(pin.words for pin in found)
        except StorageError as error:
            pinned = (f"perhaps: {error}",)  # an error is not an absence
        if known := _drills(entry):
            drills[name] = known
        half = _is_plain(entry.folder / LEAVING_NAME)
        # A save that was set aside before its commit is evidence, as a checkpoint found bad later is.
        if entry.fault == NO_MANIFEST and (half or entry.quarantined is None):
            orphans.append(_orphan(entry, pinned, half))
        else:
            use = (in_use or {}).get(name, "")
            record = record_of(entry, pinned, name in verified, use)
            # Of what is not judged nothing is known, not even its course. What the run cannot use must not stand
            # in for what it can.
            why = passed(entry) if record.usable else None
            records.append(replace(record, quarantined=why) if why else record)
    return Stock(records=tuple(records), orphans=tuple(orphans), pins=pins, drills=drills)


def _drills(entry: CheckpointEntry) -> tuple[Drilled, ...]:
    """What drills found; it decides nothing, so storage that does not tell is no matter."""
    try:
        return read_drills(entry.folder) if entry.manifest is not None else ()
    except StorageError:
        return ()


def judge_orphans(
    orphans: Sequence[Orphan], *, present_generation: int, grace_s: float, now_s: float
) -> list[Verdict]:
    """Decides which folders without a manifest go.

    Args:
        orphans: all of them.
        present_generation: attempt whose saves may be in flight; an older one cannot commit any more.
        grace_s: how long they stay after the last of their files was written, seconds.
        now_s: seconds since the epoch.
    """
    verdicts = []
    for orphan in orphans:
        age_s = now_s - orphan.written_at
        keep = True
        if orphan.pinned:
            why = f"pinned: {orphan.pinned[0]}"
        elif orphan.leaving:
            keep, why = False, "its deletion was begun and not finished"
        elif orphan.generation >= present_generation:
            why = "not committed, and its save may be in flight"
        elif age_s <= grace_s:
            why = f"not committed, but written less than {grace_s:g} s ago"
        else:
            keep, why = False, f"not committed, and attempt {orphan.generation} is over"
        verdicts.append(Verdict(name=orphan.name, keep=keep, reasons=(why,)))
    return verdicts


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def record_of(entry: Listed, pinned: tuple[str, ...], verified: bool, in_use: str) -> Record:
    """One committed checkpoint, wherever it lies, as retention looks at it."""
    manifest = entry.manifest
    return Record(
        name=entry.folder.name,
        step=entry.step,
        generation=entry.generation,
        committed_at=manifest.committed_at if manifest else 0.0,
        metrics=manifest.metrics if manifest else {},
        pinned=pinned,
        verified=verified,
        # Of what is not signed with a key in use nothing is believed, a note beside it neither.
        quarantined=None if entry.mistrusted else entry.quarantined,
        refused=entry.fault == NO_MANIFEST,
        in_use=in_use,
        fault=entry.fault,
    )


def _orphan(entry: CheckpointEntry, pinned: tuple[str, ...], leaving: bool) -> Orphan:
    times_s, errors = [0.0], list[OSError]()
    for place, _, names in os.walk(entry.folder, onerror=errors.append):
        for path in (Path(place), *(Path(place, name) for name in names)):
            try:
                times_s.append(path.lstat().st_mtime)
            except OSError as error:
                errors.append(error)
    if any(not isinstance(error, FileNotFoundError) for error in errors):
        times_s.append(math.inf)  # how old it is is not known: then it is new
    return Orphan(
        name=entry.folder.name,
        generation=entry.generation,
        written_at=max(times_s),
        leaving=leaving,
        pinned=pinned,
    )
