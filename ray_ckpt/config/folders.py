"""Options that are folders."""

from __future__ import annotations

import os
from pathlib import Path

from ray_ckpt.errors import ConfigError


def absolute_folder(value: str, option: str) -> str:
    """A folder option as an absolute path.

    A relative path means one below the folder of whoever starts the program. A submitted job has no such
    folder: its working directory is a temporary copy that is deleted, and a checkpoint in it is lost.

    Raises:
        ConfigError: an empty path, a relative one in a submitted job, or a URI that is not supported.
    """
    if not value.strip():
        raise ConfigError(
            f"{option} {value!r}: an empty path would mean the present folder; write . to mean that one, "
            "or leave the option out for its default."
        )
    if "://" in value:
        raise ConfigError(
            f"{option} {value}: only folders are supported so far, not object stores. Mount it, or use a "
            "shared folder."
        )
    path = Path(value).expanduser()
    if not path.is_absolute() and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        raise ConfigError(
            f"{option} {value}: a relative path in a submitted job would point into the job's working "
            "directory, a temporary copy that is deleted. Give an absolute path on a folder that every node "
            "sees."
        )
    # Not resolve(): links that lead to the shared folder are the user's, and stay as they are.
    return os.path.abspath(path)  # noqa: PTH100


def paths(value: object, option: str) -> tuple[str, ...]:
    """A repeatable option as words: programs may give one path alone; an empty one is none."""
    values = value if isinstance(value, tuple | list) else (value,)
    for path in values:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"{option} {path!r}: must be a path, or NAME=PATH:WEIGHT")
    words = tuple(os.fspath(path) for path in values)
    return () if words == ("",) else words
