"""Deleting checkpoints, so that a crash at any point leaves a whole one or none.

First the manifest is renamed, which ends the checkpoint: from then on it is files that were never committed. Then
pins are looked for once more; a pinned one gets its manifest back. Then the files go, and at last the renamed
manifest, which until then tells the next collector that this folder was on its way out: it need not wait until
the folder is old.

Nothing is deleted through links, and nothing once the gate is shut or another attempt has begun.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME, parse_checkpoint_name
from ray_ckpt.checkpoint.storing import sync_folder
from ray_ckpt.errors import StaleGenerationError, StorageError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.pins import read_pins
from ray_ckpt.tiers.retention import Verdict

LEAVING_NAME = f".{MANIFEST_NAME}.leaving"


class Gate:
    """Lets checkpoints end until it is shut, for good: what was decided before may be wrong by now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True

    def shut(self) -> None:
        """When this returns, no checkpoint ends any more: at most the one that is ending now is waited for."""
        # Before the wait, or the next one may come in first: a lock has no queue.
        self._open = False
        with self._lock:
            pass

    @contextlib.contextmanager
    def passing(self) -> Iterator[bool]:
        """Whether the gate is open; if it is, who shuts it waits for the end of the block."""
        with self._lock:
            yield self._open


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one checkpoint that was to go.

    Attributes:
        name: of its folder.
        step: of it.
        reason: why it was to go.
        problem: why it is still there, or some of its files are; empty when it is gone.
        kept: whether that is no failure: it was pinned meanwhile, or is needed.
    """

    name: str
    step: int
    reason: str
    problem: str = ""
    kept: bool = False


def collect(
    run_dir: Path,
    verdicts: Sequence[Verdict],
    *,
    generation: int,
    newest_generation: Callable[[], int],
    gate: Gate,
) -> list[Outcome]:
    """Deletes what the verdicts say, oldest first; one that fails does not keep the others.

    Args:
        run_dir: the run's folder.
        verdicts: newest first, as :func:`ray_ckpt.tiers.retention.plan` gives them.
        generation: of whoever decided.
        newest_generation: the newest there is on storage; asked before each one.
        gate: once it is shut, nothing more is deleted.

    Raises:
        StaleGenerationError: another attempt has begun: nothing more is deleted.
    """
    root = run_dir / CHECKPOINTS_DIR

    def remove(name: str) -> str:
        problem = remove_folder(root / name)
        fault_point("collect.removed")
        return problem

    return end_each(
        verdicts,
        generation=generation,
        newest_generation=newest_generation,
        gate=gate,
        end=lambda name: _end(root / name),
        remove=remove,
    )


def end_each(
    verdicts: Sequence[Verdict],
    *,
    generation: int,
    newest_generation: Callable[[], int],
    gate: Gate,
    end: Callable[[str], tuple[str, bool]],
    remove: Callable[[str], str],
) -> list[Outcome]:
    """The same for every kind of storage; arguments as for :func:`collect`, and:

    Args:
        end: takes the manifest of a checkpoint away; why not, and whether it is meant to stay.
        remove: removes the files of one without a manifest; what was in the way.
    """
    outcomes = []
    for verdict in reversed(verdicts):
        if verdict.keep:
            continue
        key = parse_checkpoint_name(verdict.name)
        assert key is not None, verdict.name
        with gate.passing() as is_open:
            if not is_open:
                break
            newest = newest_generation()
            if newest > generation:
                raise StaleGenerationError(
                    f"attempt {newest} has taken the place of attempt {generation}, which may not delete "
                    f"{verdict.name} any more. Nothing was changed."
                )
            problem, kept = end(verdict.name)
        outcomes.append(
            Outcome(
                name=verdict.name,
                step=key[0],
                reason="; ".join(verdict.reasons),
                problem=problem or remove(verdict.name),
                kept=kept,
            )
        )
    return outcomes


def _end(folder: Path) -> tuple[str, bool]:
    """Takes the manifest away; returns why not, and whether the checkpoint is meant to stay."""
    try:
        if folder.is_symlink():
            return f"{folder} is a link, and what it leads to is not the run's", True
        pins = read_pins(folder)
        if not pins:
            fault_point("collect.end")
            # A folder without one never was a checkpoint, or is on its way out already.
            with contextlib.suppress(FileNotFoundError):
                (folder / MANIFEST_NAME).rename(folder / LEAVING_NAME)
            try:
                fault_point("collect.ended")
                sync_folder(folder)
                pins = read_pins(folder)
            except (OSError, StorageError):
                _bring_back(folder)  # whether it is pinned is not known: then it is
                raise
            if pins:
                _bring_back(folder)
    except (OSError, StorageError) as error:
        return str(error), False
    return (f"it was pinned meanwhile: {pins[0].words}", True) if pins else ("", False)


def mend(run_dir: Path) -> None:
    """Gives pinned checkpoints their manifest back, if a collector that died had taken it.

    Raises:
        StorageError: storage failed.
    """
    try:
        for leaving in (run_dir / CHECKPOINTS_DIR).glob(f"*/{LEAVING_NAME}"):
            folder = leaving.parent
            if parse_checkpoint_name(folder.name) is None or folder.is_symlink():
                continue  # not the run's
            if read_pins(folder):
                _bring_back(folder)
    except OSError as error:
        raise StorageError(
            f"pinned checkpoints in {run_dir} cannot be brought back: {error}"
        ) from error


def _bring_back(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # it never had one
        (folder / LEAVING_NAME).rename(folder / MANIFEST_NAME)
    sync_folder(folder)


def remove_folder(folder: Path) -> str:
    """Removes a folder without a manifest, or what can be removed of it; returns what was in the way.

    Nothing is removed through links; a mark that it is on its way out goes last.
    """
    errors: list[OSError] = []
    try:
        # By descriptors, not by paths: a folder that becomes a link meanwhile leads nowhere.
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        return str(error)
    try:
        _empty(handle, errors)
        if not errors:
            fault_point("collect.emptied")
            # Last of all: while anything is left, the next collector must know what it is.
            _try(errors, lambda: os.unlink(LEAVING_NAME, dir_fd=handle))
            fault_point("collect.unmarked")
            _try(errors, folder.rmdir)
            _try(errors, lambda: sync_folder(folder.parent))
    finally:
        os.close(handle)
    return str(errors[0]) if errors else ""


def _empty(handle: int, errors: list[OSError]) -> None:
    """Removes all that is in an open folder but the mark that it is on its way out."""
    try:
        walk = os.fwalk(".", topdown=False, onerror=errors.append, dir_fd=handle)
        for place, folders, names, at in walk:
            for name in names:
                if (place, name) != (".", LEAVING_NAME):
                    fault_point("collect.file")
                    _try(errors, partial(os.unlink, name, dir_fd=at))
            for name in folders:
                _try(errors, partial(_remove_below, name, at))
    except OSError as error:
        errors.append(error)


def _remove_below(name: str, at: int) -> None:
    """Removes an empty folder, or a link to one, of an open folder."""
    is_link = stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode)
    (os.unlink if is_link else os.rmdir)(name, dir_fd=at)


def _try(errors: list[OSError], action: Callable[[], None]) -> None:
    try:
        action()
    except FileNotFoundError:
        pass  # somebody else was faster
    except OSError as error:
        errors.append(error)
