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

All ranks call the same methods in the same order. Rank 0 alone talks to the tracker, without waiting for it. What is
called at the wrong place is a ``RuntimeError`` with the right one; a rank that waits for others in vain gets an
:class:`ray_ckpt.errors.OutOfStepError` that names them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from ray_ckpt.alike import check_alike, state_lines
from ray_ckpt.batch import Batch, MicroStep, passes_of
from ray_ckpt.config import Config
from ray_ckpt.data.feed import Feed, MicroBatch, Transform
from ray_ckpt.data.own import MakeLoader
from ray_ckpt.elastic import sigterm
from ray_ckpt.elastic.control import Agreement, Vote, agree, agree_to_leave, digest_samples
from ray_ckpt.elastic.leash import Leash
from ray_ckpt.elastic.parallel import pads
from ray_ckpt.elastic.passclock import PassClock
from ray_ckpt.elastic.whereabouts import HERE
from ray_ckpt.elastic.word import Word
from ray_ckpt.ending import Ending
from ray_ckpt.errors import StateError
from ray_ckpt.facts import order_of
from ray_ckpt.feeding import make_feed, steps_of
from ray_ckpt.resume import resume
from ray_ckpt.saving import Saving
from ray_ckpt.session_model import ModelSession
from ray_ckpt.state import rng
from ray_ckpt.state.train_state import Progress, TrainState
from ray_ckpt.step_record import step_record
from ray_ckpt.tracker.client import TrackerClient
from ray_ckpt.tracker.listener import Listener
from ray_ckpt.tracker.records import Attempt
from ray_ckpt.tracker.steward import Steward
from ray_ckpt.usage import Usage
from ray_ckpt.validation import inner
from ray_ckpt.watch import Watch

logger = logging.getLogger(__name__)


