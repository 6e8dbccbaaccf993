"""Deleting checkpoints on an object store, so that a crash at any point leaves a whole one or an uncommitted one.

As in a folder, but that nothing can be renamed: the manifest is copied to its mark first and deleted then, which ends
the checkpoint. Then pins are looked for once more; a pinned one gets its manifest back. Then the files go, and at
last the mark, which until then tells the next collector that this one was on its way out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME, parse_checkpoint_name
from ray_ckpt.errors import StorageError
from ray_ckpt.tiers.collect import LEAVING_NAME, Gate, Outcome, end_each
from ray_ckpt.tiers.remote import NUM_THREADS, RemoteTier
from ray_ckpt.tiers.remote_pins import read_pins
from ray_ckpt.tiers.retention import Verdict


def collect_remote(
    tier: RemoteTier,
    verdicts: Sequence[Verdict],
    *,
    generation: int,
    newest_generation: Callable[[], int],
    gate: Gate,
) -> list[Outcome]:
    """Deletes what the verdicts say, oldest first; one that fails does not keep the others.

    Args:
        tier: where they are.
        verdicts: newest first, as :func:`ray_ckpt.tiers.retention.plan` gives them.
        generation: of whoever decided.
        newest_generation: the newest there is on record; asked before each one.
        gate: once it is shut, nothing more is deleted.

    Raises:
        StaleGenerationError: another attempt has begun: nothing more is deleted.
    """
    return end_each(
        verdicts,
        generation=generation,
        newest_generation=newest_generation,
        gate=gate,
        end=partial(_end, tier),
        remove=partial(_remove, tier),
    )


def drop(tier: RemoteTier, name: str, reason: str = "") -> Outcome:
    """Deletes one checkpoint, or what was never one; a pinned one stays."""
    problem, kept = _end(tier, name)
    return _outcome(name, reason, problem or _remove(tier, name), kept)


def mend(tier: RemoteTier) -> None:
    """Gives pinned checkpoints their manifest back, if a collector that died had taken it.

    Raises:
        StorageError: the store failed.
    """
    items = tier.store.list(f"{tier.run}/{CHECKPOINTS_DIR}")
    names = [item.path for item in items if item.is_folder and parse_checkpoint_name(item.path)]

    def is_leaving(name: str) -> bool:
        inside = {item.path for item in tier.store.list(tier.place(name))}
        return LEAVING_NAME in inside and MANIFEST_NAME not in inside

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(is_leaving, names))
    for name, leaving in zip(names, found, strict=True):
        if leaving and read_pins(tier, name):
            _bring_back(tier, name)


def _outcome(name: str, reason: str, problem: str, kept: bool) -> Outcome:
    key = parse_checkpoint_name(name)
    assert key is not None, name
    return Outcome(name=name, step=key[0], reason=reason, problem=problem, kept=kept)


def _end(tier: RemoteTier, name: str) -> tuple[str, bool]:
    """Takes the manifest away; returns why not, and whether the checkpoint is meant to stay."""
    store, place = tier.store, tier.place(name, MANIFEST_NAME)
    try:
        pins = read_pins(tier, name)
        if not pins:
            data = store.read(place)
            if data is not None:
                store.write(tier.place(name, LEAVING_NAME), data)
            try:
                store.delete(place)
                pins = read_pins(tier, name)
            except StorageError:
                # Whether it is gone, or pinned, is not known: then it stays.
                with contextlib.suppress(StorageError):
                    _bring_back(tier, name)
                raise
            if pins:
                _bring_back(tier, name)
    except StorageError as error:
        return str(error), False
    return (f"it was pinned meanwhile: {pins[0].words}", True) if pins else ("", False)


def _bring_back(tier: RemoteTier, name: str) -> None:
    mark = tier.place(name, LEAVING_NAME)
    data = tier.store.read(mark)
    if data is not None:  # else it never had one
        tier.store.write(tier.place(name, MANIFEST_NAME), data)
        tier.store.delete(mark)


def _remove(tier: RemoteTier, name: str) -> str:
    """Removes the files of what has no manifest; returns what was in the way."""
    store = tier.store
    try:
        paths = [item.path for item in store.list(tier.place(name), deep=True)]
        # The mark goes last: while anything is left, the next collector must know what it is.
        files = [tier.place(name, path) for path in paths if path != LEAVING_NAME]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(store.delete, files))
        store.delete(tier.place(name, LEAVING_NAME))
    except StorageError as error:
        return str(error)
    # What may be left stands for an empty folder, and is nothing that a listing would show.
    with contextlib.suppress(StorageError):
        store.delete_below(tier.place(name))
    return ""
