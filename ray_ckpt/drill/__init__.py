"""Restore drills: the proof that a backup is a backup.

::

    from ray_ckpt.drill import drill

    result = drill(config, train)        # the options and the training function of the run
    print(result.name, result.drilled.words)

The newest checkpoint is restored on one worker, in this process, with the run's own training function, as far as its
``restore()`` (:mod:`ray_ckpt.drill.rehearsal`). Every byte is compared, names and shapes must fit, the state must be
finite, the norm of the parameters and the loss on fixed rows must be those of the commit
(:mod:`ray_ckpt.drill.judge`). So what is found is damage, but also what no checksum finds: a bug in the save, code or
data that are no longer those of the run.

A drill never touches training. It needs no tracker and no Ray; it reads, pins what it reads
(:mod:`ray_ckpt.tiers.hold`), and writes its outcome into ``DRILLED.json`` beside the manifest. The run's tracker takes
that on record with its next round of housekeeping; when nobody drives the run, the drill writes the journal itself.
A drill that fails sets nothing aside: it may be the code of the drill that is wrong. Where it found damage, the run
reads the checkpoint again before older ones are deleted, and every restart does before it is used.

Not found: what is wrong in the optimizer's state with the right shapes and finite, as no loss depends on it; and under
DDP, buffers that differ from rank to rank (:class:`ray_ckpt.TrainState`) may be saved of another rank than the one
whose loss is logged, which looks like a failure.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ray_ckpt.checkpoint.drilled import Drilled, add_drill, journal_events, read_drills
from ray_ckpt.checkpoint.listing import CheckpointEntry, list_checkpoints, usable
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.trust import key_problem
from ray_ckpt.config import Config
from ray_ckpt.drill.rehearsal import Restored, rehearse
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.facts import versions
from ray_ckpt.tiers.hold import drilling, held
from ray_ckpt.tracker.journal import JOURNAL_NAME, JsonLines, last_generation
from ray_ckpt.tracker.lock import RunLock
from ray_ckpt.tracker.recall import recall
from ray_ckpt.tracker.rollback import passed_over
from ray_ckpt.view.runs import pick

__all__ = ["DrillResult", "drill"]

C = TypeVar("C", bound=Config)

_TRIES = 3  # the newest checkpoint may be deleted between the look and the pin


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """A drill and its checkpoint.

    Attributes:
        name: of the checkpoint's folder.
        step: of it.
        generation: of it.
        drilled: what was found.
    """

    name: str
    step: int
    generation: int
    drilled: Drilled


def drill(
    config: C,
    train: Callable[[C], Any],
    *,
    step: str = "",
    again: bool = True,
    device: str = "cpu",
    tolerance: float | None = None,
) -> DrillResult | None:
    """Restores a checkpoint of a run and compares it with what it was when it was committed.

    Args:
        config: resolved options of the run, with its data.
        train: its training function.
        step: which checkpoint, such as ``1200`` or ``1200-g3``; the newest that a restart would take when empty.
        again: whether one that was drilled before is drilled again.
        device: to restore to.
        tolerance: relative difference of losses that is let pass; None takes that of the kinds of devices.

    Returns:
        The outcome, which is on record too; None when it was drilled before and is not to be ``again``.

    Raises:
        ConfigError: there is no such checkpoint, another drill is under way, or the options are of no use.
        StorageError: storage failed, which says nothing about the checkpoint.
    """
    run_dir = config.run_dir
    if problem := key_problem(run_dir):
        raise ConfigError(problem)
    if not run_dir.is_dir():
        raise ConfigError(f"--run {config.run!r}: there is no {run_dir}")
    with drilling(run_dir):
        with _pinned(run_dir, step, again=again) as entry:
            result = None
            if entry is not None:
                result = _drill(config, train, entry, device=device, tolerance=tolerance)
        journal_alone(run_dir)  # also what a drill before could not write, as the run was driven
    return result


def _drill(
    config: C,
    train: Callable[[C], Any],
    entry: CheckpointEntry,
    *,
    device: str,
    tolerance: float | None,
) -> DrillResult:
    assert entry.manifest is not None
    found = rehearse(
        config, train, entry.folder, entry.manifest, device=device, tolerance=tolerance
    )
    drilled = _outcome(found, entry.manifest, device)
    add_drill(entry.folder, drilled)
    return DrillResult(
        name=entry.folder.name, step=entry.step, generation=entry.generation, drilled=drilled
    )


def newest(run_dir: Path) -> CheckpointEntry | None:
    """The checkpoint that a restart would take; None when there is none."""
    entries = list_checkpoints(run_dir)
    passed = passed_over(entries, recall(run_dir).left)
    return next((e for e in usable(entries) if e.folder.name not in passed), None)


def journal_alone(run_dir: Path) -> None:
    """Puts drills that are not on record into the journal of a run that nobody drives; a tracker does it by itself."""
    try:
        lock = RunLock(run_dir, wait_s=0.0)
    except ConfigError:
        return
    with contextlib.closing(lock), JsonLines(run_dir / JOURNAL_NAME, sync=True) as journal:
        known, generation = recall(run_dir).drills, last_generation(run_dir / JOURNAL_NAME)
        for entry in list_checkpoints(run_dir):
            name = entry.folder.name
            for drilled in read_drills(entry.folder) if entry.manifest else ():
                if drilled.time <= known.get(name, 0.0):
                    continue
                for event in journal_events(drilled):
                    where = {"generation": generation, "name": name, "step": entry.step}
                    journal.append({"time": time.time(), **where, **event})


@contextlib.contextmanager
def _pinned(run_dir: Path, step: str, *, again: bool) -> Iterator[CheckpointEntry | None]:
    """The checkpoint to drill, which stays while the block runs."""
    with contextlib.ExitStack() as stack:
        for tries_left in reversed(range(_TRIES)):
            entry = _choose(run_dir, step)
            if not again and read_drills(entry.folder):
                yield None
                return
            try:
                stack.enter_context(held(entry.folder))
                break
            except ConfigError:
                if not tries_left:
                    raise
        yield entry


def _choose(run_dir: Path, step: str) -> CheckpointEntry:
    entry = pick(list_checkpoints(run_dir), step) if step else newest(run_dir)
    if entry is None:
        raise ConfigError(f"nothing to drill: {run_dir} has no checkpoint that can be restored")
    if not entry.usable:
        why = entry.quarantined or entry.fault
        raise ConfigError(f"{entry.folder.name} is not drilled, no restart would take it: {why}")
    return entry


def _outcome(found: Restored, manifest: Manifest, device: str) -> Drilled:
    if found.faults and all(fault.unreadable for fault in found.faults):
        first = found.faults[0]
        raise StorageError(
            f"{manifest.name}/{first.path}: {first.fault}. Whether it can be restored is not known: mend access to the "
            "storage, and drill again."
        )
    problems = (*(f"{fault.path}: {fault.fault}" for fault in found.faults), *found.problems)
    judged = found.judgement
    return Drilled(
        time=time.time(),
        ok=not problems,
        problems=problems,
        notes=found.notes,
        faults=tuple(asdict(fault) for fault in found.faults),
        loss=found.loss.loss if found.loss else None,
        expected=found.expected.loss if found.expected else None,
        difference=judged.difference if judged else None,
        tolerance=judged.tolerance if judged else None,
        same_bits=judged.same_bits if judged else None,
        digest=found.loss.digest if found.loss else "",
        verify_s=found.verify_s,
        load_s=found.load_s,
        bytes=manifest.total_bytes,
        host=platform.node(),
        pid=os.getpid(),
        device=torch.device(device).type,
        versions=versions(),
    )
