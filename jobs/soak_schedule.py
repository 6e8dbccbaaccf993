"""What happens in a soak, and when: drawn from a seed alone, so that what went wrong can be had again.

No clock decides. An event comes so many *new steps* after the one before it was survived, or, now and then, so many
seconds after it and in the middle of its recovery. Which nodes there are then follows from the events before, so each
event names its node.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ray_ckpt.errors import ConfigError

KINDS: dict[str, tuple[int, str]] = {
    "kill-worker": (3, "SIGKILL to a training worker"),
    "kill-node": (3, "all processes of a node are killed, and its files are gone"),
    "add": (6, "a lost node is back, empty"),
    "drain": (2, "a node has notice, and is killed at the deadline"),
    "freeze-worker": (2, "SIGSTOP to a training worker, and SIGCONT before it is missed"),
    "hang-worker": (
        2,
        "SIGSTOP to a training worker until it is found or long overdue, then SIGCONT",
    ),
    "freeze-node": (1, "SIGSTOP to all of a node until it counts as dead, then SIGCONT"),
    "kill-tracker": (2, "SIGKILL to the run's tracker"),
    "kill-controller": (1, "SIGKILL to Ray Train's controller"),
    "kill-driver": (1, "SIGKILL to the job's driver, and the same command again"),
    "slow-disk": (2, "every write of checkpoint and journal takes longer for a while"),
}
"""Every kind of event: how often it comes beside the others, and what it is."""

LOSES_NODE = frozenset({"kill-node", "drain", "freeze-node"})
ON_WORKER = frozenset({"kill-worker", "freeze-worker", "hang-worker"})

# After these a step of the attempt that was there is a late word of it, and no sign that the run goes on.
BREAKS = frozenset({"kill-worker", "kill-controller", "kill-driver"})

# Which ends of an attempt may follow an event. A node that comes, or is back in Ray's eyes, may do that at any time.
ENDS: dict[str, frozenset[str]] = {
    "kill-worker": frozenset({"worker_error"}),
    "kill-node": frozenset({"node_loss", "worker_error"}),
    "add": frozenset(),
    "drain": frozenset({"drain", "node_loss"}),
    "freeze-worker": frozenset({"hang"}),
    "hang-worker": frozenset({"hang", "worker_error"}),
    "freeze-node": frozenset({"node_loss", "hang", "worker_error"}),
    "kill-tracker": frozenset({"worker_error", "lost"}),
    "kill-controller": frozenset({"lost"}),
    "kill-driver": frozenset({"lost"}),
    "slow-disk": frozenset(),
}

FEWEST_NODES = 2
_AT_ONCE = 0.25  # share of events that meet the recovery from the one before
_STEPS = (2, 30)
_LASTS_S = {
    "drain": (4.0, 12.0),
    "freeze-worker": (0.5, 4.0),
    "hang-worker": (60.0, 60.0),
    "freeze-node": (20.0, 30.0),
    "slow-disk": (5.0, 20.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happens.

    Attributes:
        number: from 1.
        kind: one of :data:`KINDS`.
        node: to which, or to whose worker; empty for what is on no node of its own.
        after_steps: new steps since the event before was survived; 0 does not wait until it is.
        after_s: seconds on top.
        lasts_s: how long, for what lasts; 0 for what is over at once.
    """

    number: int
    kind: str
    node: str
    after_steps: int
    after_s: float
    lasts_s: float

    @property
    def at_once(self) -> bool:
        """Whether it may meet the recovery from the event before."""
        return self.after_steps == 0

    def words(self) -> str:
        """For people."""
        when = f"{self.after_s:.1f} s after" if self.at_once else f"{self.after_steps} steps after"
        what = " ".join(word for word in (self.kind, self.node) if word)
        return f"{when}: {what}" + (f" for {self.lasts_s:.1f} s" if self.lasts_s else "")


def draw(seed: int, nodes: int, kinds: Sequence[str] = ()) -> Iterator[Event]:
    """The events of a seed, without end.

    Args:
        seed: decides all of them.
        nodes: of the cluster at the start; ``node0`` is its head, to which nothing happens.
        kinds: only these; all of them when empty.

    Raises:
        ConfigError: an unknown kind, or too few nodes.
    """
    allowed = list(kinds) or list(KINDS)
    if unknown := [kind for kind in allowed if kind not in KINDS]:
        raise ConfigError(
            f"--kinds {unknown[0]}: there is no such event. Those that there are: {', '.join(KINDS)}."
        )
    if nodes < FEWEST_NODES:
        raise ConfigError(
            f"--nodes {nodes}: a soak needs {FEWEST_NODES} nodes, one of which is the head."
        )
    return _events(random.Random(seed), [f"node{i}" for i in range(nodes)], allowed)


def _events(chance: random.Random, names: list[str], allowed: list[str]) -> Iterator[Event]:
    alive, gone = list(names), list[str]()
    number, calm = 0, True
    while True:
        possible = [
            kind
            for kind in allowed
            if (kind != "add" or gone) and (kind not in LOSES_NODE or len(alive) > FEWEST_NODES)
        ]
        if not possible:  # of these kinds none is left: a node comes back, so that they go on
            possible = ["add"]
        kind = chance.choices(possible, [KINDS[kind][0] for kind in possible])[0]
        if kind == "add":
            node = gone.pop(0)
            alive = sorted([*alive, node])
        elif kind in LOSES_NODE:
            node = chance.choice(alive[1:])
            alive.remove(node)
            gone.append(node)
        else:
            node = chance.choice(alive) if kind in ON_WORKER else ""
        at_once = not calm and chance.random() < _AT_ONCE
        number += 1
        yield Event(
            number=number,
            kind=kind,
            node=node,
            after_steps=0 if at_once else chance.randint(*_STEPS),
            after_s=round(chance.uniform(0.0, 10.0 if at_once else 1.0), 2),
            lasts_s=round(chance.uniform(*_LASTS_S[kind]), 2) if kind in _LASTS_S else 0.0,
        )
        calm = at_once  # never two in a row, nor at the start
