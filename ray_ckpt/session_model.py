"""The first half of a session: a rank joins the others, and the model is spread over them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.alike import check_alike, model_lines
from ray_ckpt.config import Config
from ray_ckpt.data.catalog import Index
from ray_ckpt.data.fixed import fixed_rows
from ray_ckpt.data.own import OwnIndex
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.elastic.parallel import Reducer, spread
from ray_ckpt.elastic.whereabouts import HERE
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import index_of, order_of
from ray_ckpt.rollcall import RollCall
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.tracker.client import TrackerClient
from ray_ckpt.tracker.talk import Talk
from ray_ckpt.validation import LossFunction, Validation


class ModelSession:
    """One worker's view of a run before it is restored; see :class:`ray_ckpt.session.Session`.

    Args:
        config: of the run.
        tracker: on rank 0, who to ask; None on the others.
        device: of this rank.
    """

    def __init__(
        self, config: Config, *, tracker: TrackerClient | None, device: torch.device
    ) -> None:
        self.config, self.device = config, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.index = index_of(config)
        self.plan = BatchPlan(
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            world_size=self.world_size,
            rank=self.rank,
        )
        self.order = order_of(self.index, config)
        self._group, words = self._new_group(), self._new_group()
        self._talk, self._words, self._roll = Talk(tracker, words), words, RollCall(words)
        # A group for each kind of call: a rank that is in the wrong one is waited for, and its bytes are not taken for
        # others. On a GPU both stay with the default group: communicators of NCCL are dear, and have a watchdog.
        on_cpu = device.type == "cpu"
        self._gradients = self._new_group() if on_cpu else None
        self._votes = self._new_group() if on_cpu else None
        self._state: TrainState | None = None
        self._reducer: Reducer | None = None
        self._model: torch.nn.Module | None = None
        self._validation: Validation | None = None

    def spread(
        self,
        model: torch.nn.Module,
        example: Any,
        *,
        units: Iterable[torch.nn.Module] | None = None,
    ) -> torch.nn.Module:
        """Spreads a model over the workers, as ``--parallel`` and ``--exact`` say; before its optimizer is made.

        Args:
            model: built alike on every rank: the same names, shapes and types, and with ``--parallel fsdp`` the same
                initial weights.
            example: one input of the model: a tensor, a tuple of arguments, or a dict of named ones. It goes through
                the model once, without effect.
            units: modules that become FSDP units; None for those in ``model.layers``, if it has that.

        Returns:
            The model to train, on this rank's device.

        Raises:
            StateError: the model is not alike on every rank, or gives nothing that depends on its parameters.
            RuntimeError: called twice.
        """
        if self._model is not None:
            raise RuntimeError(
                "spread() was called before: a session trains one model. Make one module of several, and spread that."
            )
        with self._roll.during("spread()"):
            check_alike("the model", model_lines(model), self._words)
            model, self._reducer = spread(
                model,
                example,
                parallel=self.config.parallel,
                exact=self.config.exact,
                device=self.device,
                addends=self.plan.num_micro_batches,
                units=units,
                group=self._gradients,
            )
        self._model = model
        return model

    def validate_with(self, loss: LossFunction, *, rows: int = 8) -> None:
        """Measures a loss on fixed rows at each save, for drills to compare with; optional, on every rank.

        The rows depend on the data and the seed alone (:mod:`ray_ckpt.data.fixed`), and no transform of ``batches()``
        touches them. The loss goes into the manifest as the metric ``validation_loss``. It is measured once here
        without effect, so that a mistake in the function is seen now and not at the first save.

        Args:
            loss: from the model (without DDP around it) and int64 [rows, seq_len] to their mean loss, a scalar.
            rows: how many; ``--micro-batch`` of them go through the model at a time.

        Raises:
            DataError: the rows cannot be read.
            ConfigError: the run has a dataset of its own (``--samples``), whose rows are not known here.
            RuntimeError: called before ``spread()``, or after ``restore()``.
            ValueError: less than one row, or the function gives something else than one number.
        """
        model, index = self._check_validation(rows)
        self._validation = Validation(
            loss,
            fixed_rows(index, self.config.seed, rows, self.config.reading.on_corrupt),
            rows_per_pass=self.config.micro_batch,
            device=self.device,
        )
        self._validation.measure(model)

    def _check_validation(self, rows: int) -> tuple[torch.nn.Module, Index]:
        if self._model is None or self._state is not None:
            raise RuntimeError("call validate_with() after spread() and before restore()")
        if rows < 1:
            raise ValueError(f"validate_with(rows={rows}): give at least 1")
        if isinstance(self.index, OwnIndex):
            raise ConfigError(
                "validate_with() draws its rows from --data, and the samples of this run are the training function's "
                "own (--samples). Leave it out: a drill checks all the rest, and says so."
            )
        return self._model, self.index

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales the gradients down to a global norm; every rank calls it, after the passes of a batch.

        Args:
            max_norm: of all gradients together.

        Returns:
            The norm before.
        """
        try:
            return self._spread_model().clip_grad_norm(max_norm)
        except RuntimeError as error:
            self._roll.judge(error, "clip_grad_norm()", HERE.now.since_s)
            raise

    def _new_group(self) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.config.saving.timeout_s)
        return dist.new_group(backend="gloo", timeout=timeout)

    def _spread_model(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(
                "call spread(model, example) first, and train the model that it returns"
            )
        return self._reducer
