"""What a training function holds: restore, batches, step_end.

::

    session = ray_ckpt.attach(config)
    model = session.spread(build_model(), example_input)
    ...
    session.validate_with(loss_of)  # optional: what a drill compares
    session.restore(TrainState(model=model, optimizer=optimizer, scheduler=scheduler))
    for batch in session.batches():
        for micro in batch:
            batch.backward(micro, loss_of(model, micro.tokens))
        norm = session.clip_grad_norm(1.0)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        session.step_end(lr=scheduler.get_last_lr()[0], grad_norm=norm)
    session.close()

All ranks call the same methods in the same order. Rank 0 alone talks to the tracker, without waiting for it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.batch import Batch, MicroStep
from ray_ckpt.checkpoint.memory import check_memory
from ray_ckpt.checkpoint.restore import with_rng
from ray_ckpt.checkpoint.saver import Saver, SaveResult
from ray_ckpt.checkpoint.staging import Stager, size_bytes
from ray_ckpt.config import Config
from ray_ckpt.data.catalog import load_data
from ray_ckpt.data.feed import Feed, LocalFeed, MicroBatch, RayFeed, Transform
from ray_ckpt.data.fixed import fixed_rows
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.replaced import RecordedFeed
from ray_ckpt.elastic.control import Agreement, Vote, agree, digest_samples
from ray_ckpt.elastic.parallel import Reducer, pads, spread
from ray_ckpt.errors import NonfiniteError, RollbackError, StorageError
from ray_ckpt.facts import order_of
from ray_ckpt.reporter import Reporter
from ray_ckpt.resume import resume
from ray_ckpt.skips import stretches
from ray_ckpt.state import rng
from ray_ckpt.state.train_state import Progress, TrainState
from ray_ckpt.tracker.client import TrackerClient
from ray_ckpt.tracker.steward import Steward
from ray_ckpt.tracker.talk import Talk
from ray_ckpt.validation import METRIC, LossFunction, Validated, Validation
from ray_ckpt.watch import Watch

logger = logging.getLogger(__name__)

# Saves in a row that may fail on the nodes before one goes straight to the durable folder.
DIRECT_AFTER = 2


class Session:
    """One worker's view of one attempt of a run.

    Args:
        config: of the run.
        tracker: on rank 0, who to ask; None on the others.
        device: of this rank.
        nodes: on rank 0, node of each rank, for the record.
        node: of this rank.
    """

    def __init__(
        self,
        config: Config,
        *,
        tracker: TrackerClient | None,
        device: torch.device,
        nodes: list[str] | None = None,
        node: str = "",
    ) -> None:
        self.config, self.device = config, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.index = load_data(config.sources)
        self.plan = BatchPlan(
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            world_size=self.world_size,
            rank=self.rank,
        )
        self.order = order_of(self.index, config)
        timeout = timedelta(seconds=config.saving.timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._talk = Talk(tracker, dist.new_group(backend="gloo", timeout=timeout))
        self._nodes, self._node = nodes or [], node
        self._stack = config.tiers.stack()
        self._run_dir = config.run_dir
        self._state: TrainState | None = None
        self._batch: Batch | None = None
        self._transform: Transform | None = None
        self._reducer: Reducer | None = None
        self._model: torch.nn.Module | None = None
        self._validation: Validation | None = None
        self._reporter = Reporter(self._run_dir, self.rank) if config.saving.report_to_ray else None
        self._unreported: dict[
            int, dict[str, float]
        ] = {}  # of saves that Ray Train was not told of
        self._prepared_bytes = 0
        self._seen = time.monotonic()
        self._data_wait_s = self._between_s = 0.0

    def spread(self, model: torch.nn.Module, example: torch.Tensor) -> torch.nn.Module:
        """Spreads a model over the workers, as ``--parallel`` and ``--exact`` say.

        Args:
            model: with the same initial weights on every rank.
            example: one input of the model.

        Returns:
            The model to train.
        """
        model, self._reducer = spread(
            model,
            example,
            parallel=self.config.parallel,
            exact=self.config.exact,
            device=self.device,
            addends=self.plan.num_micro_batches,
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
        """
        model = self._check_validation(rows)
        self._validation = Validation(
            loss,
            fixed_rows(self.index, self.config.seed, rows, self.config.reading.on_corrupt),
            rows_per_pass=self.config.micro_batch,
            device=self.device,
        )
        self._validation.measure(model)

    def _check_validation(self, rows: int) -> torch.nn.Module:
        if self._model is None or self._state is not None:
            raise RuntimeError("call validate_with() after spread() and before restore()")
        if rows < 1:
            raise ValueError(f"validate_with(rows={rows}): give at least 1")
        return self._model

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales the gradients down to a global norm; returns the norm before."""
        return self._spread_model().clip_grad_norm(max_norm)

    # ---- restore --------------------------------------------------------------------------------

    def restore(self, state: TrainState) -> TrainState:
        """Brings ``state`` to where the run is, and fixes this attempt's generation.

        Every rank verifies its share of the checkpoint's bytes first. A checkpoint that fails is set aside by
        the tracker, and the next older one is taken.

        Raises:
            RestoreError: no checkpoint can be used although there are some, or they do not fit the state.
        """
        attempt = resume(
            state,
            self.config,
            self._talk,
            group=self._group,
            device=self.device,
            nodes=self._nodes,
            node=self._node,
            first_micro_batch=self.plan.micro_batches[0],
        )
        self._state, self._segment, self._skips = state, attempt.segment, attempt.skips
        self.order = order_of(self.index, self.config, self._segment)
        self._watch = Watch(
            self.config.guard, rank=self.rank, device=self.device, scaled=state.is_scaled
        )
        if self.config.exact and state.progress.step:
            self._spread_model().exponent = state.progress.grad_exponent
        self._steward = Steward(
            tracker=self._talk.tracker,
            attempt=attempt,
            start_step=state.progress.step,
            total_steps=self.config.steps,
        )
        self._first_step = state.progress.step + 1
        self._saver = Saver(
            run_dir=self._first_tier(),
            node=self._node,
            generation=attempt.generation,
            group=self._group,
            stager=Stager(self.config.saving.staging, state.optimizers),
            on_result=self._saved,
            inspect=self._watch.scan,
            signed=attempt.signed,
        )
        self._prepare()
        self._seen = time.monotonic()
        return state

    # ---- train ----------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self._restored().progress

    def batches(self, transform: Transform | None = None) -> Iterator[Batch]:
        """Yields this rank's part of each global batch, from where the run is to its last step.

        Args:
            transform: from Arrow table to Arrow table, applied while reading (Ray Data's ``map_batches``). It
                must keep the rows, their order and the columns ``row``, ``position`` and ``stream``; it may
                change tokens, and add columns, which are then in ``micro.source.columns``. Positions count from the
                start of the segment (:mod:`ray_ckpt.segment`).
        """
        self._restored()
        own_step = self._segment.own_step  # an order counts from the start of its segment
        start, stop = own_step(self.progress.step), own_step(self.config.steps)
        self._transform = transform
        holes = [replace(skip, from_step=own_step(skip.from_step)) for skip in self._skips]
        feed = self._feed()
        steps = chain.from_iterable(feed.steps(*each) for each in stretches(start, stop, holes))
        while True:
            asked = time.monotonic()
            micro_batches = next(steps, None)
            if micro_batches is None:
                return
            self._data_wait_s = time.monotonic() - asked
            self._between_s = asked - self._seen
            if self._batch is not None:
                raise RuntimeError(
                    "step_end() was not called for the last batch: call it once on every rank after the "
                    "optimizer's step, or the run would not know what it has trained on."
                )
            self._batch = self._make_batch(micro_batches)
            yield self._batch

    def step_end(self, *, lr: float, grad_norm: float | None = None) -> Agreement:
        """Ends an optimizer step: counts it, and saves if the tracker wants a save here.

        Args:
            lr: learning rate of the step, for the record.
            grad_norm: norm of the gradients before clipping, for the record.

        Returns:
            The global loss and what the ranks agreed on.

        Raises:
            NonfiniteError: the run is no longer finite, and stops (``--guard.on-nonfinite``).
            RollbackError: the same, and the next attempt begins at a checkpoint from before.
        """
        state, batch = self._restored(), self._batch
        if batch is None:
            raise RuntimeError(
                "step_end() without a batch: call it once for each batch of batches()"
            )
        if not batch.finished:
            raise RuntimeError(
                "step_end() before all passes of the batch: iterate over the batch to its end"
            )
        self._batch = None
        step = state.progress.step + 1
        loss, bad_losses = batch.loss
        agreement = agree(
            Vote(
                loss=loss,
                bad_losses=bad_losses,
                tokens=batch.num_tokens,
                busy=self._saver.busy,
                wants_save=self._steward.wants_save(step),
                wants_report=self._reporter is not None and self._reporter.waiting,
                digest=digest_samples(batch.micro_batches),
                rng_digest=batch.rng_digest,
                trouble=self._steward.trouble is not None or self._watch.is_bad(grad_norm),
                wants_direct=self._bypasses(DIRECT_AFTER),
            ),
            self.device,
            self.plan.num_micro_batches,
        )
        now = time.monotonic()
        state.progress = Progress(
            step=step,
            samples=state.progress.samples + self.config.global_batch,
            tokens=state.progress.tokens + agreement.tokens,
            grad_exponent=self._spread_model().exponent,
        )
        self._steward.executed(self._step_record(agreement, lr, grad_norm, now - self._seen))
        if step == self._first_step:
            self._prepare()  # most optimizers make their state in the first step
        hold_s = self._save(direct=agreement.direct) if agreement.save else 0.0
        if self._watch.must_end(agreement):
            self._end()
        if agreement.report and self._reporter is not None:
            self._reporter.report()
        self._steward.exchange(flush=False)
        if self._steward.durable_step in self._unreported:
            self._report(self._steward.durable_step)
        if hold_s:
            self._hold(hold_s)
        self._seen = time.monotonic()
        return agreement

    def close(self) -> None:
        """Ends the attempt; a run that reached its last step is committed there and marked as finished.

        Raises:
            StorageError: the last checkpoint could not be committed.
            NonfiniteError: the guard refused it, or one before it.
            RollbackError: the same, and the next attempt begins at a checkpoint from before.
        """
        state = self._restored()
        self._saver.wait(self.config.saving.timeout_s)
        self._check_last_save()
        if state.progress.step < self.config.steps:
            self._steward.exchange(flush=True)
            return
        for tries_left in reversed(range(self.config.saving.final_tries)):
            if self._talk.told(self._steward.is_committed(state.progress.step)):
                break
            if not tries_left:
                raise StorageError(
                    f"the state of the last step {state.progress.step} could not be committed "
                    f"({self._steward.problem}). Mend the storage and start the run again: it goes on from the "
                    "checkpoint before."
                )
            self._save(direct=self._talk.told(self._bypasses(1)))
            self._saver.wait(self.config.saving.timeout_s)
            self._check_last_save()
        self._wait_until_durable()
        if self._reporter is not None and self._talk.told(self._reporter.waiting):
            self._reporter.report()
        self._steward.exchange(flush=True)
        self._talk.ask("finished", generation=self._steward.generation, step=state.progress.step)
        self._saver.close(self.config.saving.timeout_s)

    def _wait_until_durable(self) -> None:
        """The end of a run is in the tier that survives the cluster, before the cluster may go."""
        if not self._stack.node_tiers:
            return
        step, generation = self.progress.step, self._steward.generation
        deadline = time.monotonic() + self.config.saving.timeout_s
        while problem := self._talk.ask("durable", generation=generation, step=step):
            if self._talk.told(time.monotonic() >= deadline):
                raise StorageError(
                    f"the state of the last step {step} is on the nodes, and did not get to the durable tier within "
                    f"--saving.timeout-s {self.config.saving.timeout_s:g} ({problem}). Mend the storage and start "
                    "the run again while the cluster lives."
                )
            time.sleep(0.2)
        self._report(step)

    # ---- no longer sane -------------------------------------------------------------------------

    def _end(self) -> None:
        """Ends the attempt on all ranks, as the tracker says."""
        # What is in flight may be the checkpoint to go back to.
        self._saver.wait(self.config.saving.timeout_s)
        self._steward.exchange(flush=True)
        step, what = self._steward.trouble or (
            self.progress.step,
            self._watch.what(self._steward.last_record),
        )
        remedy = self._talk.ask(
            "trouble",
            generation=self._steward.generation,
            step=step,
            what=what,
            skips=self._skips,
        )
        raise (NonfiniteError if remedy.action == "stop" else RollbackError)(remedy.reason)

    def _check_last_save(self) -> None:
        """Ends a run whose last save was refused; no later one will make it good."""
        goes_on = self.config.guard.on_nonfinite == "go-on"
        if self._talk.told(self._steward.trouble is not None and not goes_on):
            self._end()
        step = self.progress.step
        last = step == self.config.steps
        if last and self._talk.told(self._steward.refused_step == step):
            raise NonfiniteError(
                f"the state of the last step {step} is kept, but not committed ({self._steward.problem}). Start the "
                "run again: it goes on from the checkpoint before. If the state is good, say so with "
                "--guard.band-factor 0 or --guard.ignore NAME."
            )

    # ---- inside ---------------------------------------------------------------------------------

    def _restored(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("call restore(state) first, also for a new run")
        return self._state

    def _spread_model(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(
                "call spread(model, example) first, and train the model that it returns"
            )
        return self._reducer

    def _feed(self) -> Feed:
        reading = self.config.reading
        feed: Feed
        if reading.feed == "local":
            feed = LocalFeed(
                index=self.index,
                order=self.order,
                plan=self.plan,
                transform=self._transform,
                on_corrupt=reading.on_corrupt,
            )
        else:
            feed = RayFeed(
                index=self.index,
                order=self.order,
                plan=self.plan,
                rows_per_task=reading.rows_per_task,
                read_tasks=reading.read_tasks,
                prefetch_batches=reading.prefetch_batches,
                transform=self._transform,
                on_corrupt=reading.on_corrupt,
            )
        if reading.on_corrupt == "fatal":
            return feed
        return RecordedFeed(
            feed=feed,
            index=self.index,
            order=self.order,
            run_dir=self._run_dir,
            facts={"rank": self.rank, "generation": self._steward.generation},
            steps_before=self._segment.start_step,
        )

    def _make_batch(self, micro_batches: list[MicroBatch]) -> Batch:
        count = self.plan.max_share if pads(self.config.parallel) else len(micro_batches)
        padded = micro_batches + [micro_batches[-1]] * (count - len(micro_batches))
        passes = [
            MicroStep(
                tokens=torch.from_numpy(micro.tokens).to(self.device, non_blocking=True),
                company=i >= len(micro_batches),
                last=i == count - 1,
                source=micro,
            )
            for i, micro in enumerate(padded)
        ]
        return Batch(passes, self._spread_model(), self._before_pass, self.device)

    def _before_pass(self, micro: MicroStep) -> None:
        # In exact mode dropout must not know who computes a micro-batch, nor how often it was computed.
        if self.config.exact:
            rng.seed_all(self.config.seed, self.progress.step, micro.source.index)

    def _step_record(
        self, agreement: Agreement, lr: float, grad_norm: float | None, seconds: float
    ) -> dict[str, Any]:
        progress = self.progress
        return {
            "step": progress.step,
            "loss": agreement.loss,
            "loss_hex": agreement.loss.hex(),
            "lr": lr,
            "grad_norm": grad_norm,
            "sample_offset": progress.samples,
            "sample_digest": agreement.digest,
            "rng_digest": agreement.rng_digest,
            "tokens": agreement.tokens,
            "world_size": self.world_size,
            "generation": self._steward.generation,
            "segment": self._segment.number,
            "step_time_s": seconds,
            # Parts of the step's time; of rank 0, as all in this line.
            "data_wait_s": self._data_wait_s,
            "between_s": self._between_s,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "save_waits": agreement.save_waits,
        }

    def _full_state(self) -> dict[str, Any]:
        return with_rng(self._restored().state_dict(), self.rank, self.device)

    def _prepare(self) -> None:
        """Makes the buffers for saving, where the state is more than they were made for; every rank calls it."""
        full_state = self._full_state()
        grown = max(0, size_bytes(full_state) - self._prepared_bytes)
        # Asked together whoever needs what: a rank with an empty shard grows by nothing, and must not be waited for.
        check_memory(grown, self._group)
        if grown:
            self._saver.prepare(full_state)
            self._prepared_bytes += grown

    def _first_tier(self) -> Path:
        """The run's folder in the tier that this rank writes into."""
        tiers = self._stack.node_tiers
        return self._stack.root(tiers[0], self._run_dir) if tiers else self._run_dir

    def _bypasses(self, failures: int) -> bool:
        """On rank 0: whether the tiers on the nodes failed so often that the next save does without them.

        A full memory or a dead holder must not keep a run from its durable folder; an object store cannot be
        written by workers.
        """
        possible = bool(self._stack.node_tiers) and not self._stack.remote
        return possible and self.rank == 0 and self._steward.failures >= failures

    def _save(self, *, direct: bool = False) -> float:
        """Begins a save; returns how long to hold after it, seconds (0 on ranks other than 0).

        Args:
            direct: straight to the durable folder, past the tiers on the nodes.
        """
        # First: once the save is committed no later attempt makes these steps again, nor writes their lines.
        self._steward.exchange(flush=True)
        progress = self.progress
        validated = None
        if self._validation is not None:
            validated = self._validation.measure(self._restored().model)
        self._saving = progress, self._steward.last_record, validated
        self._direct = direct
        hold_s = self._steward.saving(progress.step)
        self._saver.save(progress.step, self._full_state, self._run_dir if direct else None)
        return hold_s

    def _hold(self, seconds: float) -> None:
        """Rank 0 waits for the end of the attempt, and the others for rank 0; goes on when it does not come."""
        deadline = time.monotonic() + seconds
        self._saver.wait(seconds)
        while time.monotonic() < deadline and not self._steward.asked:
            time.sleep(0.05)
            self._steward.exchange(flush=True)

    def _saved(self, result: SaveResult) -> None:
        """On rank 0, in the background: asks the tracker to commit what was written."""
        progress, record, validated = self._saving
        save: dict[str, Any] = {
            "step": result.step,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "world_size": self.world_size,
            "files": [asdict(entry) for entry in result.files],
            "places": result.places,
            "direct": self._direct,
            "stall_s": result.stall_s,
            "upload_s": result.write_s,
            "error": result.error,
            "metrics": _metrics(record, validated),
            "validation": validated.to_json() if validated else {},
            "guard": self._watch.report(result.guard, record),
            "bitwise_comparable": self._watch.bitwise_comparable,
            "skipped": [asdict(skip) for skip in self._skips],
        }
        if self._reporter is not None:
            self._unreported[result.step] = save["metrics"]
        if self._steward.commit(save) and (self._direct or not self._stack.node_tiers):
            self._report(result.step)

    def _report(self, step: int) -> None:
        """On rank 0: a checkpoint of this attempt is in the durable tier, where Ray Train may look for it."""
        if self._reporter is not None and step in self._unreported:
            self._reporter.committed(step, self._steward.generation, self._unreported[step])
        self._unreported = {later: each for later, each in self._unreported.items() if later > step}


def _metrics(record: dict[str, Any], validated: Validated | None) -> dict[str, float]:
    metrics = {"loss": record.get("loss", math.nan)}
    return metrics if validated is None else {**metrics, METRIC: validated.loss}
