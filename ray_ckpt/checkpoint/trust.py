"""Whether the key in use is that of a run: with a wrong one nothing may be restored, kept, set aside or deleted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.listing import Listed, list_checkpoints
from ray_ckpt.checkpoint.signature import KEY_VARIABLE


def key_problem(run_dir: Path) -> str | None:
    """What to say when a key is in use and no checkpoint can be restored for want of its signature.

    Raises:
        StorageError: the folder of checkpoints cannot be listed.
        ConfigError: the key is not usable.
    """
    return None if signature.active() is None else problem_of(list_checkpoints(run_dir))


def problem_of(listing: Sequence[Listed]) -> str | None:
    """The same for a listing that is there already, of any tier.

    Raises:
        ConfigError: the key is not usable.
    """
    if signature.active() is None:
        return None
    entries = [entry for entry in listing if entry.committed]
    mistrusted = [entry for entry in entries if entry.mistrusted]
    if not mistrusted or any(entry.usable for entry in entries):
        return None
    newest = mistrusted[0]
    return (
        f"{KEY_VARIABLE} is probably wrong: none of the checkpoints in {newest.folder.parent} is signed with it "
        f"({newest.folder.name}: {newest.fault}; {len(mistrusted)} of {len(entries)} like this). Nothing was changed. "
        "Set the key that the run was saved with; to change keys, put the old one after the new one and a comma."
    )
