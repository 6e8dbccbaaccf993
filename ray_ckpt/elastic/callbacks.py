"""What the Ray Train controller tells the tracker: why an attempt ended, and that a resize is near.

Three callbacks, because Ray tells worker errors to a ``UserCallback``, the workers themselves to a
``WorkerGroupCallback`` and decisions to a ``ControllerCallback`` (developer API, read in Ray 2.60). They share
one object in the controller's process, with the watch over hangs (:mod:`ray_ckpt.elastic.hangs`). Which nodes get no
workers is a callback by itself (:mod:`ray_ckpt.elastic.avoidance`).
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.train import UserCallback

from ray_ckpt.elastic.avoidance import Avoidance
from ray_ckpt.elastic.causes import Cause, ask_again, dead_nodes, find_cause
from ray_ckpt.elastic.crew import step_worked_on
from ray_ckpt.elastic.hangs import Hang, HangWatch
from ray_ckpt.elastic.hearing import hear_sigterm
from ray_ckpt.elastic.pulse import Pulse
from ray_ckpt.elastic.silent_nodes import wait_for_silent
from ray_ckpt.elastic.spares import Spares
from ray_ckpt.elastic.startmarks import WITHOUT_GROUP, StartMarks
from ray_ckpt.errors import RayCkptError
from ray_ckpt.policy.hang import HangRule
from ray_ckpt.ray_private import ControllerCallback, WorkerGroupCallback, refresh_reservations
from ray_ckpt.tracker.client import RayTracker

logger = logging.getLogger(__name__)

HOLD_S = 60.0  # Ray tears a group down within seconds; a resize that does not come must not stop training


class _Group:
    """The present worker group, as far as the controller has been told.

    Args:
        run: name of the run.
        node_loss_wait_s: longest wait for a dead node to be noticed, seconds.
    """

    def __init__(self, run: str, node_loss_wait_s: float) -> None:
        self.run, self._wait_s = run, node_loss_wait_s
        self.workers: list[Any] = []
        self.errors: dict[int, Exception] = {}
        self.word = ""  # names this group to the tracker, which counts the end of a group once
        self.hang: Hang | None = None  # why it ends, told before a worker is ended for it
        self.marks = StartMarks()

    def start(self, workers: list[Any]) -> None:
        """A new group is up."""
        self.workers, self.errors, self.word = workers, {}, uuid.uuid4().hex
        self.hang = None

    def cause(self) -> Cause:
        """Why the group failed.

        Also waits until the cluster knows of a dead node. Without that, Ray asks for a group of the
        old size, on nodes that are gone, and waits for it in vain.
        """
        errors = dict(self.errors)
        try:
            errors = {**errors, **ask_again(self.workers, self._wait_s)}
            wait_for_silent(self.workers, errors, self._wait_s)
            nodes = dead_nodes(self.workers)
            if nodes:
                refresh_reservations()
        except RayError as error:
            logger.warning("the failed workers could not be looked at: %s", error)
            nodes = {}
        found = find_cause(errors, nodes)
        found = found if self.hang is None else self.hang.cause(found)
        return replace(found, more={**found.more, "at_step": self._step()})

    def _step(self) -> int:
        """The step that was worked on; 0 when nobody knows."""
        try:
            return step_worked_on(self.workers)
        except RayError as error:
            logger.warning("the failed workers could not be asked for their step: %s", error)
            return 0

    def forget(self) -> None:
        """The group is gone."""
        self.workers, self.errors = [], {}


class GroupWatch(WorkerGroupCallback):
    """Remembers who the workers are, and tells the tracker how long it took to get them."""

    def __init__(self, group: _Group, spares: Spares | None = None) -> None:
        self._group, self._spares = group, spares

    def before_init_train_context(self, workers: Any) -> dict[str, list[Any]]:
        self._group.marks.workers_up()
        return {}

    def after_worker_group_start(self, worker_group: Any) -> None:
        # Ray's own callbacks come first: the process group is there.
        workers = list(worker_group.get_workers())
        self._group.start(workers)
        took = self._group.marks.group_up()
        hear_sigterm(workers)
        spares = self._spares.took(workers, took["asked_ago_s"]) if self._spares else 0
        try:
            RayTracker(self._group.run).call(
                "group_started", world_size=len(workers), spares=spares, **took
            )
        except (RayCkptError, RayError) as error:
            # Training does not depend on it; the ledger will not know this start's phases.
            logger.warning("how long the workers took to start is not on record: %s", error)


class WorkerErrors(UserCallback):
    """Listens to the errors of workers."""

    def __init__(self, group: _Group) -> None:
        self._group = group

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._group.errors.update(worker_exceptions)


class ControllerDecisions(ControllerCallback):
    """Journals the end of attempts; saves before a resize; stops a run that cannot get on.

    Args:
        group: shared with the other two.
        save_timeout_s: longest wait for the save before a resize, seconds.
    """

    def __init__(self, group: _Group, save_timeout_s: float) -> None:
        self._group, self._save_timeout_s = group, save_timeout_s

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        # The controller stays where it is when there is no room for the fewest workers.
        if (
            previous_state is current_state
            and type(current_state).__name__ in WITHOUT_GROUP
            and not self._group.workers
        ):
            self._group.marks.no_room()

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        if not self._group.workers:
            # The group never came up: no attempt of ours began, so none ended.
            logger.warning("a worker group did not start; Ray tries again")
            return
        noticed = time.monotonic()
        cause = self._group.cause()
        self._group.forget()
        verdict = RayTracker(self._group.run).call(
            "interruption",
            kind=cause.kind,
            cause=cause.text,
            group=self._group.word,
            noticed_ago_s=time.monotonic() - noticed,
            **cause.more,
        )
        if cause.hopeless or not verdict.go_on:
            # An error in a callback is one that the controller does not retry.
            raise RuntimeError(f"the run stops: {cause.hopeless or verdict.reason}")
        if verdict.wait_s:
            logger.warning("another attempt in %g s: the last ones failed fast", verdict.wait_s)
            time.sleep(verdict.wait_s)  # seconds; there is nothing else to do

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        if not self._group.workers:
            self._group.marks.ask()
            return  # the group is already down: this decision only starts the next one
        self._save_and_tell(resize_decision)
        self._group.marks.ask()

    def _save_and_tell(self, resize_decision: Any) -> None:
        workers = resize_decision.num_workers
        tracker = RayTracker(self._group.run)
        try:
            cause = Cause(kind="resize", text=f"the cluster has room for {workers} workers")
            if dead := self._save_first(tracker, workers):
                # The room is less because a node is gone, and with it a worker: that is no resize.
                self._group.errors.update(dead)
                cause = self._group.cause()
            if self._group.hang is not None:
                cause = self._group.hang.cause(cause)  # found while the save was waited for
            tracker.call(
                "interruption",
                kind=cause.kind,
                cause=cause.text,
                group=self._group.word,
                **cause.more,
            )
        except (RayCkptError, RayError) as error:
            # The resize happens anyway; what was not saved is done again.
            logger.warning("no save before the resize to %d workers: %s", workers, error)
        self._group.forget()

    def _save_first(self, tracker: RayTracker, workers: int) -> dict[int, Exception]:
        """Waits for a save; returns the errors of workers that died meanwhile, after which none comes."""
        # A save that is under way already is of a step before this one: it is not the one that is waited for.
        number = tracker.call("request_save", reason=f"resize to {workers} workers", hold_s=HOLD_S)
        asked = time.monotonic()
        deadline = asked + self._save_timeout_s
        pulse = Pulse(self._group.workers)
        while time.monotonic() < deadline and self._group.hang is None:
            status = tracker.call("status")
            if status["settled_request"] >= number:
                return {}
            if dead := pulse.dead():
                return dead
            if status["leaving"]:
                # They save and go by themselves, perhaps before they heard of this.
                deadline = min(deadline, asked + HOLD_S)
            time.sleep(0.05)
        logger.warning(
            "the save before the resize did not finish within %g s", self._save_timeout_s
        )
        return {}


def make_callbacks(
    run: str,
    *,
    save_timeout_s: float,
    node_loss_wait_s: float,
    run_dir: Path | None = None,
    hang_rule: HangRule | None = None,
    exclude_after: int = 0,
    spare_after_s: float = 0.0,
) -> list[Any]:
    """The callbacks of a run, for ``RunConfig(callbacks=...)``.

    Args:
        run: its name.
        save_timeout_s: longest wait for the save before a resize, seconds.
        node_loss_wait_s: longest wait for a dead node to be noticed, seconds.
        run_dir: the run's folder, for what workers do in a hang.
        hang_rule: when a hang is one; None never looks.
        exclude_after: hangs of which a node is suspected before it gets no more workers; 0 for any number.
        spare_after_s: how long a group trains before spare processes are started for the next one; 0 for none.
    """
    group = _Group(run, node_loss_wait_s)
    spares = Spares(run, spare_after_s) if spare_after_s else None
    callbacks: list[Any] = [
        GroupWatch(group, spares),
        WorkerErrors(group),
        ControllerDecisions(group, save_timeout_s),
    ]
    if hang_rule is not None and hang_rule.watches and run_dir is not None:
        callbacks.append(HangWatch(group, hang_rule, run_dir))
    if spares is not None:
        callbacks.append(spares)
    if exclude_after:
        callbacks.append(Avoidance(run, exclude_after))
    return callbacks
