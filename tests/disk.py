"""Checkpoints of a few bytes, and a say at every touch of the file system."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from making import manifest_of

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import FileEntry, write_manifest
from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.checkpoint.verify import hash_file, verify_files

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir"}
_say: Callable[[str], None] | None = None
_hooked = False


def add_checkpoint(
    run: Path, step: int, generation: int = 1, *, commit: bool = True, loss: float = 2.5
) -> Path:
    """A checkpoint of four files, one of them in a folder."""
    folder = run / "checkpoints" / checkpoint_name(step, generation)
    (folder / "rank").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "rank/rng.json"):
        (folder / name).write_bytes(f"{name} of {folder.name}".encode())
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    entries = (FileEntry(p.relative_to(folder).as_posix(), *hash_file(p)) for p in files)
    manifest = manifest_of(
        run=run.name,
        step=step,
        sample_offset=8 * step,
        tokens=512 * step,
        world_size=2,
        generation=generation,
        committed_at=1e9 + step,
        files=tuple(entries),
        metrics={"loss": loss},
        config_fingerprint="c0ffee",
        data_fingerprint="da7a",
    )
    if commit:
        write_manifest(folder, manifest)
    return folder


def whole(run: Path) -> set[str]:
    """Names of the committed checkpoints, each of which must be whole."""
    entries = [entry for entry in list_checkpoints(run) if entry.committed]
    for entry in entries:
        assert entry.manifest is not None, f"{entry.folder.name}: {entry.fault}"
        assert verify_files(entry.folder, entry.manifest) == []
    return {entry.folder.name for entry in entries}


@contextmanager
def at_every_touch(say: Callable[[str], None]) -> Iterator[None]:
    """Calls ``say`` before each call that looks at or changes the file system; it may raise, or kill."""
    global _say, _hooked
    if not _hooked:
        sys.addaudithook(_hear)  # for good: Python has no way to take one away
        _hooked = True
    _say = say
    try:
        yield
    finally:
        _say = None


def _hear(event: str, args: tuple[object, ...]) -> None:
    global _say
    if _say is not None and event in _EVENTS:
        say, _say = _say, None  # what it does itself is not told to it
        try:
            say(f"{event} {args[0]}")
        finally:
            _say = say
