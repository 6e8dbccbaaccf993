"""Nodes of one machine whose holders are processes of their own, which a tracker reaches by pipes; without Ray.

A node is a folder. Its holder is forked, and ends with the tracker that forked it, as actors do. A node is lost with
its folder; a holder that is killed leaves it.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.errors import HolderGoneError
from ray_ckpt.fault_points import arm
from ray_ckpt.tiers.durable import durable_of
from ray_ckpt.tiers.holder import Holder
from ray_ckpt.tiers.stack import Stack

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(eq=False)
class Call:
    """A call of a holder."""

    holder: Child
    number: int


class Child:
    """A holder in a process of its own."""

    def __init__(self, make: Any, faults: str) -> None:
        self.ours, theirs = Pipe()
        self._sent, self._answers, self.dead = 0, dict[int, tuple[bool, Any]](), False
        self._reading = threading.Lock()  # a commit may wait beside other calls
        self.pid = os.fork()
        if not self.pid:
            try:
                self.ours.close()
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
                os.dup2(
                    os.open(os.devnull, os.O_WRONLY), 2
                )  # what is logged of faults that are meant
                arm(faults)
                _serve(make(), theirs)
            finally:
                os._exit(0)
        theirs.close()

    def call(self, method: str, kwargs: Mapping[str, Any]) -> Call:
        self._sent += 1
        try:
            self.ours.send((self._sent, method, dict(kwargs)))
        except OSError:
            self.end()
        return Call(self, self._sent)

    def take(self, number: int, timeout_s: float) -> tuple[bool, Any]:
        deadline = time.monotonic() + timeout_s
        while number not in self._answers:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                with self._reading:
                    if number not in self._answers and self.ours.poll(min(left_s, 0.02)):
                        came, good, answer = self.ours.recv()
                        self._answers[came] = good, answer
                        continue
            except (OSError, EOFError) as error:
                self.end()
                raise HolderGoneError("a holder is gone") from error
            if not left_s and number not in self._answers:
                return False, None
        good, answer = self._answers[number]
        if not good:
            raise answer
        return True, answer

    def lives(self) -> bool:
        """Whether the process is there."""
        if not self.dead and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.dead = True
            self.ours.close()
        return not self.dead

    def end(self) -> None:
        """Kills it, if it lives."""
        if not self.dead:
            self.dead = True
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ours.close()


def _serve(holder: Holder, pipe: Connection) -> None:
    lock = threading.Lock()

    def run(number: int, method: str, kwargs: dict[str, Any]) -> None:
        try:
            answer = True, getattr(holder, method)(**kwargs)
        except Exception as error:  # noqa: BLE001 - told to whoever called
            answer = False, error
        with lock:
            pipe.send((number, *answer))

    while True:
        threading.Thread(target=run, args=pipe.recv(), daemon=True).start()


class ProcessFleet:
    """As :class:`ray_ckpt.tiers.ray_fleet.RayFleet`, with forked processes in the place of actors.

    Args:
        nodes: the machines.
        faults: node to what is put into its first holder.
    """

    def __init__(self, nodes: Nodes, faults: Mapping[str, str]) -> None:
        self._nodes, self._faults = nodes, dict(faults)
        self.children: dict[str, Child] = {}
        self.started = 0

    def gather(self, nodes: Sequence[str], also: Sequence[str] = ()) -> None:
        for node, child in list(self.children.items()):
            if not child.lives():
                del self.children[node]
        for node in dict.fromkeys((*nodes, *also)):
            if node not in self.children and self._nodes.lives(node):
                self.started += 1
                faults = self._faults.pop(node, "")
                self.children[node] = Child(lambda node=node: self._nodes.holder(node), faults)

    def mend(self, nodes: Sequence[str]) -> list[str]:
        before = set(self.children)
        self.gather(nodes)
        return [node for node in nodes if node in self.children and node not in before]

    def renew(self, node: str) -> None:
        if node in self.children:
            self.children.pop(node).end()

    def names(self) -> dict[str, str]:
        return {node: f"{node} {child.pid}" for node, child in self.children.items()}

    def domains(self, label: str) -> dict[str, str]:
        return {}

    def post(self, node: str, method: str, **kwargs: Any) -> Call:
        if node not in self.children:
            raise HolderGoneError(f"node {node} has no holder")
        return self.children[node].call(method, kwargs)

    def take(self, ticket: Call, timeout_s: float) -> tuple[bool, Any]:
        if ticket.holder.dead:
            raise HolderGoneError("a holder is gone")
        return ticket.holder.take(ticket.number, timeout_s)

    def close(self, *, drop_memory: bool, generation: int) -> None:
        for node, child in self.children.items():
            if drop_memory:
                self.take(self.post(node, "forget", tier="memory", generation=generation), 20.0)
            child.end()
        self.children = {}


class Nodes:
    """Machines below one folder, with a run that they share."""

    def __init__(self, base: Path, stack: Stack) -> None:
        self.base, self.stack = base, stack
        self.run_dir = base / "storage" / "demo"
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def boot(self, node: str) -> None:
        """A machine comes, or comes back."""
        (self.base / "nodes" / node / "memory").mkdir(parents=True, exist_ok=True)

    def lose(self, node: str) -> None:
        """A machine is gone for good."""
        shutil.rmtree(self.base / "nodes" / node)

    def reboot(self, node: str) -> None:
        """A machine has lost its memory, and not its disk."""
        shutil.rmtree(self.base / "nodes" / node / "memory")
        self.boot(node)

    def lives(self, node: str) -> bool:
        return (self.base / "nodes" / node).is_dir()

    def alive(self) -> list[str]:
        return sorted(path.name for path in (self.base / "nodes").iterdir())

    def root(self, node: str, tier: str) -> Path:
        """The run's folder in a tier of a node."""
        return self._stack_of(node).root(tier, self.run_dir)  # type: ignore[arg-type]

    def roots(self, node: str) -> list[Path]:
        return [self.root(node, tier) for tier in self.stack.node_tiers]

    def holder(self, node: str) -> Holder:
        return Holder(
            node=node,
            run_dir=self.run_dir,
            stack=self._stack_of(node),
            durable=durable_of(self.stack, self.run_dir),
            host="127.0.0.1",
            token=b"0" * 32,
        )

    def _stack_of(self, node: str) -> Stack:
        place = self.base / "nodes" / node
        local = str(place / "local") if "local" in self.stack.use else ""
        return replace(self.stack, memory_folder=str(place / "memory"), local_folder=local)

    # ---- as somebody sees it who knows nothing of trackers ----------------------------------------

    def recoverable(self) -> dict[str, int]:
        """Committed checkpoints of which a good copy of every file lives, and their steps."""
        good: dict[str, set[str]] = {}
        named: dict[str, set[str]] = {}
        steps: dict[str, int] = {}
        for root in [self.run_dir, *(root for node in self.alive() for root in self.roots(node))]:
            for entry in list_checkpoints(root):
                name = entry.folder.name
                if entry.manifest is None or entry.quarantined:
                    continue
                steps[name] = entry.step
                named[name] = {file.path for file in entry.manifest.files}
                for path in named[name]:
                    if _read(entry.folder / path) == content(entry.step, entry.generation, path):
                        good.setdefault(name, set()).add(path)
        return {name: steps[name] for name in named if named[name] <= good.get(name, set())}

    def copies(self, name: str) -> list[Path]:
        """Files of a checkpoint, wherever they are."""
        roots = [self.run_dir, *(root for node in self.alive() for root in self.roots(node))]
        return sorted(
            path
            for root in roots
            for path in (root / CHECKPOINTS_DIR / name).glob("*")
            if path.name.startswith("__") or path.name == ".metadata"
        )

    def write(self, nodes: Sequence[str], step: int, generation: int) -> dict[str, Any]:
        """What the workers of some nodes write, and rank 0 reports."""
        name = checkpoint_name(step, generation)
        files: list[dict[str, Any]] = []
        places: dict[str, list[str]] = {}
        for rank, node in enumerate(nodes):
            folder = self.root(node, self.stack.use[0]) / CHECKPOINTS_DIR / name
            folder.mkdir(parents=True, exist_ok=True)
            for path in [f"__{rank}_0.distcp", *([".metadata"] if rank == 0 else [])]:
                data = content(step, generation, path)
                (folder / path).write_bytes(data)
                checksum = xxhash.xxh3_128_hexdigest(data)
                files.append({"path": path, "bytes": len(data), "checksum": checksum})
                places.setdefault(node, []).append(path)
        return {
            "step": step,
            "samples": step,
            "tokens": step,
            "world_size": len(nodes),
            "files": files,
            "places": places,
            "stall_s": 0.1,
            "upload_s": 0.1,
            "metrics": {},
            "guard": {},
            "error": None,
            "bitwise_comparable": True,
        }


def content(step: int, generation: int, path: str) -> bytes:
    """The bytes of a file of a checkpoint."""
    chance = random.Random(f"{step} {generation} {path}")
    return chance.randbytes(chance.randint(1, 3000))


def flip(path: Path, chance: random.Random) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
