"""How an attempt ends from within: with its last step safe, or because the run is no longer finite."""

from __future__ import annotations

import time
from typing import NoReturn

from ray_ckpt.config import Config
from ray_ckpt.elastic import sigterm
from ray_ckpt.errors import LeavingError, NonfiniteError, RollbackError, StorageError
from ray_ckpt.saving import Saving
from ray_ckpt.skips import Skip
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.tracker.steward import Steward
from ray_ckpt.tracker.talk import Talk
from ray_ckpt.watch import Watch


class Ending:
    """The end of one attempt; every rank takes part.

    Args:
        config: of the run.
        state: that is trained.
        talk: to the tracker.
        steward: rank 0's end of the line to the tracker.
        watch: says what was not finite.
        saving: the saves of the attempt.
        skips: holes in the order of the attempt.
        node: of this rank.
    """

    def __init__(
        self,
        *,
        config: Config,
        state: TrainState,
        talk: Talk,
        steward: Steward,
        watch: Watch,
        saving: Saving,
        skips: tuple[Skip, ...],
        node: str,
    ) -> None:
        self._node = node
        self._config, self._state, self._skips = config, state, skips
        self._talk, self._steward = talk, steward
        self._watch, self._saving = watch, saving
        self._timeout_s = config.saving.timeout_s

    def close(self) -> None:
        """Ends the attempt; a run that reached its last step is committed there and marked as finished.

        Raises:
            StorageError: the last checkpoint could not be committed.
            NonfiniteError: the guard refused it, or one before it.
            RollbackError: the same, and the next attempt begins at a checkpoint from before.
        """
        step = self._state.progress.step
        self._saving.wait(self._timeout_s)
        self._check_last_save()
        if step < self._config.steps:
            self._steward.exchange(flush=True)
            return
        for tries_left in reversed(range(self._config.saving.final_tries)):
            if self._talk.told(self._steward.is_committed(step)):
                break
            if not tries_left:
                raise StorageError(
                    f"the state of the last step {step} could not be committed "
                    f"({self._steward.problem}). Mend the storage and start the run again: it goes on from the "
                    "checkpoint before."
                )
            self._saving.save(direct=self._talk.told(self._saving.bypasses(1)))
            self._saving.wait(self._timeout_s)
            self._check_last_save()
        self._wait_until_durable()
        if self._config.saving.report_to_ray and self._talk.told(self._saving.wants_report):
            self._saving.report()
        self._steward.exchange(flush=True)
        self._talk.ask("finished", generation=self._steward.generation, step=step)
        self._saving.close(self._timeout_s)

    def leave(self, *, terminated: bool, unsaved: bool) -> None:
        """Ends the attempt on all ranks once the present step is safe; comes back when it could not be saved.

        Args:
            terminated: whether this rank's process got SIGTERM.
            unsaved: whether to leave without a save; the same on all ranks.

        Raises:
            LeavingError: the attempt ends here.
        """
        step, generation = self._state.progress.step, self._steward.generation
        said = self._talk.gather(self._node if terminated else None)
        ranks = {rank: node for rank, node in enumerate(said) if node is not None}
        if ranks:
            self._talk.ask("terminated", generation=generation, step=step, ranks=ranks)
        # What is in flight may be the checkpoint that stands.
        self._saving.wait(self._timeout_s)
        self._check_last_save()
        if not unsaved and not self._talk.told(self._steward.is_committed(step)):
            self._saving.save(direct=self._talk.told(self._saving.bypasses(1)))
            self._saving.wait(self._timeout_s)
            self._check_last_save()
            if not self._talk.told(self._steward.is_committed(step)):
                return  # the next step tries again, for as long as the tracker sees a chance
        self._steward.exchange(flush=True)
        if not unsaved:
            self._wait_until_safe(generation, step)
        sigterm.ignore()  # it was heard
        how = "without a save" if unsaved else "which is safe"
        raise LeavingError(f"the attempt ends as planned, after step {step}, {how}")

    def _wait_until_safe(self, generation: int, step: int) -> None:
        """The step is where it outlives those who go; the tracker ends the wait when they are gone."""
        deadline = time.monotonic() + self._timeout_s
        while self._talk.ask("obstacle", generation=generation, step=step):
            if self._talk.told(time.monotonic() >= deadline):
                return  # staying would not help it
            time.sleep(0.1)

    def trouble(self) -> NoReturn:
        """Ends the attempt on all ranks, as the tracker says.

        Raises:
            NonfiniteError: the run is no longer finite, and stops (``--guard.on-nonfinite``).
            RollbackError: the same, and the next attempt begins at a checkpoint from before.
        """
        # What is in flight may be the checkpoint to go back to.
        self._saving.wait(self._timeout_s)
        self._steward.exchange(flush=True)
        step, what = self._steward.trouble or (
            self._state.progress.step,
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
        goes_on = self._config.guard.on_nonfinite == "go-on"
        if self._talk.told(self._steward.trouble is not None and not goes_on):
            self.trouble()
        step = self._state.progress.step
        last = step == self._config.steps
        if last and self._talk.told(self._steward.refused_step == step):
            raise NonfiniteError(
                f"the state of the last step {step} is kept, but not committed ({self._steward.problem}). Start the "
                "run again: it goes on from the checkpoint before. If the state is good, say so with "
                "--guard.band-factor 0 or --guard.ignore NAME."
            )

    def _wait_until_durable(self) -> None:
        """The end of a run is in the tier that survives the cluster, before the cluster may go."""
        if not self._config.tiers.stack().node_tiers:
            return
        step, generation = self._state.progress.step, self._steward.generation
        deadline = time.monotonic() + self._timeout_s
        while problem := self._talk.ask("durable", generation=generation, step=step):
            if self._talk.told(time.monotonic() >= deadline):
                raise StorageError(
                    f"the state of the last step {step} is on the nodes, and did not get to the durable tier within "
                    f"--saving.timeout-s {self._timeout_s:g} ({problem}). Mend the storage and start "
                    "the run again while the cluster lives."
                )
            time.sleep(0.2)
        self._saving.tell_durable(step)