class Session(ModelSession):
    """One worker's view of one attempt of a run.

    Args:
        config: of the run.
        tracker: on rank 0, who to ask; None on the others.
        device: of this rank.
        nodes: node of each rank, for the record, and so that one worker of a node asks for all.
        node: of this rank.
        check: on every rank, asks the tracker whether an attempt, by its number, is the present one; None: nobody is
            there to be asked.
    """

    def __init__(
        self,
        config: Config,
        *,
        tracker: TrackerClient | None,
        device: torch.device,
        nodes: list[str] | None = None,
        node: str = "",
        check: Callable[[int], object] | None = None,
    ) -> None:
        HERE.enter("start", 0)
        super().__init__(config, tracker=tracker, device=device)
        self._nodes, self._node = nodes or [], node
        self._batch: Batch | None = None
        self._transform: Transform | None = None
        self._loader: MakeLoader | None = None
        self._usage: Usage | None = None
        self._seen = time.monotonic()
        self._data_wait_s = self._between_s = 0.0
        self._clock, self._is_present = PassClock(device), check
        self._leash: Leash | None = None

    # ---- restore --------------------------------------------------------------------------------

    def restore(self, state: TrainState) -> TrainState:
        """Brings ``state`` to where the run is, and fixes this attempt's generation; once, also for a new run.

        Every rank verifies its share of the checkpoint's bytes first. A checkpoint that fails is set aside by
        the tracker, and the next older one is taken.

        Args:
            state: of the model that ``spread()`` gave; changed in place.

        Returns:
            The same state.

        Raises:
            RestoreError: no checkpoint can be used although there are some, or they do not fit the state.
            StateError: the state is of another model, or not alike on every rank.
            RuntimeError: called twice, or before ``spread()``.
        """
        self._check_restore(state)
        HERE.enter("restore")
        with self._roll.during("restore()"):
            check_alike("the state of TrainState", state_lines(state), self._words)
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
            self._begin(state, attempt)
        HERE.enter("between", self._first_step)
        return state

    def _check_restore(self, state: TrainState) -> None:
        if self._state is not None:
            raise RuntimeError(
                "restore() was called before: once in an attempt, with everything in one TrainState. To start anew, "
                "start the run again."
            )
        self._spread_model()
        if self._model is not None and state.model not in (self._model, inner(self._model)):
            raise StateError(
                "restore(TrainState(model=...)): that is not the model that spread() gave. Train, optimize and restore "
                "what spread() returns."
            )

    def _begin(self, state: TrainState, attempt: Attempt) -> None:
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
        self._saving = Saving(
            config=self.config,
            state=state,
            attempt=attempt,
            steward=self._steward,
            watch=self._watch,
            validation=self._validation,
            group=self._group,
            device=self.device,
            node=self._node,
            pace=self._clock.take,
        )
        self._ending = Ending(
            config=self.config,
            state=state,
            talk=self._talk,
            steward=self._steward,
            watch=self._watch,
            saving=self._saving,
            skips=attempt.skips,
            node=self._node,
        )
        self._listener = Listener(self._steward) if self._talk.tracker is not None else None
        sigterm.listen()  # below Ray Train the main thread has done so (elastic/callbacks.py)
        if self._is_present is not None and self.config.elastic.leash_s:
            mine = self._nodes.count(self._node)
            self._leash = Leash(
                partial(self._is_present, attempt.generation),
                self.config.elastic.leash_s,
                word=Word(self.config.run_dir, attempt.generation),
                turn=self._nodes[: self.rank].count(self._node) / max(1, mine - 1),
            )
            self._leash.start()
        self._usage = Usage(state, self.config.steps)
        self._seen = time.monotonic()

    # ---- train ----------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self._restored().progress

    def batches(
        self, transform: Transform | None = None, *, loader: MakeLoader | None = None
    ) -> Iterator[Batch]:
        """Yields this rank's part of each global batch, from where the run is to its last step.

        Args:
            transform: from Arrow table to Arrow table, applied while reading (Ray Data's ``map_batches``). It
                must keep the rows, their order and the columns ``row``, ``position`` and ``stream``; it may
                change tokens, and add columns, which are then in ``micro.source.columns``. Positions count from the
                start of the segment (:mod:`ray_ckpt.segment`).
            loader: for a dataset of your own (``--samples``): makes a loader of it from the batch sampler that it is
                given, such as ``lambda sampler: DataLoader(dataset, batch_sampler=sampler)``. Each item of it is a
                micro-batch, ``micro.data``. Called again where the order has a hole.

        Raises:
            RuntimeError: called before ``restore()``, or ``step_end()`` was not called for the last batch.
            ConfigError: a loader without ``--samples``, or the other way round.
            DataError: a damaged file, or a loader that does not follow its sampler.
        """
        self._restored()
        self._transform, self._loader = transform, loader
        start, stop = self.progress.step, self.config.steps
        steps = steps_of(self._feed(), self._segment, self._skips, start, stop)
        while True:
            asked = time.monotonic()
            HERE.enter("data")
            micro_batches = next(steps, None)
            if micro_batches is None:
                HERE.enter("close")
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
            RuntimeError: called twice for a batch, or before all of its passes; or no optimizer made a step.
            StateError: the model is another than at ``restore()``.
            OutOfStepError: other ranks did not come within ``--saving.timeout-s``, or are gone.
            NonfiniteError: the run is no longer finite, and stops (``--guard.on-nonfinite``).
            RollbackError: the same, and the next attempt begins at a checkpoint from before.
            LeavingError: a node or a worker will be taken away, and this step is safe: the attempt ends.
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
        HERE.enter("agree")
        begun_s = time.monotonic()
        try:
            return self._end_step(state, batch, step, lr, grad_norm)
        except RuntimeError as error:
            self._roll.judge(error, f"step_end() of step {step}", begun_s)
            raise

    def _end_step(
        self, state: TrainState, batch: Batch, step: int, lr: float, grad_norm: float | None
    ) -> Agreement:
        loss, bad_losses = batch.loss
        wants_leave, unsaved = self._wants_leave()
        agreement = agree(
            Vote(
                loss=loss,
                bad_losses=bad_losses,
                tokens=batch.num_tokens,
                busy=self._saving.busy,
                wants_save=self._steward.wants_save(step),
                wants_report=self._saving.wants_report,
                digest=digest_samples(batch.micro_batches),
                rng_digest=batch.rng_digest,
                trouble=self._steward.trouble is not None or self._watch.is_bad(grad_norm),
                wants_direct=self._saving.bypasses(),
                wants_leave=wants_leave,
                unsaved=unsaved,
                wants_hold=self._steward.holds,
            ),
            self.device,
            self.plan.num_micro_batches,
            self._votes,
        )
        assert self._usage is not None
        self._usage.check_optimizer(step, loss=agreement.loss, grad_norm=grad_norm)
        now = time.monotonic()
        self._clock.settle(counts=step != self._first_step)
        state.progress = Progress(
            step=step,
            samples=state.progress.samples + self.config.global_batch,
            tokens=state.progress.tokens + agreement.tokens,
            grad_exponent=self._spread_model().exponent,
        )
        self._steward.executed(
            step_record(
                state.progress,
                agreement,
                lr=lr,
                grad_norm=grad_norm,
                world_size=self.world_size,
                generation=self._steward.generation,
                segment=self._segment.number,
                step_time_s=now - self._seen,
                data_wait_s=self._data_wait_s,
                between_s=self._between_s,
            )
        )
        if agreement.save or step == self._first_step:
            self._usage.check_model()
        if step == self._first_step:
            self._saving.prepare()  # most optimizers make their state in the first step
        hold_s = self._saving.save(direct=agreement.direct) if agreement.save else 0.0
        if self._watch.must_end(agreement):
            HERE.enter("close")
            self._ending.trouble()
        if agreement.leave and step < self.config.steps:  # a run that is complete ends anyway
            self._leave(agreement.unsaved)
        if agreement.report:
            self._saving.report()
        self._steward.exchange(flush=False)
        self._saving.tell_durable(self._steward.durable_step)
        if agreement.save and agreement.hold:
            HERE.enter("hold")
            self._hold(hold_s)
        HERE.enter("between", step + 1)
        self._usage.step_ended(step)
        self._seen = time.monotonic()
        return agreement

    def pause_point(self) -> None:
        """Lets the attempt end between two steps, as it may at the end of one; costs a small all-reduce.

        Long work between steps (an evaluation, say) calls it now and then, on every rank equally often: the time
        from a notice to the end of a node may be shorter than that work.

        Raises:
            LeavingError: a node or a worker will be taken away, and the last step is safe: the attempt ends.
        """
        self._restored()
        if self._batch is not None:
            raise RuntimeError("pause_point() within a step: call it after step_end()")
        wants_leave, unsaved = self._wants_leave()
        step = self.progress.step
        with self._roll.during(f"pause_point() after step {step}"):
            leave, unsaved = agree_to_leave(
                wants_leave=wants_leave, unsaved=unsaved, group=self._words
            )
            if leave:
                # Without a step there is nothing that is not safe already.
                self._leave(unsaved or step < self._first_step)

    def close(self) -> None:
        """Ends the attempt; a run that reached its last step is committed there and marked as finished.

        Called after the loop, on every rank; a second time it does nothing.

        Raises:
            OutOfStepError: other ranks did not leave the loop after the same step, or are gone.
            StorageError: the last checkpoint could not be committed.
            NonfiniteError: the guard refused it, or one before it.
            RollbackError: the same, and the next attempt begins at a checkpoint from before.
        """
        step = self._restored().progress.step
        assert self._usage is not None
        if self._usage.is_closed:
            return
        self._usage.closed()
        HERE.enter("close")
        with self._roll.during(f"close() after step {step}"):
            dist.barrier(group=self._words)  # rank 0 would end alone, and nobody know
            self._ending.close()
        HERE.enter("done")
        sigterm.ignore()
        if self._leash is not None:
            self._leash.stop()
        if self._listener is not None:
            self._listener.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _wants_leave(self) -> tuple[bool, bool]:
        """Whether this rank wants the attempt to end, and without a save."""
        leave = self._steward.leave
        wants = sigterm.terminated() or leave is not None
        return wants, leave is not None and not leave.saves

    def _hold(self, seconds: float) -> None:
        """Stands still at this step: what is made after the save would be lost with the attempt."""
        self._saving.hold(seconds, self._talk.told)
        leave = self._steward.leave  # on rank 0
        if self._talk.told(leave is not None):
            self._leave(self._talk.told(leave is not None and not leave.saves))

    def _leave(self, unsaved: bool) -> None:
        HERE.enter("close")
        self._ending.leave(terminated=sigterm.terminated(), unsaved=unsaved)

    def _restored(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("call restore(state) first, also for a new run")
        return self._state

    def _feed(self) -> Feed:
        return make_feed(
            self.config,
            index=self.index,
            order=self.order,
            plan=self.plan,
            transform=self._transform,
            loader=self._loader,
            generation=self._steward.generation,
            steps_before=self._segment.start_step,
        )

    def _make_batch(self, micro_batches: list[MicroBatch]) -> Batch:
        count = self.plan.max_share if pads(self.config.parallel) else len(micro_batches)
        passes = passes_of(micro_batches, count, self.device)
        step = self.progress.step + 1
        reducer = self._spread_model()
        roll, clock = self._roll, self._clock
        exact = self.config.exact
        return Batch(passes, reducer, self._before_pass, self.device, roll, step, clock, exact)

    def _before_pass(self, micro: MicroStep) -> None:
        # In exact mode dropout must not know who computes a micro-batch, nor how often it was computed.
        if self.config.exact:
            rng.seed_all(self.config.seed, self.progress.step, micro.source.index)
