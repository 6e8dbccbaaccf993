"""A node of a local cluster dies as a machine does, and nothing else is touched."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import _processes
from cluster._launch import NODE_LABEL
from cluster._state import ClusterRecord, Folders, check_name
from cluster.local import ClusterError, HealthCheck, LocalCluster, Settings, UsageError

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).resolve().parents[2] / "cluster" / "local.py"

# Writes one file into the node's own folder and one into shared memory, then lives until it is killed.
ACTOR = """
import os, pathlib, ray, sys, time
from multiprocessing import shared_memory
ray.init(log_to_driver=False)

@ray.remote(num_cpus=1, max_restarts=0, label_selector={"ray_ckpt.io/node": sys.argv[1]})
class Resident:
    def settle(self):
        import subprocess
        data = pathlib.Path(os.environ["RAY_CKPT_NODE_DIR"]) / "copy"
        data.write_bytes(b"x" * 1000)
        self.segment = shared_memory.SharedMemory(create=True, size=1000)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return {"pid": os.getpid(), "child": child.pid, "file": str(data), "shm": self.segment.name}
    def ping(self):
        return True

import json
actor = Resident.remote()
print(json.dumps(ray.get(actor.settle.remote())), flush=True)
try:
    while True:
        ray.get(actor.ping.remote())
        time.sleep(0.2)
except ray.exceptions.RayActorError:
    print("actor died", flush=True)
"""


def run(cluster: LocalCluster, code: str, *arguments: str) -> str:
    """What a client of the cluster prints: Ray is never initialised in the test's own process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=cluster.client_environ(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def states(cluster: LocalCluster) -> dict[str, str]:
    return {node.name: node.state for node in cluster.nodes()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3, cpus=1, settings=Settings(extra_env={"SEASON": "autumn"})) as made:
        yield made
        name = made.name
    assert_nothing_left(name)


def test_all_nodes_are_up_with_their_labels_and_folders(cluster: LocalCluster) -> None:
    nodes = cluster.wait_for_nodes(3)
    assert [node.name for node in nodes] == ["node0", "node1", "node2"]
    assert all(node.labels[NODE_LABEL] == node.name for node in nodes)
    assert all(node.data_dir.is_dir() for node in nodes)
    assert len({node.ip for node in nodes}) == 3


def test_a_submitted_job_succeeds_and_finds_its_surroundings(cluster: LocalCluster) -> None:
    code = "import os; print('dir', os.environ['RAY_CKPT_NODE_DIR'], os.environ['SEASON'])"
    code += "; print(os.environ['WORD'])"
    job = cluster.submit(["python", "-c", code], env={"WORD": "two words; 'quoted'"})
    assert cluster.wait_job(job, timeout_s=60) == "SUCCEEDED"
    log = cluster.job_logs(job)
    assert f"dir {Folders(cluster.name).node_data('node0')} autumn" in log
    assert "two words; 'quoted'" in log


def test_kill_is_the_loss_of_one_machine_and_add_brings_it_back(cluster: LocalCluster) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", ACTOR, "node1"],
        env=cluster.client_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        resident = json.loads(driver.stdout.readline())
        assert Path(resident["file"]).exists()
        before = {node.name: node for node in cluster.nodes()}
        processes = [_processes.read(resident["pid"]), _processes.read(resident["child"])]
        assert None not in processes

        killed_at = time.monotonic()
        cluster.kill("node1")
        assert not any(_processes.is_alive(process) for process in processes)
        assert not Path(resident["file"]).exists()
        assert not Path("/dev/shm", resident["shm"]).exists()
        folders = Folders(cluster.name)
        assert not folders.node("node1").exists()
        assert not folders.node_shared_memory("node1").exists()
        cluster.wait_for_nodes(2, timeout_s=15)
        print(f"the head noticed after {time.monotonic() - killed_at:.1f} s")
        assert driver.wait(timeout=30) == 0
        # Ray may put a word of its own, about the raylet that is gone, before or behind it.
        assert "actor died" in driver.stdout.read().splitlines()
    finally:
        driver.kill()

    assert states(cluster) == {"node0": "alive", "node1": "killed", "node2": "alive"}
    after = {node.name: node for node in cluster.nodes()}
    assert all(after[n].raylet_pid == before[n].raylet_pid for n in ("node0", "node2"))

    assert cluster.add("node1") == "node1"
    back = {node.name: node for node in cluster.wait_for_nodes(3)}["node1"]
    assert back.state == "alive"
    assert back.node_id != before["node1"].node_id
    assert list(back.data_dir.iterdir()) == []


# What runs says so itself: the cluster's count of free CPUs also lacks those of a node that joined a moment ago.
DRAIN = """
import ray, sys, time
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1, label_selector={"ray_ckpt.io/node": sys.argv[1]})
class Busy:
    def ping(self):
        return True
busy = Busy.remote()
assert ray.get(busy.ping.remote())
print("busy", flush=True)
time.sleep(600)
"""


def test_a_drained_busy_node_is_draining_and_ends_at_the_deadline(cluster: LocalCluster) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRAIN, "node2"],
        env=cluster.client_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "busy"
        cluster.drain("node2", deadline_s=60)
        node = {node.name: node for node in cluster.nodes()}["node2"]
        assert node.state == "draining"
        assert node.deadline_s is not None
        assert 0 < node.deadline_s <= 60
        assert states(cluster)["node1"] == "alive"
        cluster.drain("node2", deadline_s=1, kill_at_deadline=True)
        cluster.wait_for_nodes(2, timeout_s=15)
        assert states(cluster)["node2"] == "killed"
    finally:
        driver.kill()


