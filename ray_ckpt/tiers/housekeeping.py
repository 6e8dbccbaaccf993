"""One round of housekeeping: look, judge, read back what must be trusted first, delete.

Shared by the run's tracker and by ``ray-ckpt gc``, so that both keep and delete by the same rules. A round ends
before anything is deleted when a checkpoint has to be read back: what that found belongs on record first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ray_ckpt.checkpoint.manifest import Manifest, read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME
from ray_ckpt.checkpoint.trust import key_problem
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import ConfigError, ManifestError, SignatureError, StorageError
from ray_ckpt.tiers.collect import Gate, Outcome, collect, mend
from ray_ckpt.tiers.hold import release_dead
from ray_ckpt.tiers.retention import Verdict, plan, to_read_back
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stock import Passed, Stock, judge_orphans, take_stock

ReadBack = Callable[[Path], list[Fault]]
Verify = Callable[[Path, Manifest], list[Fault]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one round is to go by.

    Attributes:
        run_dir: the run's folder.
        rules: which checkpoints are kept.
        generation: of whoever decides; a newer one on storage ends the round.
        newest_generation: the newest there is on storage.
        present_generation: attempt whose saves may be in flight.
        verified: names of the checkpoints whose bytes were read and compared.
        in_use: name to what it is used for, in words.
        read_back: how a checkpoint is read back; None for not at all.
        gate: ends the round when it is shut.
        passed: why a checkpoint, although it is whole, is never restored; None when it may be.
        delete: False only looks and judges.
    """

    run_dir: Path
    rules: Rules
    generation: int
    newest_generation: Callable[[], int]
    present_generation: int
    verified: AbstractSet[str]
    in_use: Mapping[str, str]
    read_back: ReadBack | None
    gate: Gate
    passed: Passed = lambda entry: None
    delete: bool = True


class Judging(Protocol):
    """What rounds on every kind of storage go by; see :class:`Round`."""

    @property
    def rules(self) -> Rules: ...
    @property
    def generation(self) -> int: ...
    @property
    def newest_generation(self) -> Callable[[], int]: ...
    @property
    def present_generation(self) -> int: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def delete(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a round found and did.

    Attributes:
        stock: what there was.
        verdicts: on the committed checkpoints, newest first; empty when one had to be read back first.
        orphans: on the folders without a manifest, newest first.
        to_read: name of the checkpoint that has to be read back before more can be deleted; or empty.
        faults: what reading it back found; None when it was not read.
        seconds: how long that took.
        outcomes: what became of those that were to go.
    """

    stock: Stock
    verdicts: tuple[Verdict, ...] = ()
    orphans: tuple[Verdict, ...] = ()
    to_read: str = ""
    faults: tuple[Fault, ...] | None = None
    seconds: float = 0.0
    outcomes: tuple[Outcome, ...] = ()


def keep_house(task: Round, *, now_s: float) -> Findings:
    """Does one round.

    Args:
        task: what to go by.
        now_s: seconds since the epoch.

    Raises:
        ConfigError: the key in use is a wrong one.
        StorageError: the folder cannot be listed.
        StaleGenerationError: another attempt has begun.
    """
    if problem := key_problem(task.run_dir):
        raise ConfigError(problem)  # what is there cannot be told from what is not
    if task.delete:
        mend(task.run_dir)
        release_dead(task.run_dir)
    stock = take_stock(task.run_dir, verified=task.verified, in_use=task.in_use, passed=task.passed)
    back = task.read_back
    return judged(
        task,
        stock,
        read=None if back is None else lambda name: back(task.run_dir / CHECKPOINTS_DIR / name),
        delete=partial(collect, task.run_dir),
        now_s=now_s,
    )


def judged(
    task: Judging,
    stock: Stock,
    *,
    read: Callable[[str], Sequence[Fault]] | None,
    delete: Callable[..., list[Outcome]],
    now_s: float,
) -> Findings:
    """The rest of a round, the same for every kind of storage: read back what must be, or judge, and delete.

    Args:
        task: what to go by.
        stock: what there is.
        read: reads a checkpoint back, by its name; None for not at all.
        delete: deletes by verdicts; see :func:`ray_ckpt.tiers.collect.collect`.
        now_s: seconds since the epoch.
    """
    policies, limit = task.rules.policies(), task.rules.quarantined
    to_read = to_read_back(stock.records, policies, quarantined=limit)
    if to_read and read is not None:
        started = time.monotonic()
        faults = tuple(read(to_read))
        seconds = time.monotonic() - started
        return Findings(stock=stock, to_read=to_read, faults=faults, seconds=seconds)
    verdicts = plan(stock.records, policies, quarantined=limit)
    orphans = judge_orphans(
        stock.orphans,
        present_generation=task.present_generation,
        grace_s=task.rules.grace_s,
        now_s=now_s,
    )
    outcomes: list[Outcome] = []
    if task.delete:
        outcomes = delete(
            [*verdicts, *orphans],
            generation=task.generation,
            newest_generation=task.newest_generation,
            gate=task.gate,
        )
    return Findings(
        stock=stock,
        verdicts=tuple(verdicts),
        orphans=tuple(orphans),
        to_read=to_read,
        outcomes=tuple(outcomes),
    )


def read_back(folder: Path, verify: Verify = verify_files) -> list[Fault]:
    """Reads every byte of a checkpoint and compares it with the manifest; what is wrong, if anything.

    Args:
        folder: the checkpoint.
        verify: compares; only the manifest is read, and its signature checked, here.
    """
    try:
        return verify(folder, read_manifest(folder))
    except SignatureError as error:
        # Says nothing about the bytes: the key may be a wrong one.
        return [Fault(MANIFEST_NAME, f"unreadable: {error.fault}")]
    except ManifestError as error:
        return [Fault(MANIFEST_NAME, error.fault)]
    except StorageError as error:
        return [Fault(MANIFEST_NAME, f"unreadable: {error}")]
