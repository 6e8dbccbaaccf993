"""The tracker as a named Ray actor: the core, and the places where people look.

It lives on the driver's node (a worker node may be the next to die) and dies with the job. Its log tells
the run's story, one line an event; the same lines go to a table file in the Logs tab of the dashboard.

Calls are served one at a time, in the order in which they came, but for commits: these have a thread of their own,
which waits for holders on the nodes while the others have their turn. So a holder that hangs keeps no step line, no
decision, no copy to another tier and no metric waiting.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.checkpoint.names import checkpoint_name, parse_checkpoint_name
from ray_ckpt.checkpoint.signature import Keys, active, install
from ray_ckpt.clocks import Instant
from ray_ckpt.elastic.causes import node_names
from ray_ckpt.elastic.drains import DrainWatch
from ray_ckpt.errors import ConfigError
from ray_ckpt.ray_dashboard import register_run
from ray_ckpt.ray_private import draining_nodes, session_logs_dir
from ray_ckpt.tiers.address import without_keys
from ray_ckpt.tiers.ray_fleet import RayFleet
from ray_ckpt.tracker.aside import Thread
from ray_ckpt.tracker.client import NAMESPACE, actor_name
from ray_ckpt.tracker.core import RunFacts, TrackerCore, TrackerOptions
from ray_ckpt.tracker.lock import RunLock
from ray_ckpt.tracker.turn import Turn
from ray_ckpt.view.commits import SecondLook
from ray_ckpt.view.logtable import LogTable
from ray_ckpt.view.metrics import Metrics
from ray_ckpt.view.story import tell

ADVANCE_S = 0.25
LOOK_TICKS = 4  # between two looks of the metrics
COMMITS = "commits"  # the calls that may wait for nodes, as Ray is told of them
_LINES_S = 5.0  # longest wait of a commit for the line of its step

_C = TypeVar("_C", bound=Callable[..., Any])


def _in_turn(method: _C) -> _C:
    """One call at a time: the actor's own thread calls too."""

    @functools.wraps(method)
    def called(self: TrackerActor, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast("_C", called)


def _fleet(facts: RunFacts, options: TrackerOptions, keys: Keys | None) -> RayFleet | None:
    if not options.stack.node_tiers:
        return None
    run_dir = Path(facts.run_dir)
    return RayFleet(run=facts.run, run_dir=run_dir, stack=options.stack, keys=keys)


class TrackerActor(TrackerCore):
    """Serves the calls of rank 0, the controller's callbacks and the driver, one at a time."""

    def __init__(
        self,
        facts: RunFacts,
        options: TrackerOptions,
        keys: Keys | None = None,
        submitted: Instant | None = None,
    ) -> None:
        self._turn = Turn()
        install(keys)  # the driver's, whatever this node's environment says
        self._second = SecondLook(Path(facts.run_dir))
        self._looks: dict[Any, str] = {}
        self._lock = RunLock(Path(facts.run_dir))
        self._table = LogTable(session_logs_dir(), facts.run)
        self._metrics = Metrics(facts, options)
        super().__init__(
            facts,
            options,
            on_event=self._show,
            aside=Thread("housekeeping"),
            read=self._second.read_back,
            fleet=_fleet(facts, options, keys),
            waiting=self._turn.given_up,
        )
        self.announce(submitted)
        remote = without_keys(options.stack.remote) if options.stack.remote else ""
        register_run(
            {
                "run": facts.run,
                "run_dir": facts.run_dir,
                "remote": remote,
                "actor": actor_name(facts.run),
                "registered_at": time.time(),
            }
        )
        self._metrics.look(self.status(), self.memory)
        self._metrics.start()
        threading.Thread(target=self._tick, name="tick", daemon=True).start()
        DrainWatch(self.draining, look=draining_nodes, names=node_names).start()

    def advance(self) -> None:
        super().advance()
        if not self._fence.replaced:
            self._collect_looks()

    @ray.method(concurrency_group=COMMITS)
    def commit(self, generation: int, save: dict[str, Any]) -> bool:
        self._fence.check(generation)
        self._await_lines(int(save["step"]))
        committed = super().commit(generation, save)
        if committed and not self._options.stack.node_tiers:
            self._look_at(checkpoint_name(int(save["step"]), generation))
        return committed

    def _await_lines(self, step: int) -> None:
        """Lines of steps were sent before the commit, and it may have overtaken them.

        Once a step is committed nobody makes it again: a tracker that died now would have no line of it.
        """
        deadline = time.monotonic() + _LINES_S
        with self._turn.given_up():
            while self._standing.step < step and time.monotonic() < deadline:
                time.sleep(0.01)

    def _on_durable(self, name: str) -> None:
        super()._on_durable(name)
        if not self._options.stack.remote:
            self._look_at(name)

    def _look_at(self, name: str) -> None:
        key = parse_checkpoint_name(name)
        assert key is not None, name
        self._looks[self._second.at(name, key[0])] = name

    def __repr__(self) -> str:
        return f"tracker:{self._facts.run}"  # what Ray puts before the lines of this actor's log

    def alive(self) -> bool:
        """Answers when the actor is ready."""
        return True

    def ended(self, how: str) -> None:
        """The driver is about to end this actor, and says how the job ends."""
        self._metrics.ended(how)

    def _show(self, event: dict[str, Any]) -> None:
        line = tell(event)
        if line is not None:
            print(line, flush=True)  # the actor's log, which Ray also shows to the driver
            self._table.write(event, line)
        self._metrics.count(event)

    def _tick(self) -> None:
        """Copies to slower tiers go on, also while no worker calls, and metrics learn where the run stands."""
        stop = threading.Event()
        for tick in itertools.count():
            stop.wait(ADVANCE_S)
            with self._turn:
                self.advance()
                if self._fence.replaced:
                    self._metrics.fall_silent()
                elif tick % LOOK_TICKS == 0:
                    self._metrics.look(self.status(), self.memory)

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


for _name, _method in vars(TrackerCore).items():
    if callable(_method) and not _name.startswith("_"):
        setattr(TrackerActor, _name, _in_turn(getattr(TrackerActor, _name)))


def start_tracker(
    facts: RunFacts, options: TrackerOptions, submitted: Instant | None = None
) -> Any:
    """Starts the run's tracker on this node.

    Args:
        facts: of the run.
        options: how it decides.
        submitted: when the job began; None for now.

    Raises:
        ConfigError: the run already has one: another job of this cluster drives it.
    """
    node = ray.get_runtime_context().get_node_id()
    try:
        return (
            ray.remote(concurrency_groups={COMMITS: 1})(TrackerActor)
            .options(
                name=actor_name(facts.run),
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            # Not by runtime_env: the dashboard shows that to everybody, and no arguments.
            .remote(facts, options, active(), submitted)
        )
    except ValueError as error:
        raise ConfigError(
            f"run {facts.run!r} is being driven by another job of this cluster: a run has one driver. Wait for "
            "that job, stop it, or choose another --run name."
        ) from error
