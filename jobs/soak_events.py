"""Makes the events of a soak happen, to the processes and nodes of a local cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from soak_judge import Finding
from soak_schedule import Event

from cluster.local import ClusterError, LocalCluster

HEAD = "node0"
# What Ray calls the processes of actors by, before or behind their names.
WORKER, TRACKER, CONTROLLER = "RayTrainWorker", "TrackerActor", "TrainController"
HOLDER = "HolderActor"
DRIVER = "pretrain.py"
SLOW_S = 0.25  # what each write takes longer on a slow disk
# What goes to the disk of a run: a checkpoint's files, its manifest, the journal and the lines of steps.
SLOW_POINTS = ("save.file", "commit.temporary", "journal.sync", "steps.line", "durable.put")
OWN_END_S = 60.0  # within which a worker that was cut off ends by itself, once it is back
_POLL_S = 0.1


def slow_faults(switch: Path) -> str:
    """The value of ``RAY_CKPT_FAULT`` for a disk that is slow while that file says so."""
    return ",".join(f"{point}@1+=slow:{switch}" for point in SLOW_POINTS)


class Hands:
    """Does what an event says.

    Args:
        cluster: to which it happens.
        switch: file that makes the disk slow.
        say: told what was done.
    """

    def __init__(self, cluster: LocalCluster, switch: Path, say: Callable[[str], None]) -> None:
        self._cluster, self._switch, self._say = cluster, switch, say
        self.missed = False  # whether there was nobody to whom the last event could happen

    def do(self, event: Event) -> list[Finding]:
        """Makes one event happen, and comes back when it is over.

        Returns:
            What must not be and was seen meanwhile.
        """
        self.missed = False
        return _DEEDS[event.kind](self, event)

    def mend(self, alive: set[str]) -> list[str]:
        """Brings back nodes that a busy machine has lost by itself, so that the schedule is about those there are.

        Args:
            alive: names of the nodes that there should be.

        Returns:
            Names of those that were not.
        """
        lost = []
        for node in self._cluster.nodes():
            if node.name in alive and node.state not in ("alive", "draining"):
                self._say(
                    f"{node.name} is {node.state} ({node.reason or 'no reason known'}), by none of the events"
                )
                with contextlib.suppress(
                    ClusterError
                ):  # killed, where its processes are still there
                    self._cluster.kill(node.name)
                self._cluster.add(node.name)
                lost.append(node.name)
        return lost

    def find(self, node: str, word: str) -> list[int]:
        """Processes of a node that a word names."""
        return find(self._cluster, node, word)

    def _worker(self, node: str) -> int | None:
        """The training worker on a node; any other where it has none just now."""
        names = [node, *(other for other in sorted(self._alive()) if other != node)]
        return next((pid for name in names for pid in self.find(name, WORKER)), None)

    def _alive(self) -> list[str]:
        return [node.name for node in self._cluster.nodes() if node.alive]

    def _kill_worker(self, event: Event) -> list[Finding]:
        self._send(self._worker(event.node), signal.SIGKILL)
        return []

    def _freeze_worker(self, event: Event) -> list[Finding]:
        pid = self._worker(event.node)
        if self._send(pid, signal.SIGSTOP):
            _until(lambda: not _exists(pid), event.lasts_s)
            self._send(pid, signal.SIGCONT)
        return []

    def _kill_node(self, event: Event) -> list[Finding]:
        self._cluster.kill(event.node)
        return []

    def _add(self, event: Event) -> list[Finding]:
        self._cluster.add(event.node)
        return []

    def _drain(self, event: Event) -> list[Finding]:
        try:
            self._cluster.drain(event.node, deadline_s=event.lasts_s, kill_at_deadline=True)
        except ClusterError as error:
            self._say(f"no notice was taken: {error}")
            self._cluster.kill(event.node)
        return []

    def _freeze_node(self, event: Event) -> list[Finding]:
        """The machine hangs for so long that the cluster goes on without it, and comes back."""
        workers = self.find(event.node, WORKER)
        self._cluster.signal(event.node, signal.SIGSTOP)
        time.sleep(event.lasts_s)
        self._cluster.signal(event.node, signal.SIGCONT)
        found = []
        if not _until(lambda: not any(map(_exists, workers)), OWN_END_S):
            text = f"a worker on {event.node}, frozen for {event.lasts_s} s, lives {OWN_END_S:g} s after it came back"
            found.append(Finding(rule="what was cut off ends by itself", text=text))
        self._cluster.kill(event.node)
        return found

    def _kill_one(self, word: str) -> list[Finding]:
        found = self.find(HEAD, word)
        self._send(found[0] if found else None, signal.SIGKILL)
        return []

    def _slow_disk(self, event: Event) -> list[Finding]:
        self._switch.write_text(str(SLOW_S))
        time.sleep(event.lasts_s)
        self._switch.unlink()
        return []

    def _send(self, pid: int | None, number: signal.Signals) -> bool:
        if pid is None:
            self._say("there is nobody just now to whom it could happen")
            self.missed = True
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True


_DEEDS: dict[str, Callable[[Hands, Event], list[Finding]]] = {
    "kill-worker": Hands._kill_worker,
    "kill-node": Hands._kill_node,
    "add": Hands._add,
    "drain": Hands._drain,
    "freeze-worker": Hands._freeze_worker,
    "hang-worker": Hands._freeze_worker,
    "freeze-node": Hands._freeze_node,
    "kill-tracker": lambda hands, event: hands._kill_one(TRACKER),
    "kill-controller": lambda hands, event: hands._kill_one(CONTROLLER),
    "kill-driver": lambda hands, event: hands._kill_one(DRIVER),
    "slow-disk": Hands._slow_disk,
}


def find(cluster: LocalCluster, node: str, word: str) -> list[int]:
    """Process ids on a node of the kind that a word names: one of the words above."""
    return [pid for pid in cluster.processes(node) if _is(command_line(pid), word)]


def _is(line: str, word: str) -> bool:
    if word == DRIVER:  # the shell that started it has its words, too
        return word in line and not line.startswith(("/bin/sh ", "sh "))
    return line.startswith("ray::") and word in line


def command_line(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _exists(pid: int | None) -> bool:
    return pid is not None and bool(command_line(pid))  # that of a zombie is empty


def _until(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
