"""What is remembered about a cluster between two commands: one JSON file in its folder.

    /tmp/rcl-<uid>/<name>/cluster.json      this record
                          lock              held by the command that changes the cluster
                          auth_token        only with token authentication
                          start-<node>.log  what `ray start` said
                          <node>/           all files of that node: Ray's sessions, `tmp` (its TMPDIR), and
                            `data` for users
    /dev/shm/rcl-<uid>/<name>/<node>/       that node's object store, and `data` for users

Paths are short because Ray puts Unix sockets below them, whose paths may have 107 bytes at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cluster._processes import Identity, Process, is_alive

SCHEMA = 1
HEAD = "node0"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_SOCKET_PATH_LIMIT = 107
# What Ray appends to a node's temp folder for its longest socket.
_SOCKET_SUFFIX = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1"


class ClusterError(RuntimeError):
    """A cluster could not do what was asked; the message says what to do next."""


class UsageError(ClusterError):
    """The request itself is wrong: an unknown node, a bad name, a refused combination."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthCheck:
    """How soon the head believes that a node is dead.

    The first failed check comes at most `period_s` after the kill. A check against a port that nobody
    listens on fails at once, one against a silent machine after `timeout_s`.

    Attributes:
        period_s: Seconds between two checks of a node.
        timeout_s: Seconds to wait for an answer.
        failures: Failed checks in a row that make a node dead.
    """

    period_s: float = 0.5
    timeout_s: float = 2.5
    failures: int = 3

    def __post_init__(self) -> None:
        if self.period_s <= 0 or self.timeout_s <= 0 or self.failures < 1:
            raise UsageError(f"health check needs positive numbers, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """One node: where it lives and what it is recognised by. `killed` nodes keep their record."""

    name: str
    ip: str
    cpus: int
    tag: str
    session: int = 0
    raylet: Process | None = None
    node_id: str = ""
    killed: bool = False

    @property
    def is_running(self) -> bool:
        return is_alive(self.raylet)

    @property
    def identity(self) -> Identity:
        return Identity(self.tag, self.session, self.raylet)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRecord:
    """Everything that a later command needs to know about a cluster.

    Attributes:
        owner: Process whose end ends the cluster; None when it lives until `down`.
        settings: How nodes are started, for those that are added later.
    """

    name: str
    subnet: str
    address: str = ""
    dashboard_port: int = 0
    owner: Process | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    nodes: tuple[NodeRecord, ...] = ()

    def node(self, name: str) -> NodeRecord:
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise UsageError(f"no node {name!r} in cluster {self.name!r}: its nodes are {known}")

    def with_node(self, node: NodeRecord) -> ClusterRecord:
        """This record with that node added, or put in the place of the one with its name."""
        others = [other for other in self.nodes if other.name != node.name]
        nodes = sorted([*others, node], key=lambda n: int(n.name.removeprefix("node")))
        return dataclasses.replace(self, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the files of one cluster are."""

    name: str

    @property
    def home(self) -> Path:
        return root() / self.name

    @property
    def shared_memory(self) -> Path:
        return Path("/dev/shm") / f"rcl-{os.getuid()}" / self.name

    @property
    def state(self) -> Path:
        return self.home / "cluster.json"

    @property
    def auth_token(self) -> Path:
        return self.home / "auth_token"

    def node(self, node: str) -> Path:
        return self.home / node

    def node_data(self, node: str) -> Path:
        return self.home / node / "data"

    def node_temp(self, node: str) -> Path:
        return self.home / node / "tmp"

    def node_shared_memory(self, node: str) -> Path:
        return self.shared_memory / node

    def start_log(self, node: str) -> Path:
        return self.home / f"start-{node}.log"

    def create(self) -> None:
        """Makes the cluster's folders, readable by their owner only.

        Raises:
            ClusterError: The folder in /tmp belongs to somebody else.
        """
        for base in (root(), self.shared_memory.parent):
            base.mkdir(mode=0o700, exist_ok=True)
            if base.is_symlink() or base.stat().st_uid != os.getuid():
                raise ClusterError(f"{base} belongs to another user: remove it or ask them to")
        self.home.mkdir(exist_ok=True)
        self.shared_memory.mkdir(exist_ok=True)

    def remove_node(self, node: str) -> None:
        remove(self.node(node))
        remove(self.node_shared_memory(node))

    def remove(self) -> None:
        """Deletes everything of this cluster, and the common folders when they are empty."""
        remove(self.shared_memory)
        remove(self.home)
        for base in (root(), self.shared_memory.parent):
            with contextlib.suppress(OSError):
                base.rmdir()

    def load(self) -> ClusterRecord | None:
        """Reads the record; None when there is no such cluster.

        Raises:
            ClusterError: The file cannot be understood.
        """
        try:
            text = self.state.read_text()
        except FileNotFoundError:
            return None
        try:
            return _decode(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"{self.state} cannot be read ({error}): end the cluster's processes by hand, "
                f"then delete {self.home}"
            ) from error

    def save(self, record: ClusterRecord) -> None:
        """Replaces the record in one step."""
        new = self.state.with_suffix(".new")
        new.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1))
        new.replace(self.state)

    def empty(self) -> None:
        """Deletes everything of this cluster but its folders and their lock."""
        remove(self.shared_memory)
        for path in self.home.iterdir():
            if path.is_dir():
                remove(path)
            elif path.name != "lock":
                path.unlink()
        self.create()

    @contextlib.contextmanager
    def lock(self, timeout_s: float = 120.0, *, create: bool = False) -> Iterator[None]:
        """Keeps other commands from changing this cluster meanwhile.

        Raises:
            ClusterError: Another command holds it for too long.
            UsageError: There is no such cluster, and none is to be created.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(self._open_lock(create))
                if _try_lock(file) and self._is_current(file):
                    yield
                    return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"another command has been changing cluster {self.name!r} for {timeout_s:g} s: "
                    "wait for it or end it"
                )
            time.sleep(0.1)

    def _open_lock(self, create: bool) -> IO[str]:
        for attempt in range(10):
            try:
                if create:
                    self.create()
                return (self.home / "lock").open("w")
            except FileNotFoundError as error:  # the end of another cluster removes common folders
                if not create:
                    raise UsageError(
                        f"no cluster {self.name!r}: it was ended meanwhile; start it with "
                        f"`up --name {self.name}`"
                    ) from error
                if attempt == 9:
                    raise
        raise AssertionError

    def _is_current(self, file: IO[str]) -> bool:
        """False when the lock that was waited for has been deleted with its cluster."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), (self.home / "lock").stat())
        return False


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def root() -> Path:
    """Folder of all clusters of this user."""
    return Path("/tmp") / f"rcl-{os.getuid()}"


