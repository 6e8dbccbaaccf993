"""Holders of several nodes in one process, whose nodes can die, hang and lie: for tests of what is around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_ckpt.errors import HolderGoneError
from ray_ckpt.tiers.durable import Durable, durable_of
from ray_ckpt.tiers.holder import Holder
from ray_ckpt.tiers.stack import Stack


@dataclass
class Ticket:
    """A call; run when it is asked for, so that a test decides what happens before."""

    node: str
    method: str
    kwargs: dict[str, Any]
    holder: Holder
    answer: Any = None
    error: Exception | None = None
    ran: bool = False


class LocalFleet:
    """As :class:`ray_ckpt.tiers.fleet.RayFleet`, without Ray.

    Attributes:
        dead: nodes that answer nothing any more, and whose memory is gone.
        stuck: ``(node, method)`` of calls that do not end.
        calls: ``(node, method)`` of all calls that ran.
    """

    def __init__(self, base: Path, stack: Stack, run_dir: Path, durable: Durable | None = None):
        self._base, self._stack, self._run_dir = base, stack, run_dir
        self._durable = durable or durable_of(stack, run_dir)
        self.holders: dict[str, Holder] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.dead: set[str] = set()
        self.stuck: set[tuple[str, str]] = set()
        self.calls: list[tuple[str, str]] = []

    def stack_of(self, node: str) -> Stack:
        """The tiers with the folders of one node."""
        place = self._base / node
        local = str(place / "local") if "local" in self._stack.use else ""
        return replace(self._stack, memory_folder=str(place / "memory"), local_folder=local)

    def root(self, node: str, tier: str = "memory") -> Path:
        """The run's folder in a tier of a node."""
        return self.stack_of(node).root(tier, self._run_dir)  # type: ignore[arg-type]

    def kill(self, node: str) -> None:
        """A node is lost, with all that it had."""
        self.dead.add(node)
        holder = self.holders.pop(node, None)
        if holder is not None:
            holder.close()

    def gather(self, nodes: Sequence[str], also: Sequence[str] = ()) -> None:
        for node in (*nodes, *also):
            if node not in self.holders and node not in self.dead:
                self.holders[node] = Holder(
                    node=node,
                    run_dir=self._run_dir,
                    stack=self.stack_of(node),
                    durable=self._durable,
                    host="127.0.0.1",
                    token=b"0" * 32,
                )

    def mend(self, nodes: Sequence[str]) -> list[str]:
        lack = [node for node in nodes if node not in self.holders and node not in self.dead]
        self.gather(lack)
        return lack

    def renew(self, node: str) -> None:
        holder = self.holders.pop(node, None)
        if holder is not None:
            holder.close()

    def names(self) -> dict[str, str]:
        return {node: f"{node} {id(holder)}" for node, holder in self.holders.items()}

    def domains(self, label: str) -> dict[str, str]:
        return {node: found[label] for node, found in self.labels.items() if label in found}

    def post(self, node: str, method: str, **kwargs: Any) -> Ticket:
        if node not in self.holders:
            raise HolderGoneError(f"node {node} is gone")
        ticket = Ticket(node, method, kwargs, self.holders[node])
        if method in ("drop", "sweep", "has"):
            self._run(ticket)  # nobody waits for these
        return ticket

    def take(self, ticket: Ticket, timeout_s: float) -> tuple[bool, Any]:
        if ticket.node in self.dead:
            raise HolderGoneError("a holder is gone: its node died")
        if ticket.holder is not self.holders.get(ticket.node):
            raise HolderGoneError("a holder is gone: another one took its place")
        if (ticket.node, ticket.method) in self.stuck:
            return False, None
        self._run(ticket)
        if ticket.error is not None:
            raise ticket.error
        return True, ticket.answer

    def close(self, *, drop_memory: bool, generation: int) -> None:
        for holder in self.holders.values():
            if drop_memory:
                holder.forget("memory", generation)
            holder.close()
        self.holders = {}

    def _run(self, ticket: Ticket) -> None:
        if ticket.ran or (ticket.node, ticket.method) in self.stuck:
            return
        ticket.ran = True
        self.calls.append((ticket.node, ticket.method))
        try:
            ticket.answer = getattr(ticket.holder, ticket.method)(**ticket.kwargs)
        except Exception as error:  # noqa: BLE001 - told to whoever takes the answer
            ticket.error = error
