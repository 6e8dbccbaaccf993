"""The tracker as a named Ray actor: the core, and the places where people look.

It lives on the driver's node (a worker node may be the next to die) and dies with the job. Its log tells
the run's story, one line an event; the same lines go to a table file in the Logs tab of the dashboard.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.checkpoint.signature import Keys, active, install
from ray_ckpt.errors import ConfigError
from ray_ckpt.ray_private import session_logs_dir
from ray_ckpt.tracker.aside import Thread
from ray_ckpt.tracker.client import NAMESPACE, actor_name
from ray_ckpt.tracker.core import Directive, RunFacts, TrackerCore, TrackerOptions
from ray_ckpt.tracker.lock import RunLock
from ray_ckpt.view.commits import read_elsewhere, second_look
from ray_ckpt.view.logtable import LogTable
from ray_ckpt.view.metrics import Metrics
from ray_ckpt.view.story import tell

TICK_S = 5.0  # a gauge of Ray that is set once is gone after about 20 s (ray#56405)


class TrackerActor(TrackerCore):
    """Serves the calls of rank 0, the controller's callbacks and the driver, one at a time."""

    def __init__(self, facts: RunFacts, options: TrackerOptions, keys: Keys | None = None) -> None:
        install(keys)  # the driver's, whatever this node's environment says
        self._looks: dict[Any, str] = {}
        self._lock = RunLock(Path(facts.run_dir))
        self._table = LogTable(session_logs_dir(), facts.run)
        self._metrics = Metrics(facts.run)
        super().__init__(
            facts,
            options,
            on_event=self._show,
            aside=Thread("housekeeping"),
            read=read_elsewhere,
        )
        self.announce()
        threading.Thread(target=self._tick, name="metrics", daemon=True).start()

    def steps(self, generation: int, records: list[dict[str, Any]]) -> Directive:
        answer = super().steps(generation, records)
        self._collect_looks()
        return answer

    def commit(self, generation: int, save: dict[str, Any]) -> bool:
        committed = super().commit(generation, save)
        if committed:
            name = checkpoint_name(int(save["step"]), generation)
            self._looks[second_look(self._dir, name, int(save["step"]))] = name
        return committed

    def __repr__(self) -> str:
        return f"tracker:{self._facts.run}"  # what Ray puts before the lines of this actor's log

    def alive(self) -> bool:
        """Answers when the actor is ready."""
        return True

    def _show(self, event: dict[str, Any]) -> None:
        line = tell(event)
        if line is not None:
            print(line, flush=True)  # the actor's log, which Ray also shows to the driver
            self._table.write(event, line)
        self._metrics.count(event)

    def _tick(self) -> None:
        stop = threading.Event()
        while not stop.wait(TICK_S):
            self._metrics.set(self.status())

    def _collect_looks(self) -> None:
        if not self._looks:
            return
        done, _ = ray.wait(list(self._looks), num_returns=len(self._looks), timeout=0)
        for ref in done:
            name = self._looks.pop(ref)
            try:
                problem = ray.get(ref)
            except ray.exceptions.RayError as error:
                problem = f"the second look did not finish ({type(error).__name__})"
            if problem:
                self._record("alert", name=name, problem=problem)


def start_tracker(facts: RunFacts, options: TrackerOptions) -> Any:
    """Starts the run's tracker on this node.

    Raises:
        ConfigError: the run already has one: another job of this cluster drives it.
    """
    node = ray.get_runtime_context().get_node_id()
    try:
        return (
            ray.remote(TrackerActor)
            .options(
                name=actor_name(facts.run),
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            # Not by runtime_env: the dashboard shows that to everybody, and no arguments.
            .remote(facts, options, active())
        )
    except ValueError as error:
        raise ConfigError(
            f"run {facts.run!r} is being driven by another job of this cluster: a run has one driver. Wait for "
            "that job, stop it, or choose another --run name."
        ) from error