def all_names() -> list[str]:
    """Names of the clusters that have left a record, running or not."""
    return sorted(path.parent.name for path in root().glob("*/cluster.json"))


def check_name(name: str) -> None:
    """Refuses a cluster name that is no folder name or makes socket paths too long."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name {name!r}: use lower-case letters, digits and dashes only")
    room = _SOCKET_PATH_LIMIT - len(f"{root()}//node99{_SOCKET_SUFFIX}")
    if len(name) > room:
        raise UsageError(
            f"--name {name!r} has {len(name)} characters, at most {room} are possible, because "
            f"the paths of Ray's sockets may have {_SOCKET_PATH_LIMIT} bytes: use a shorter one"
        )


def remove(folder: Path, timeout_s: float = 5.0) -> None:
    """Deletes a folder; tries again while a dying process still writes into it."""
    deadline = time.monotonic() + timeout_s
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=time.monotonic() < deadline)


def _decode(data: dict[str, Any]) -> ClusterRecord:
    if data.pop("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    nodes = tuple(NodeRecord(**{**n, "raylet": _process(n["raylet"])}) for n in data.pop("nodes"))
    return ClusterRecord(**{**data, "owner": _process(data["owner"])}, nodes=nodes)


def _process(data: dict[str, int] | None) -> Process | None:
    return None if data is None else Process(**data)
