"""A session that restores one checkpoint and ends there: the run's own training function, as far as ``restore()``.

What a drill needs is what a restart would do, with today's code: build the model, the optimizer and the rest, and load
the checkpoint into them. All of that is in the training function already. So it is called as it is, with ``attach()``
giving it this session; at ``restore()`` the checkpoint is verified, loaded and measured, and the function is left, by
an exception that is no ``Exception``. Nothing after ``restore()`` runs: no batch is read, no step is made.

It has no tracker, and there is nothing it could tell one: no generation is used, nothing is committed or rejected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ray_ckpt.checkpoint.guard import report
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.restore import load
from ray_ckpt.checkpoint.scan import scan_state
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.config import Config
from ray_ckpt.data.fixed import fixed_rows
from ray_ckpt.drill.judge import Judgement, judge_loss, judge_state
from ray_ckpt.errors import ConfigError, RestoreError, StorageError
from ray_ckpt.joining import standing_in
from ray_ckpt.session import Session
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.validation import LossFunction, Validated, Validation

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a rehearsal found.

    Attributes:
        faults: of the bytes; nothing was loaded when there are any.
        problems: of the state, one sentence each.
        notes: what differs and may, or could not be compared.
        judgement: on the loss; None when nothing was loaded.
        loss: measured after the restore.
        expected: measured at the commit.
        verify_s: time in which every byte was read and compared, seconds.
        load_s: time in which the state was loaded, seconds.
    """

    faults: tuple[Fault, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    judgement: Judgement | None = None
    loss: Validated | None = None
    expected: Validated | None = None
    verify_s: float = 0.0
    load_s: float = 0.0


class _Left(BaseException):
    """Leaves a training function; what it does about an ``Exception`` is its own business."""


class Rehearsal(Session):
    """One worker, whatever the world size of the save.

    Args:
        config: of the run.
        folder: of the checkpoint.
        manifest: of it.
        device: to restore to.
        tolerance: relative difference of losses that is let pass; None takes that of the kinds of devices.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        manifest: Manifest,
        *,
        device: torch.device,
        tolerance: float | None = None,
    ) -> None:
        super().__init__(config, tracker=None, device=device)
        self._folder, self._manifest, self._tolerance = folder, manifest, tolerance
        self._loss: tuple[LossFunction, int] | None = None
        self.found: Restored | None = None

    def validate_with(self, loss: LossFunction, *, rows: int = 8) -> None:
        """Takes the function; it is called when the model is restored."""
        _, self._rows_of = self._check_validation(rows)
        self._loss = loss, rows

    def restore(self, state: TrainState) -> NoReturn:
        """Verifies, loads and measures; then leaves the training function."""
        self._state = state
        started = time.monotonic()
        faults = verify_files(self._folder, self._manifest)
        verified = time.monotonic()
        if faults:
            self.found = Restored(faults=tuple(faults), verify_s=verified - started)
            raise _Left
        load(
            state,
            self._folder,
            self._manifest,
            self._group,
            self.device,
            self.config.saving.allow_missing,
        )
        loaded = time.monotonic()
        expected = expected_of(self._manifest)
        loss = self._measure(state.model, expected)
        judgement = judge_loss(expected, loss, self._tolerance)
        self.found = Restored(
            problems=(*self._check(state), *judgement.problems),
            notes=(*self._notes(), *judgement.notes),
            judgement=judgement,
            loss=loss,
            expected=expected,
            verify_s=verified - started,
            load_s=loaded - verified,
        )
        raise _Left

    def _check(self, state: TrainState) -> Iterator[str]:
        counts = (state.progress.step, state.progress.samples)
        if counts != (self._manifest.step, self._manifest.sample_offset):
            yield (
                f"the manifest is of step {self._manifest.step} and sample {self._manifest.sample_offset}, the state "
                f"in it of step {counts[0]} and sample {counts[1]}"
            )
        scan = scan_state(state.state_dict(), rank=0, ignore=self.config.guard.ignore)
        yield from judge_state(self._manifest.guard, report([scan]))

    def _notes(self) -> Iterator[str]:
        if self.index.fingerprint != self._manifest.data_fingerprint:
            yield (
                f"the data is another ({self.index.fingerprint}) than at its commit "
                f"({self._manifest.data_fingerprint}): of another segment, or a restart would refuse it"
            )

    def _measure(self, model: torch.nn.Module, expected: Validated | None) -> Validated | None:
        if self._loss is None:
            return None
        function, rows = self._loss
        if expected is not None:
            rows = expected.rows
        config = self.config
        return Validation(
            function,
            fixed_rows(self._rows_of, config.seed, rows, config.reading.on_corrupt),
            rows_per_pass=expected.rows_per_pass if expected else config.micro_batch,
            device=self.device,
        ).measure(model)


def expected_of(manifest: Manifest) -> Validated | None:
    """The validation that a manifest speaks of; None when there was none.

    Raises:
        RestoreError: it cannot be understood.
    """
    said = manifest.validation
    if not said:
        return None
    try:
        return Validated(
            loss=float.fromhex(said["loss_hex"]),
            digest=str(said["digest"]),
            rows=int(said["rows"]),
            rows_per_pass=max(1, int(said["rows_per_pass"])),
            device=str(said["device"]),
            seconds=float(said["seconds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RestoreError(
            f"{manifest.name}: what its manifest says of its validation cannot be understood ({error!r})"
        ) from error


def rehearse(
    config: C,
    train: Callable[[C], Any],
    folder: Path,
    manifest: Manifest,
    *,
    device: str = "cpu",
    tolerance: float | None = None,
) -> Restored:
    """Restores a checkpoint by means of a training function, in this process.

    Raises:
        ConfigError: the options are of no use.
        StorageError: storage failed, which says nothing about the checkpoint.
    """
    # Nobody reads ahead, and Ray Train is not there to be told anything.
    config = replace(
        config,
        reading=replace(config.reading, feed="local"),
        saving=replace(config.saving, report_to_ray=False),
    )
    place = torch.device("cuda:0" if device == "cuda" else device)  # DDP wants to know which
    with _alone():
        session = Rehearsal(config, folder, manifest, device=place, tolerance=tolerance)
        try:
            with standing_in(session):
                train(config)
        except _Left:
            assert session.found is not None
            return session.found
        except (ConfigError, StorageError):
            raise
        except RestoreError as error:
            return Restored(problems=(str(error),))
        except Exception as error:  # noqa: BLE001 - it is a finding: with this code no restart would succeed
            text = " ".join(str(error).split())
            return Restored(
                problems=(
                    f"the training function failed, a restart would too: {type(error).__name__}: {text[:500]}",
                )
            )
    raise ConfigError(
        "the training function ended without session.restore(): a drill goes as far as that, with the session that "
        "ray_ckpt.attach() gives"
    )


@contextmanager
def _alone() -> Iterator[None]:
    """A world of one: DDP, FSDP2 and DCP need one."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise ConfigError(
                f"a drill takes one process, and this one is among {dist.get_world_size()} of torch.distributed: "
                "drill in a process of its own"
            )
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
