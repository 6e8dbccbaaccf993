"""A run's own records beside its checkpoints on an object store, so that a run outlives the disk of its head node."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ray_ckpt.checkpoint.storing import sync_folder
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tiers.remote import RemoteTier
from ray_ckpt.tiers.remote_store import CHUNK_BYTES
from ray_ckpt.tracker.identity import IDENTITY_NAME
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME

RECORDS = (IDENTITY_NAME, JOURNAL_NAME, STEPS_NAME)
_HEAD_BYTES = 4096


def push_records(tier: RemoteTier, run_dir: Path) -> None:
    """Copies what a run has on record to the store; what is there is replaced.

    Lines that are added meanwhile go with the next push. A line that is torn by that is passed over by readers.

    Raises:
        ConfigError: what is there begins otherwise, or is longer: it is another run's, or was not fetched.
        StorageError: the store failed, or a record cannot be read.
    """
    for name in RECORDS:
        path = run_dir / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error}. Mend access to the disk.") from error
        place = f"{tier.run}/{name}"
        if name != IDENTITY_NAME:
            _refuse_other(tier, place, path, size)
        tier.store.upload(place, partial(_first, path, size))


def pull_records(tier: RemoteTier, run_dir: Path) -> list[str]:
    """Fetches what a run has on record into a folder that has none, such as that of a new head node.

    Returns:
        Names of the files that were fetched; none when the store has no such run.

    Raises:
        ConfigError: the folder has records; they are not overwritten.
        StorageError: the store failed, or a file cannot be written; no record is there then.
    """
    if there := [name for name in RECORDS if (run_dir / name).exists()]:
        raise ConfigError(
            f"{run_dir} has {there[0]}: what a run has on record is not overwritten. Move the folder away, or choose "
            "another one."
        )
    fetched = []
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in RECORDS:
            found = tier.store.chunks(f"{tier.run}/{name}")
            if found is None:
                continue
            size, chunks = found
            temporary = run_dir / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
            fetched.append((temporary, run_dir / name))
            with temporary.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                if file.tell() != size:
                    raise StorageError(
                        f"{tier.where / name} changed while it was read: {file.tell()} of {size} bytes. Try again."
                    )
        # All or none: a journal without the record of what the run is would be another run's by its looks.
        for temporary, path in reversed(fetched):
            temporary.replace(path)
        sync_folder(run_dir)
    except OSError as error:
        raise StorageError(
            f"cannot write into {run_dir}: {error}. Mend access to the disk."
        ) from error
    finally:
        for temporary, _ in fetched:
            temporary.unlink(missing_ok=True)
    return [path.name for _, path in fetched]


def _refuse_other(tier: RemoteTier, place: str, path: Path, size: int) -> None:
    """A journal only grows: what is there must be how this one begins."""
    found = tier.store.chunks(place, _HEAD_BYTES, sure=False)
    if found is None:
        return
    there, chunks = found
    head = next(iter(chunks), b"")
    if there > size or not _head(path).startswith(head[:_HEAD_BYTES]):
        raise ConfigError(
            f"{tier.where / path.name} is not the beginning of {path}: it is another run's, or this folder lacks what "
            "the run did elsewhere. Fetch the records into an empty folder, or choose another --run name."
        )


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _first(path: Path, size: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while size > 0 and (chunk := file.read(min(CHUNK_BYTES, size))):
                size -= len(chunk)
                yield chunk
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}. Mend access to the disk.") from error