def test_clusters_side_by_side_do_not_see_each_other(cluster: LocalCluster) -> None:
    mine = {node.node_id for node in cluster.nodes() if node.alive}
    count = "import ray; ray.init(log_to_driver=False); print(*[n['NodeID'] for n in ray.nodes()])"
    with LocalCluster(nodes=1, cpus=1, settings=Settings(auth="token")) as other:
        theirs = set(run(other, count).split())
        assert len(theirs) == 1
        assert not theirs & set(run(cluster, count).split())
        token = Path(other.env()["RAY_AUTH_TOKEN_PATH"])
        assert token.stat().st_mode & 0o077 == 0
        job = other.submit(["python", "-c", "import ray; ray.init(); print('inside')"])
        assert other.wait_job(job, timeout_s=60) == "SUCCEEDED"
        name = other.name
    assert_nothing_left(name)
    assert {node.node_id for node in cluster.nodes() if node.alive} == mine


def test_a_killed_owner_takes_its_cluster_along() -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from cluster.local import LocalCluster\n"
        "cluster = LocalCluster(nodes=1, cpus=1); cluster.up(); print(cluster.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SCRIPT.parents[1])],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    name = done.stdout.strip()
    deadline = time.monotonic() + 20
    while Folders(name).home.exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert_nothing_left(name)


def test_from_a_shell_and_mistakes_are_named(cluster: LocalCluster) -> None:
    status = shell("status", "--name", cluster.name, "--json")
    assert [row["name"] for row in json.loads(status.stdout)] == ["node0", "node1", "node2"]
    exports = subprocess.run(
        f'eval "$({sys.executable} {SCRIPT} env --name {cluster.name})"; echo $RAY_ADDRESS',
        shell=True,
        executable="/bin/bash",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert exports.stdout.strip() == cluster.address
    for arguments, word in [
        (("kill", "node0"), "--force"),
        (("kill", "node7"), "node7"),
        (("add", "--node", "node0"), "running"),
        (("drain", "node1", "--deadline-s", "0"), "--deadline-s"),
        (("up", "--nodes", "0"), "--nodes"),
        (("up",), "already up"),
    ]:
        refused = shell(*arguments, "--name", cluster.name)
        assert refused.returncode == 2, refused
        assert word in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert shell("status", "--name", "nobody").returncode == 2
    assert shell("kill").returncode == 2


def test_names_that_ray_could_not_use_are_refused() -> None:
    with pytest.raises(UsageError, match="at most"):
        check_name("n" * 60)
    with pytest.raises(UsageError, match="lower-case"):
        check_name("../up")
    with pytest.raises(UsageError, match="positive"):
        HealthCheck(failures=0)


def test_a_cluster_that_is_starting_has_no_clients_yet() -> None:
    name = f"t-{secrets.token_hex(4)}"
    folders = Folders(name)
    settings = dataclasses.asdict(Settings())
    folders.create()
    try:
        folders.save(
            ClusterRecord(
                name=name, subnet="127.9.9", dashboard_port=1, owner=None, settings=settings
            )
        )
        refused = shell("env", "--name", name)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "still starting" in refused.stderr
    finally:
        folders.remove()
    with pytest.raises(UsageError, match="no cluster"), folders.lock():
        pass


def test_a_process_is_believed_only_with_its_start_time() -> None:
    me = _processes.read(os.getpid())
    assert me is not None
    assert _processes.is_alive(me)
    recycled = _processes.Process(me.pid, me.parent, me.session, me.started - 1)
    assert not _processes.is_alive(recycled)
    stranger = _processes.Identity("nobody/node1/0", session=me.session, raylet=recycled)
    assert _processes.members([stranger]) == []


def test_a_failed_start_says_why_and_leaves_nothing() -> None:
    broken = LocalCluster(nodes=1, cpus=1, settings=Settings(extra_env={"PYTHONHOME": "/nowhere"}))
    with pytest.raises(ClusterError, match="node0"):
        broken.up()
    assert_nothing_left(broken.name)


def assert_nothing_left(name: str) -> None:
    folders = Folders(name)
    assert not folders.home.exists()
    assert not folders.shared_memory.exists()
    mark = f"rcl-{os.getuid()}/{name}/"
    for pid in _processes.table():
        assert mark not in " ".join(_processes.arguments(pid)), pid
        assert not _processes._tag_of(pid).startswith(f"{name}/"), pid


# Ray's own words for a node that a busy machine could not register within its half minute.
GIVES_UP_ONCE = """
if [ "$1" = node1 ] && mkdir "$2" 2>/dev/null; then
    echo "Exception: The current node timed out during startup. This could happen because..."
    exit 1
fi
shift 2
exec "$@"
"""


def test_a_node_that_ray_gives_up_on_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "gave-up"
    settings = Settings(
        page=False, in_front=("sh", "-c", GIVES_UP_ONCE, "late", "{node}", str(mark))
    )
    with LocalCluster(2, 1, settings=settings) as cluster:
        assert mark.exists()
        assert [(node.name, node.state) for node in cluster.nodes()] == [
            ("node0", "alive"),
            ("node1", "alive"),
        ]
        mark.rmdir()
        cluster.kill("node1")
        assert cluster.add("node1") == "node1"
        assert mark.exists()
