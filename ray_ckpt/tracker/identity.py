"""What must not change while a run lives: the options and the data that decide its course.

Kept in ``<run>/run.json`` from the first start. A resume with another value is refused by the name of the
option: the run would go on, on other data or in another order, and nobody would know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint.manifest import write_atomically
from ray_ckpt.errors import ConfigError, StorageError

IDENTITY_NAME = "run.json"
SCHEMA = 1


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Digest of an identity, 32 hex digits."""
    return str(xxhash.xxh3_128(json.dumps(identity, sort_keys=True).encode()).hexdigest())


def check_identity(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Compares with what the run began with; the first start writes it down.

    Args:
        run_dir: the run's folder.
        identity: option (as it is written on the command line) to value, plain JSON values.

    Raises:
        ConfigError: a value differs from the run's.
        StorageError: the record cannot be read or written.
    """
    path = run_dir / IDENTITY_NAME
    known = read_identity(run_dir)
    if known is None:
        document = {"schema": SCHEMA, "identity": dict(identity)}
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")
        except OSError as error:
            raise StorageError(
                f"{run_dir} cannot be written ({error.strerror}). --storage must be a folder with room, which "
                "this user may write to."
            ) from error
        return
    now = json.loads(json.dumps(dict(identity)))
    different = [
        f"{k} was {known[k]!r}, now {now[k]!r}" for k in now if k in known and known[k] != now[k]
    ]
    if different:
        raise ConfigError(
            f"run {run_dir.name!r} in {run_dir.parent} began with other options: {'; '.join(different)}. They "
            "decide its course and stay the same for its life. Use the old values, or another --run name."
        )


def read_identity(run_dir: Path) -> dict[str, Any] | None:
    """What a run began with; None when it has not begun.

    Raises:
        StorageError: the record cannot be read, or is damaged.
    """
    path = run_dir / IDENTITY_NAME
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise StorageError(
            f"{run_dir} cannot be written ({error.strerror}). --storage must be a folder, with no file in "
            "its way."
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from error
    try:
        return dict(json.loads(text)["identity"])
    except (ValueError, LookupError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged ({error}). It says what the run began with: restore it, or remove it if you "
            "are sure that the options are those of the run."
        ) from error
