"""Starts one node: a real `ray start`, with everything it owns in folders of its own.

What Ray 2.60 does, found by trying, and what follows from it:

- `--temp-dir` may differ from node to node, and so may `--plasma-directory`: a node's logs, sockets,
  spilled objects, runtime environments and object store can be deleted alone. (The files of the object
  store have no name: Ray unlinks them at once, and the memory goes with the raylet.) A cluster with its own
  temp folder is also not found by a bare `ray.init()`, which looks into `/tmp/ray`.
- `ray start` and `ray.init()` replace 127.0.0.1 by the machine's network address, on the client's side too,
  so a cluster cannot be pinned to it. Other addresses of 127.0.0.0/8 stay as they are. Each node gets one:
  nodes look like machines of their own, and what is one per host (`node:<ip>`) is one per node.
  Ray binds its ports on all addresses nevertheless: only the dashboard is limited to this machine.
- Two Rays on one host clash over worker ports 10002 to 19999 and the client server's 10001 unless told
  otherwise. Port 0 means "any" everywhere but for the dashboard and the client server.
- With `RAY_AUTH_MODE` unset, `ray start --head` turns token authentication on when `~/.ray/auth_token`
  happens to exist, and any local `ray.init()` creates that file. So the mode is always set here.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import _processes
from cluster._state import ClusterError, ClusterRecord, Folders, HealthCheck, NodeRecord, UsageError

NODE_LABEL = "ray_ckpt.io/node"
NODE_DIR_VARIABLE = "RAY_CKPT_NODE_DIR"
NODE_SHM_DIR_VARIABLE = "RAY_CKPT_NODE_SHM_DIR"
LOOPBACK = "127.0.0.1"
_MIN_OBJECT_STORE_BYTES = 80 * 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How the nodes of one cluster are started; kept in its record for nodes added later.

    Attributes:
        auth: "disabled" or "token".
        object_store_bytes: Size of each node's object store.
        start_timeout_s: Seconds that one `ray start` may take.
        health: When a silent node is believed dead.
        extra_env: More environment variables for all processes of all nodes.
        page: Whether to put the page of checkpoints into this Python's Ray, if it can be written.
        subnet: First three numbers of the nodes' addresses, for nodes that have networks of their own; empty takes
            some of 127.0.0.0/8.
        in_front: Words before each node's `ray start`, such as a program that enters a network; `{node}` is its name.
    """

    auth: str = "disabled"
    object_store_bytes: int = 256 * 1024**2
    start_timeout_s: float = 90.0
    health: HealthCheck = field(default_factory=HealthCheck)
    extra_env: Mapping[str, str] = field(default_factory=dict)
    page: bool = True
    subnet: str = ""
    in_front: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_front", tuple(self.in_front))  # a list where it was read back
        if self.auth not in ("disabled", "token"):
            raise UsageError(f"--auth {self.auth!r}: choose disabled or token")
        if self.object_store_bytes < _MIN_OBJECT_STORE_BYTES:
            raise UsageError(
                f"object store of {self.object_store_bytes} bytes per node: Ray needs at least "
                f"{_MIN_OBJECT_STORE_BYTES}"
            )

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Settings:
        """Reads back what `dataclasses.asdict` wrote into a cluster's record."""
        return cls(**{**data, "health": HealthCheck(**data["health"])})


def new_node(record: ClusterRecord, name: str, cpus: int) -> NodeRecord:
    """A record for a node that is about to start, with an address and a tag of its own."""
    number = int(name.removeprefix("node"))
    return NodeRecord(
        name=name,
        ip=f"{record.subnet}.{number + 1}",
        cpus=cpus,
        tag=f"{record.name}/{name}/{secrets.token_hex(8)}",
    )


def is_free(port: int) -> bool:
    """True when nobody listens on this TCP port at this moment."""
    with socket.socket() as probe:
        # As servers do; without it a port counts as used for a minute after its server has ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def free_port(wish: int = 0) -> int:
    """A free TCP port: the wished one if possible."""
    if wish and is_free(wish):
        return wish
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def client_environment(record: ClusterRecord) -> dict[str, str]:
    """Variables with which a program becomes a client of this cluster."""
    variables = {
        "RAY_ADDRESS": record.address,
        "RAY_API_SERVER_ADDRESS": f"http://{LOOPBACK}:{record.dashboard_port}",
        "RAY_AUTH_MODE": record.settings["auth"],
    }
    if record.settings["auth"] == "token":
        variables["RAY_AUTH_TOKEN_PATH"] = str(Folders(record.name).auth_token)
    return variables


def without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """That environment without the settings of any Ray, so that none of them leaks into another."""
    return {key: value for key, value in environment.items() if not key.startswith("RAY_")}


def token(record: ClusterRecord) -> str:
    """Authentication token of this cluster; empty when it asks for none."""
    if record.settings["auth"] != "token":
        return ""
    return Folders(record.name).auth_token.read_text()


def wait_for_dashboard(record: ClusterRecord, timeout_s: float = 60.0) -> None:
    """Waits until the dashboard takes jobs, a few seconds after `ray start` has returned.

    Raises:
        ClusterError: It does not answer, or something else answers on its port.
    """
    url = f"http://{LOOPBACK}:{record.dashboard_port}/api/jobs/"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token(record)}"})
    # A proxy from the environment has no business on the way to this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with opener.open(request, timeout=5.0):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{url} does not answer after {timeout_s:g} s: {error}; is another "
                    "program on that port?"
                ) from error
            time.sleep(0.2)


