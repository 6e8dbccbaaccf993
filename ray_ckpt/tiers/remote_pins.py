"""Pins of checkpoints on an object store: the same ``PINNED.json``, and the same race with whoever deletes.

Whoever pins writes first and looks for the manifest after that; whoever deletes takes the manifest away first and
looks for pins after that. So at least one of them sees the other. Two people who pin one checkpoint at the same
instant may overwrite each other: a store has no lock, so each looks again whether its own pin is there.
"""

from __future__ import annotations

import time

from ray_ckpt.checkpoint.names import MANIFEST_NAME, PINS_NAME
from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.pins import (
    Pin,
    decode_pins,
    encode_pins,
    not_there,
    refuse_silence,
    with_reason,
)
from ray_ckpt.tiers.remote import RemoteTier

_BACK_S = 10.0  # a collector that saw the pin puts the manifest back within this time
_POLL_S = 0.5
_ROUNDS = 5


def read_pins(tier: RemoteTier, name: str) -> tuple[Pin, ...]:
    """The pins of a checkpoint, oldest first.

    Raises:
        StorageError: the store failed; whether it is pinned is not known.
    """
    data = tier.store.read(tier.place(name, PINS_NAME))
    return () if data is None else decode_pins(data)


def pin(tier: RemoteTier, name: str, reason: str, *, author: str, time_s: float) -> bool:
    """Pins a checkpoint; the same reason of the same author counts once.

    Args:
        tier: where it is.
        name: of the checkpoint.
        reason: one sentence.
        author: who wants it.
        time_s: now, seconds since the epoch.

    Returns:
        Whether the pin is new.

    Raises:
        ConfigError: no reason, no author, or the checkpoint is gone or was never committed.
        StorageError: the store failed; whether it is pinned is not known.
    """
    refuse_silence(reason, author)
    if not _is_there(tier, name):
        raise not_there(name)
    new = False
    for _ in range(_ROUNDS):
        before = read_pins(tier, name)
        if any((old.reason, old.author) == (reason, author) for old in before):
            break
        new = True
        _write(tier, name, (*before, Pin(reason, author, time_s)))
    else:
        raise ConfigError(
            f"{name} cannot be pinned: others change its pins at the same time; try again"
        )
    deadline = time.monotonic() + _BACK_S
    while not _is_there(tier, name):
        if time.monotonic() >= deadline:
            if new:  # it holds nothing any more
                left = [
                    p for p in read_pins(tier, name) if (p.reason, p.author) != (reason, author)
                ]
                _write(tier, name, tuple(left))
            raise not_there(name)
        time.sleep(_POLL_S)
    return new


def unpin(tier: RemoteTier, name: str, reason: str | None = None) -> tuple[Pin, ...]:
    """Takes pins away: those of one reason, or all.

    Returns:
        The pins that were taken away.

    Raises:
        ConfigError: there is no pin with this reason; those that are there are named.
        StorageError: the store failed.
    """
    pins = read_pins(tier, name)
    gone = with_reason(pins, reason, name)
    if gone:
        _write(tier, name, tuple(p for p in pins if p not in gone))
    return gone


def _write(tier: RemoteTier, name: str, pins: tuple[Pin, ...]) -> None:
    place = tier.place(name, PINS_NAME)
    if pins:
        tier.store.write(place, encode_pins(pins))
    else:
        tier.store.delete(place)


def _is_there(tier: RemoteTier, name: str) -> bool:
    return tier.store.read(tier.place(name, MANIFEST_NAME)) is not None
