"""A many-node Ray cluster as an object: the library behind `cluster/local.py`."""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cluster import _launch, _processes
from cluster._end import destroy, end_nodes, sweep
from cluster._head import NodeStatus, ask, node_statuses, require_head
from cluster._jobs import Jobs
from cluster._launch import Settings
from cluster._state import (
    HEAD,
    ClusterError,
    ClusterRecord,
    Folders,
    NodeRecord,
    UsageError,
    all_names,
    check_name,
)
from ray_ckpt.ray_dashboard import enable_if_possible

_MAX_NODES = 250  # one address of a /24 each
_POLL_S = 0.5
START_TRIES = 5  # of a node on which Ray gives up since the machine is busy


class LocalCluster:
    """A Ray cluster of several nodes on this machine, gone when the block ends.

        with LocalCluster(nodes=3, cpus=2) as cluster:
            job = cluster.submit(["python", "train.py"], working_dir=Path("."))
            cluster.kill("node1")
            assert cluster.wait_job(job, timeout_s=300) == "SUCCEEDED"

    It ends with the process that made it, whichever way that process ends.

    Args:
        nodes: Number of nodes, the head `node0` among them.
        cpus: CPUs that each node offers; need not exist.
        name: Folder name, unique among the clusters of this user; drawn when None.
        dashboard_port: TCP port of the dashboard and job server; 0 takes a free one.
        settings: How nodes are started.
    """

    def __init__(
        self,
        nodes: int = 3,
        cpus: int = 2,
        *,
        name: str | None = None,
        dashboard_port: int = 0,
        settings: Settings | None = None,
    ) -> None:
        if not 1 <= nodes <= _MAX_NODES:
            raise UsageError(f"--nodes {nodes}: between 1 and {_MAX_NODES} nodes are possible")
        _check_cpus(cpus)
        self.name = name if name is not None else f"t-{secrets.token_hex(4)}"
        check_name(self.name)
        self._num_nodes = nodes
        self._cpus = cpus
        self._dashboard_port = dashboard_port
        self._settings = settings or Settings()
        self._folders = Folders(self.name)
        self._guard: subprocess.Popen[bytes] | None = None
        self._jobs: Jobs | None = None

    @classmethod
    def attach(cls, name: str) -> LocalCluster:
        """The running cluster of this name.

        Raises:
            UsageError: There is none.
        """
        cluster = cls(name=name)
        cluster._settings = Settings.from_record(cluster._record().settings)
        return cluster

    def __enter__(self) -> LocalCluster:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    # Life of the cluster.

    def up(self, *, keep: bool = False) -> None:
        """Starts head and nodes and waits until all have joined and jobs can be submitted.

        Args:
            keep: The cluster lives until `down`, instead of ending with this process.

        Raises:
            ClusterError: It could not start; nothing is left of it then.
        """
        sweep()
        self._check_port()
        if self._settings.page:
            enable_if_possible()
        with self._folders.lock(create=True):
            old = self._folders.load()
            if old is not None and any(node.is_running for node in old.nodes):
                raise UsageError(
                    f"cluster {self.name!r} is already up: end it with `down --name {self.name}` "
                    "or choose another --name"
                )
            if old is not None:
                end_nodes(old.nodes)
            self._folders.empty()
            try:
                self._start_all(keep)
            except BaseException:
                record = self._folders.load()
                if record is not None:
                    destroy(record)
                raise
        if not keep:
            atexit.register(self._down_if_owner)
            self._guard = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("_guard.py")), self.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _start_all(self, keep: bool) -> None:
        checksum = zlib.crc32(f"{os.getuid()}/{self.name}".encode())
        loopback = f"127.{64 + checksum % 128}.{checksum // 128 % 256}"
        record = ClusterRecord(
            name=self.name,
            subnet=self._settings.subnet or loopback,
            dashboard_port=self._dashboard_port or _launch.free_port(),
            owner=_processes.read(os.getpid()),
            settings=dataclasses.asdict(self._settings),
        )
        if self._settings.auth == "token":
            self._folders.auth_token.touch(mode=0o600)
            self._folders.auth_token.write_text(secrets.token_hex(32))
        head = _launch.new_node(record, HEAD, self._cpus)
        record = self._start(record, [head])
        names = [f"node{i}" for i in range(1, self._num_nodes)]
        record = self._start(record, [_launch.new_node(record, n, self._cpus) for n in names])
        _launch.wait_for_dashboard(record)
        if keep:
            self._folders.save(dataclasses.replace(record, owner=None))

    def _start(self, record: ClusterRecord, nodes: Sequence[NodeRecord]) -> ClusterRecord:
        """Starts these nodes at the same time; the record knows them before they exist."""
        for node in nodes:
            record = record.with_node(node)
        self._folders.save(record)
        starts = [_launch.Start(record, node, self._settings) for node in nodes]
        for start in starts:
            for left in reversed(range(START_TRIES)):
                try:
                    record = record.with_node(start.wait())
                    break
                except _launch.LateNodeError:
                    if not left:
                        raise
                    self._burn(start.node)
                    again = _launch.new_node(record, start.node.name, start.node.cpus)
                    record = record.with_node(again)
                    self._folders.save(record)
                    start = _launch.Start(record, again, self._settings)
            if not record.address:
                record = dataclasses.replace(record, address=start.address())
        self._folders.save(record)
        return record

    def down(self) -> None:
        """Ends every process of the cluster and deletes its files; does nothing when it is down."""
        if self._folders.load() is not None:
            try:
                with self._folders.lock():
                    record = self._folders.load()
                    if record is not None:
                        destroy(record)
            except UsageError:
                if self._folders.load() is not None:
                    raise  # else who held the lock has ended the cluster
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None
        atexit.unregister(self._down_if_owner)

    def _down_if_owner(self) -> None:
        record = self._folders.load()
        me = _processes.read(os.getpid())  # a forked child inherits the exit handler
        if record and record.owner and me and record.owner.pid == me.pid:
            self.down()

    # Nodes that come and go.

    def add(self, node: str | None = None, *, cpus: int | None = None) -> str:
        """Adds a node, empty as a new machine.

        Args:
            node: Name of a dead node to bring back; a new name is drawn when None.
            cpus: CPUs that it offers; as many as the head when None.

        Returns:
            Its name.
        """
        with self._folders.lock():
            record = self._record()
            require_head(record)
            if node is None:
                node = f"node{1 + max(int(n.name.removeprefix('node')) for n in record.nodes)}"
            elif record.node(node).is_running:
                raise UsageError(f"{node} is running: only a dead node can be brought back")
            cpus = record.node(HEAD).cpus if cpus is None else cpus
            _check_cpus(cpus)
            try:
                self._start(record, [_launch.new_node(record, node, cpus)])
            except BaseException:
                started = self._folders.load()
                if started is not None:
                    self._burn(started.node(node))
                    self._folders.save(record)
                raise
        return node

    def kill(self, node: str, *, force: bool = False) -> None:
        """Kills a node as when its machine burns: all its processes at once, then all its files.

        Args:
            node: Its name.
            force: Also the head, and with it the whole cluster.

        Raises:
            UsageError: Unknown node, dead already, or the head without `force`.
        """
        with self._folders.lock():
            record = self._record()
            found = record.node(node)
            if node == HEAD and not force:
                raise UsageError(
                    f"{HEAD} is the head: without it the cluster is lost. "
                    "Choose another node, or add --force"
                )
            if found.killed:
                raise UsageError(f"{node} is dead already: `add` brings a node")
            self._burn(found)
            self._folders.save(record.with_node(dataclasses.replace(found, killed=True)))

    def _burn(self, node: NodeRecord) -> None:
        end_nodes([node])
        self._folders.remove_node(node.name)

    def drain(self, node: str, *, deadline_s: float, kill_at_deadline: bool = False) -> None:
        """Announces the loss of a node, as a cloud does before it reclaims a spot machine.

        Ray gives it no new work and tells what runs there. It ends an idle node at once; a busy one it
        leaves alone even after the deadline, because ending the machine is the cloud's part.

        Args:
            node: Its name.
            deadline_s: Seconds from now until its end.
            kill_at_deadline: Play the cloud's part: wait for the deadline, then `kill`.

        Raises:
            UsageError: Unknown or dead node, the head, or a deadline that is not in the future.
            ClusterError: Ray refused.
        """
        if deadline_s <= 0:
            raise UsageError(f"--deadline-s {deadline_s:g}: give seconds from now, above 0")
        record = self._record()
        found = record.node(node)
        if node == HEAD:
            raise UsageError(f"{HEAD} is the head and cannot be drained: choose another node")
        if not found.is_running:
            raise UsageError(f"{node} is dead: only a running node can be drained")
        end = time.monotonic() + deadline_s
        message = f"{node} will be reclaimed in {deadline_s:g} s"
        answer = ask(record, "drain", node_id=found.node_id, deadline_s=deadline_s, message=message)
        if not answer["accepted"]:
            raise ClusterError(f"Ray refused to drain {node}: {answer['rejection']}")
        if kill_at_deadline:
            time.sleep(max(0.0, end - time.monotonic()))
            self.kill(node)

    # What the processes of a node are.

    def processes(self, node: str) -> list[int]:
        """Process ids of all that runs on a node, parents before children; the head's has the drivers of jobs."""
        return [process.pid for process in _processes.members([self._record().node(node).identity])]

    def signal(self, node: str, number: int) -> int:
        """Sends a signal to all processes of a node: with SIGSTOP and SIGCONT it hangs and comes back.

        Returns:
            To how many processes.
        """
        return _processes.send([self._record().node(node).identity], number)

    # What the cluster is.

    def nodes(self) -> list[NodeStatus]:
        """All nodes that this cluster has had, by name."""
        record = self._record()
        return node_statuses(record, ask(record, "nodes"))

    def wait_for_nodes(self, count: int, timeout_s: float = 30.0) -> list[NodeStatus]:
        """Waits until Ray counts exactly this many live nodes, draining ones among them.

        Raises:
            TimeoutError: It did not come to that.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            nodes = self.nodes()
            alive = [node for node in nodes if node.alive]
            if len(alive) == count:
                return nodes
            if time.monotonic() > deadline:
                states = ", ".join(f"{node.name} {node.state}" for node in nodes)
                raise TimeoutError(
                    f"{len(alive)} live nodes instead of {count} after {timeout_s:g} s: {states}"
                )
            time.sleep(_POLL_S)

    def env(self) -> dict[str, str]:
        """Variables that make a program, or `ray job submit`, a client of this cluster.

        Raises:
            ClusterError: It is still starting, and has no address yet.
        """
        record = self._record()
        if not record.address:
            # An empty address would be none at all: the program would start a Ray of its own.
            raise ClusterError(
                f"cluster {self.name!r} is still starting: wait until its `up` says that it is up"
            )
        return _launch.client_environment(record)

    def client_environ(self) -> dict[str, str]:
        """The whole environment for such a program: this process's own without RAY_*, and `env()`."""
        return _launch.without_ray(os.environ) | self.env()

    @property
    def address(self) -> str:
        """What `ray.init(address=...)` takes."""
        return self._record().address

    @property
    def dashboard_url(self) -> str:
        return self.env()["RAY_API_SERVER_ADDRESS"]

    # Jobs.

    def submit(
        self,
        entrypoint: Sequence[str],
        working_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submits a job, as `ray job submit` does.

        Args:
            entrypoint: The command as a list; it is quoted for the shell that Ray uses.
            working_dir: Folder that is copied to the nodes; the command runs in the copy.
            env: More environment variables for it.

        Returns:
            The job's id.
        """
        # What looks for "the" Ray from inside, as Ray Train's own cleaner does, finds this one also where the machine
        # has others.
        known = {"RAY_ADDRESS": self.address}
        return self._job_server().submit(entrypoint, working_dir, known | dict(env or {}))

    def job_status(self, job_id: str) -> str:
        """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
        return self._job_server().status(job_id)

    def job_logs(self, job_id: str) -> str:
        """All that its driver has written until now."""
        return self._job_server().logs(job_id)

    def wait_job(self, job_id: str, timeout_s: float) -> str:
        """Waits for its end and returns its status.

        Raises:
            TimeoutError: It still runs; the message holds the end of its log.
        """
        return self._job_server().wait(job_id, timeout_s)

    def _job_server(self) -> Jobs:
        if self._jobs is None:
            token = _launch.token(self._record())
            self._jobs = Jobs(self.dashboard_url, token)
        return self._jobs

    # Inside.

    def _record(self) -> ClusterRecord:
        record = self._folders.load()
        if record is None:
            running = ", ".join(all_names()) or "none"
            raise UsageError(
                f"no cluster {self.name!r} (running: {running}): start it with "
                f"`up --name {self.name}`"
            )
        return record

    def _check_port(self) -> None:
        if self._dashboard_port and not _launch.is_free(self._dashboard_port):
            raise UsageError(
                f"--dashboard-port {self._dashboard_port} is in use: choose another, or auto"
            )


def _check_cpus(cpus: int) -> None:
    if cpus < 0:
        raise UsageError(f"--cpus {cpus}: give 0 or more")
