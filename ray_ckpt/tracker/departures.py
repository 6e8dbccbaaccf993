"""Attempts that end because somebody takes a node or a worker away, and says so before: when, and with what saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.policy.departure import Departure, SaveTimes, decide_departure
from ray_ckpt.tracker.checkpoint_memory import DURABLE
from ray_ckpt.tracker.pace import Pace
from ray_ckpt.tracker.places import Places
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import TrackerOptions
from ray_ckpt.tracker.standing import Standing


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """A node that will be taken away.

    Attributes:
        node: its id.
        name: for people.
        deadline: when, seconds since the epoch; None when nobody said.
    """

    node: str
    name: str
    deadline: float | None


class Departures:
    """Planned ends of the attempts of one run.

    Args:
        options: how to decide.
        record: puts an event on record.
        standing: where the run stands.
        pace: of its steps, and how often it saves.
        places: where checkpoints are.
        clock: seconds since the epoch, in which deadlines are told.
    """

    def __init__(
        self,
        *,
        options: TrackerOptions,
        record: Recorder,
        standing: Standing,
        pace: Pace,
        places: Places,
        clock: Callable[[], float],
    ) -> None:
        self._options, self._record, self._memory = options, record, record.memory
        self._standing, self._pace, self._places = standing, pace, places
        self._clock = clock
        self._drains: dict[str, Drain] = {}
        self._told: set[tuple[int, str, float | None]] = set()
        self._left = 0  # newest attempt whose workers were let go
        self._terminated: set[str] = set()  # nodes with a worker of the attempt that got SIGTERM

    # ---- what is told ---------------------------------------------------------------------------

    def draining(self, drains: Sequence[Drain]) -> None:
        """All nodes of the cluster that will be taken away, as they are known now."""
        self._drains = {drain.node: drain for drain in drains}
        self.advance()

    def terminated(self, step: int, ranks: Mapping[int, str]) -> None:
        """Processes of workers got SIGTERM.

        Args:
            step: that the attempt is at.
            ranks: of them, and the node of each; empty names for none.
        """
        self._terminated |= {node for node in ranks.values() if node}
        if self._memory.leave is None:
            which = ", ".join(map(str, sorted(ranks)))
            cause = f"the process of rank {which} got SIGTERM at step {step}"
            self._order("preempted", cause, saves=True, reason=cause)

    # ---- what follows ---------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a node with workers of the present attempt will be taken away, or the attempt is to end."""
        nodes = self._memory.nodes
        return self._memory.leave is not None or any(node in self._drains for node in nodes)

    def advance(self) -> None:
        """Decides whether the workers leave now."""
        memory = self._memory
        if not memory.attempt_open:
            return
        going = [self._drains[node] for node in memory.nodes if node in self._drains]
        leave = memory.leave
        if not going or (leave is not None and not leave["saves"]):
            return
        first = min(going, key=lambda drain: drain.deadline or 0.0)
        left_s = None if first.deadline is None else first.deadline - self._clock()
        for drain in going:
            self._notice(drain)
        decision = self._decision(left_s, saving=leave is not None)
        if decision.action == "wait" or (leave is not None and decision.action == "save"):
            return
        if (
            leave is not None
            and left_s is not None
            and left_s > 0
            and not self._failed_since(leave)
        ):
            return  # the save that was begun has until the deadline
        names = " and ".join(drain.name for drain in going)
        self._order(
            "drain",
            f"node {names} will be taken away",
            saves=decision.action == "save",
            reason=decision.reason,
        )

    def obstacle(self, generation: int, step: int) -> str:
        """What is in the way of leaving at a step: empty for nothing, else in words.

        Args:
            generation: of the attempt, which is the present one.
            step: that it is at.
        """
        leave = self._memory.leave
        if leave is None or not leave["saves"]:
            return ""  # nothing is to be waited for
        going = {*self._drains, *self._terminated}
        name = checkpoint_name(step, generation)
        if name not in self._memory.committed:
            return f"step {step} is not committed"
        problem = self._places.survives(name, going)
        if not problem and self._left != generation:
            self._left = generation
            # No step is made any more: whoever asked for a save has it.
            self._record("left", step=step, request=self._memory.save_requests)
        return problem

    def begin_attempt(self) -> None:
        """Another worker group: none of its processes was told to end."""
        self._terminated.clear()

    # ---- inside ---------------------------------------------------------------------------------

    def _notice(self, drain: Drain) -> None:
        key = (self._memory.generation, drain.node, drain.deadline)
        if key in self._told:
            return
        self._told.add(key)
        left_s = None if drain.deadline is None else drain.deadline - self._clock()
        self._record("drain_notice", node=drain.node, name=drain.name, left_s=left_s)

    def _order(self, kind: str, cause: str, *, saves: bool, reason: str) -> None:
        self._record(
            "leave_requested",
            kind=kind,
            cause=cause,
            saves=saves,
            reason=reason,
            step=self._standing.step,
        )

    def _decision(self, left_s: float | None, *, saving: bool) -> Departure:
        memory, step = self._memory, self._standing.step
        held = memory.hold_s > 0 and memory.settled_request == memory.save_requests
        if held and step == memory.last_commit_step:
            # Whoever has the node saved before it is drained: nothing is to be done but to go.
            reason = f"the run stands still after step {step}, which is saved"
            return Departure(action="save", reason=reason)
        times = self._times(saving=saving)
        return decide_departure(left_s, times, self._options.drain_margin_s)

    def _failed_since(self, leave: Mapping[str, Any]) -> bool:
        memory = self._memory
        return bool(memory.failed_in_a_row) and memory.last_save_step >= leave["step"]

    def _times(self, *, saving: bool) -> SaveTimes:
        memory = self._memory
        upload_s = max(memory.uploads_s, default=None)
        due_step = memory.last_save_step + self._pace.decision.every_steps
        in_flight = not saving and self._standing.step >= due_step
        return SaveTimes(
            step_s=self._pace.longest_step_s,
            in_flight_s=(upload_s or 0.0) if in_flight else 0.0,
            stall_s=max(memory.stalls_s, default=0.0),
            upload_s=upload_s,
            copy_s=self._copy_s(),
        )

    def _copy_s(self) -> float | None:
        """From a commit until copies are where no single node's end reaches them, as measured."""
        if not self._options.stack.node_tiers:
            return 0.0
        ways = [self._memory.transfers_s.get(DURABLE, ())]
        if self._options.stack.node_tiers[0] == "memory" and self._options.stack.replicas:
            ways.append(self._memory.replicas_s)
        return min((max(way) for way in ways if way), default=None)
