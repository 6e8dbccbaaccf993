"""Finding a run, and a checkpoint in it, from what a person typed; and what its journal remembers."""

from __future__ import annotations

import contextlib
import difflib
import re
from pathlib import Path

from ray_ckpt.checkpoint.listing import AnyListed
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tiers.address import is_uri, shown
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME, read_lines

_STEP = re.compile(r"(?:step-)?([0-9]{1,18})(?:-g([0-9]{1,9}))?")
_NAMES_SHOWN = 10


def find_run(text: str, storage_text: str) -> Path:
    """The folder of a run, from a path or from a name below the storage.

    Raises:
        ConfigError: there is no run; the message says what is there.
        StorageError: storage cannot be read.
    """
    if not text:
        raise ConfigError("RUN is empty; give a run's folder or the name of a run")
    if is_uri(text):
        raise ConfigError(
            f"{shown(text)} is on an object store, and this command needs a run's folder: copy the run there first"
        )
    storage = Path(storage_text).expanduser().absolute()
    given = Path(text).expanduser().absolute()
    is_name = text == Path(text).name
    for folder in (storage / text, given) if is_name else (given, storage / text):
        if _is_run(folder):
            return folder
    around = next((parent for parent in given.parents if _is_run(parent)), None)
    if around is not None:
        raise ConfigError(f"{given} is inside a run, not a run; give {around}")
    said = f"{given} is not a run (a run has {CHECKPOINTS_DIR}/ or {JOURNAL_NAME})"
    if is_name:
        said = f"no run {text!r} in {storage}"
    for place in (given, storage):
        if runs := _runs_in(place):
            raise ConfigError(f"{said}. Runs in {place}: {_some(some_like(given.name, runs))}")
    raise ConfigError(f"{said}, and no other run is there. Say where with --storage FOLDER.")


def pick(entries: list[AnyListed], text: str) -> AnyListed:
    """The checkpoint of a step: the newest committed generation, or the one asked for.

    Raises:
        ConfigError: the step is not a step, or there is no such checkpoint.
    """
    match = _STEP.fullmatch(text)
    if match is None:
        raise ConfigError(f"STEP is {text!r}; give a number such as 1200, or 1200-g3")
    step, generation = int(match[1]), match[2] and int(match[2])
    found = [e for e in entries if e.step == step and generation in (None, e.generation)]
    if not found:
        there = _some([f"{e.step}-g{e.generation}" for e in entries]) or "none"
        raise ConfigError(f"no checkpoint {text}; there are: {there}")
    # An attempt that died while it saved must not hide the good save of the attempt before.
    return next((entry for entry in found if entry.committed), found[0])


def verified_times(run: Path) -> dict[str, float]:
    """Name of a checkpoint to the last time the run verified it, from the run's journal.

    Every event that proves a checkpoint's bytes carries `verified: <name of the checkpoint>`.
    """
    times: dict[str, float] = {}
    for event in read_lines(run / JOURNAL_NAME):
        name, time_s = event.get("verified"), event.get("time")
        if isinstance(name, str) and isinstance(time_s, int | float):
            times[name] = max(time_s, times.get(name, time_s))
    return times


def _is_run(folder: Path) -> bool:
    try:
        marks = (CHECKPOINTS_DIR, JOURNAL_NAME, STEPS_NAME)
        return any((folder / mark).exists() for mark in marks)
    except OSError as error:
        raise StorageError(f"{folder} cannot be read ({error}); mend access to it") from error


def _runs_in(folder: Path) -> list[str]:
    """Names of runs, for a hint: what cannot be read is left out."""
    with contextlib.suppress(OSError, StorageError):
        return sorted(item.name for item in folder.iterdir() if _is_run(item))
    return []


def some_like(name: str, names: list[str]) -> list[str]:
    """Names that are like another one first, the most alike ahead; the rest stays in order."""
    near = difflib.get_close_matches(name, names, n=max(1, len(names)), cutoff=0.5)
    return near + [other for other in names if other not in near]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
