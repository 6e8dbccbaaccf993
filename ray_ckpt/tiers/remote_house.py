"""One round of housekeeping on an object store, by the rules that folders are kept by (``housekeeping.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from ray_ckpt.checkpoint.listing import NO_MANIFEST, Listed
from ray_ckpt.checkpoint.names import PINS_NAME
from ray_ckpt.checkpoint.trust import problem_of
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tiers.collect import LEAVING_NAME, Gate
from ray_ckpt.tiers.housekeeping import Findings, judged
from ray_ckpt.tiers.pins import Pin
from ray_ckpt.tiers.remote import NUM_THREADS, RemoteEntry, RemoteTier
from ray_ckpt.tiers.remote_collect import collect_remote, mend
from ray_ckpt.tiers.remote_pins import read_pins
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stock import Orphan, Stock, record_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRound:
    """What one round is to go by; the fields are those of :class:`ray_ckpt.tiers.housekeeping.Round`.

    Attributes:
        tier: the run's checkpoints.
        rules: which are kept.
        generation: of whoever decides; a newer one on record ends the round.
        newest_generation: the newest there is on record.
        present_generation: attempt whose saves may be in flight.
        verified: names of the checkpoints whose bytes were read back from this store, or a more durable tier.
        in_use: name to what it is used for, in words.
        read_back: how a checkpoint is read back (such as ``tier.verify``); None for not at all.
        gate: ends the round when it is shut.
        passed: why a checkpoint, although it is whole, is never restored; None when it may be.
        delete: False only looks and judges.
    """

    tier: RemoteTier
    rules: Rules
    generation: int
    newest_generation: Callable[[], int]
    present_generation: int
    verified: AbstractSet[str]
    in_use: Mapping[str, str]
    read_back: Callable[[str], list[Fault]] | None
    gate: Gate
    passed: Callable[[Listed], str | None] = lambda entry: None
    delete: bool = True


def keep_remote_house(task: RemoteRound, *, now_s: float) -> Findings:
    """Does one round; ends before anything is deleted when a checkpoint has to be read back.

    Args:
        task: what to go by.
        now_s: seconds since the epoch.

    Raises:
        ConfigError: the key in use is a wrong one.
        StorageError: the checkpoints cannot be listed.
        StaleGenerationError: another attempt has begun.
    """
    entries = task.tier.entries()
    if problem := problem_of(entries):
        raise ConfigError(problem)  # what is there cannot be told from what is not
    if task.delete and any(LEAVING_NAME in entry.records for entry in entries):
        mend(task.tier)
        entries = task.tier.entries()
    stock = remote_stock(
        task.tier, entries, verified=task.verified, in_use=task.in_use, passed=task.passed
    )
    return judged(
        task,
        stock,
        read=task.read_back,
        delete=partial(collect_remote, task.tier),
        now_s=now_s,
    )


def remote_stock(
    tier: RemoteTier,
    entries: Sequence[RemoteEntry],
    *,
    verified: AbstractSet[str],
    in_use: Mapping[str, str] | None = None,
    passed: Callable[[Listed], str | None] = lambda entry: None,
) -> Stock:
    """What there is, as retention looks at it; reads small objects only, and changes nothing."""

    def pins_of(entry: RemoteEntry) -> tuple[Pin, ...] | StorageError:
        # Of what could not be listed nothing is known, not even that it has no pins.
        if PINS_NAME not in entry.records and not entry.unreadable:
            return ()
        try:
            return read_pins(tier, entry.folder.name)
        except StorageError as error:
            return error

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(pins_of, entries))
    records, orphans, pins = [], [], {}
    for entry, its_pins in zip(entries, found, strict=True):
        name = entry.folder.name
        if isinstance(its_pins, StorageError):
            pinned: tuple[str, ...] = (f"perhaps: {its_pins}",)  # an error is not an absence
        else:
            pins[name] = its_pins
            pinned = tuple(pin.words for pin in its_pins)
        half = LEAVING_NAME in entry.records
        if entry.fault == NO_MANIFEST and (half or entry.quarantined is None):
            orphans.append(_orphan(tier, entry, pinned, half))
        else:
            use = (in_use or {}).get(name, "")
            record = record_of(entry, pinned, name in verified, use)
            why = passed(entry) if record.usable else None
            records.append(replace(record, quarantined=why) if why else record)
    return Stock(records=tuple(records), orphans=tuple(orphans), pins=pins)


def _orphan(tier: RemoteTier, entry: RemoteEntry, pinned: tuple[str, ...], half: bool) -> Orphan:
    try:
        items = tier.store.list(tier.place(entry.folder.name), deep=True)
        times_s = [item.written_at or math.inf for item in items]
    except StorageError:
        times_s = [math.inf]  # how old it is is not known: then it is new
    return Orphan(
        name=entry.folder.name,
        generation=entry.generation,
        written_at=max(times_s, default=math.inf),
        leaving=half,
        pinned=pinned,
    )
