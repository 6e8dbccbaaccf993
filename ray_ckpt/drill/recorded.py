"""The options that a run has on record, as a command line: a drill needs the model that the run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError
from ray_ckpt.tracker.identity import read_record


def recorded_flags(run_dir: Path) -> list[str]:
    """Flags of what ``run.json`` says of a run and of its newest segment; what is no option is left out.

    Where the data lies is not on record, only its fingerprint.

    Raises:
        ConfigError: the run has no record.
        StorageError: it cannot be read.
    """
    record = read_record(run_dir)
    if record is None:
        raise ConfigError(f"{run_dir} has no record of a run: it was never started")
    options = {**record.fixed, **record.segments[-1].options}
    flags = [_flag(name, value) for name, value in options.items() if " " not in name]
    return [word for words in flags for word in words]


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        group, dot, last = name.removeprefix("--").rpartition(".")
        return [f"--{group}{dot}{'' if value else 'no-'}{last}"]
    return [name, str(value)]