class LateNodeError(ClusterError):
    """Ray gave up on a node that has not registered within half a minute, a constant (Ray 2.60, `node.py`)."""


_GAVE_UP = "The current node timed out during startup"


class Start:
    """One `ray start` under way: several may run at once, then each is waited for."""

    def __init__(self, record: ClusterRecord, node: NodeRecord, settings: Settings) -> None:
        self._folders = Folders(record.name)
        self._node = node
        self._settings = settings
        self._folders.remove_node(node.name)
        self._folders.node_data(node.name).mkdir(parents=True)
        self._folders.node_temp(node.name).mkdir()
        (self._folders.node_shared_memory(node.name) / "data").mkdir(parents=True)
        self._log = self._folders.start_log(node.name)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                _command(record, node, settings, self._folders),
                env=_environment(record, node, settings, self._folders),
                cwd=self._folders.node_data(node.name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def node(self) -> NodeRecord:
        """The record, with the session by which this life of the node is found again."""
        return dataclasses.replace(self._node, session=self._process.pid)

    def wait(self) -> NodeRecord:
        """Returns the record of the running node.

        Raises:
            LateNodeError: The machine was too busy for it: it may be started again.
            ClusterError: It did not start; the message holds the end of what Ray said.
        """
        try:
            code = self._process.wait(self._settings.start_timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failure(f"took over {self._settings.start_timeout_s:g} s") from None
        if code != 0:
            raise self._failure(f"ended with exit code {code}")
        for process in _processes.members([self.node.identity]):
            command = _processes.arguments(process.pid)
            if Path(command[0]).name == "raylet":
                node_id = next(a for a in command if a.startswith("--node_id=")).partition("=")[2]
                return dataclasses.replace(self.node, raylet=process, node_id=node_id)
        raise self._failure("left no raylet running")

    def address(self) -> str:
        """Address of the head that has just started."""
        return (self._folders.node(self._node.name) / "ray_current_cluster").read_text().strip()

    def _failure(self, what: str) -> ClusterError:
        said = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        kind = LateNodeError if _GAVE_UP in said else ClusterError
        return kind(f"`ray start` of {self._node.name} {what}; it said:\n{said}")


def _command(
    record: ClusterRecord, node: NodeRecord, settings: Settings, folders: Folders
) -> list[str]:
    store = folders.node_shared_memory(node.name)
    if shutil.disk_usage(store).free < settings.object_store_bytes:
        store = folders.node(node.name)  # containers often have a /dev/shm of 64 MB
    command = [word.replace("{node}", node.name) for word in settings.in_front]
    command += [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
    if record.address:
        command += ["--address", record.address]
    else:
        command += ["--head", "--port=0", "--dashboard-host", LOOPBACK]
        command += ["--dashboard-port", str(record.dashboard_port)]
        command += ["--ray-client-server-port", str(free_port())]
    ports = (
        "object-manager-port node-manager-port min-worker-port max-worker-port metrics-export-port "
        "dashboard-agent-listen-port dashboard-agent-grpc-port runtime-env-agent-port"
    )
    command += [f"--{port}=0" for port in ports.split()]
    command += ["--node-ip-address", node.ip, "--node-name", node.name]
    command += ["--labels", f"{NODE_LABEL}={node.name}", "--num-cpus", str(node.cpus)]
    command += ["--temp-dir", str(folders.node(node.name)), "--plasma-directory", str(store)]
    command += ["--object-store-memory", str(settings.object_store_bytes)]
    return [*command, "--disable-usage-stats", "--log-color", "false"]


def _environment(
    record: ClusterRecord, node: NodeRecord, settings: Settings, folders: Folders
) -> dict[str, str]:
    environment = without_ray(os.environ)
    # `python` in a job's entrypoint is the Python that started the cluster, activated or not.
    binaries = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([binaries, environment.get("PATH", os.defpath)])
    environment |= {
        key: value
        for key, value in client_environment(record).items()
        if key.startswith("RAY_AUTH")
    }
    health = settings.health
    environment |= {
        "RAY_health_check_initial_delay_ms": str(round(1000 * health.period_s)),
        "RAY_health_check_period_ms": str(round(1000 * health.period_s)),
        "RAY_health_check_timeout_ms": str(round(1000 * health.timeout_s)),
        "RAY_health_check_failure_threshold": str(health.failures),
        # Ray starts workers at nice 15: beside anything else on this machine they all but stand still. The raylets, by
        # whose answers a node lives, still come first.
        "RAY_worker_niceness": "5",
        # Idle processes that are kept, as on a node with some more processors: else tasks that come now and then, such
        # as those that read ahead, get a new process each, which takes two seconds of a processor.
        "RAY_num_workers_soft_limit": "4",
        "TMPDIR": str(folders.node_temp(node.name)),
        NODE_DIR_VARIABLE: str(folders.node_data(node.name)),
        NODE_SHM_DIR_VARIABLE: str(folders.node_shared_memory(node.name) / "data"),
        _processes.TAG_VARIABLE: node.tag,
    }
    return environment | dict(settings.extra_env)
