"""A private Ray beside others: what runs in it finds it, and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster

OTHER = """
import sys
from ray_ckpt.local_ray import cluster
with cluster(1):
    print("up", flush=True)
    sys.stdin.read()
"""

# The state API and `ray.init(address="auto")` of a child process both look for "the" Ray of the machine.
OURS = """
import os, subprocess, sys
import ray
from ray_ckpt.local_ray import cluster

CHILD = "import ray; ray.init(address='auto', logging_level='error', log_to_driver=False); "
CHILD += "print('CHILD', ray.nodes()[0]['NodeID'])"

@ray.remote(num_cpus=0)
def look():
    from ray.util.state import list_nodes

    assert not os.environ.get("RAY_GCS_SERVER_PORT"), "a Ray that is started here would fail"
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    return [node.node_id for node in list_nodes()], child.stdout.split("CHILD")[-1].strip()

with cluster(1):
    mine = ray.get_runtime_context().get_node_id()
    assert ray.get(look.remote(), timeout=90) == ([mine], mine)
    assert not {"RAY_ADDRESS", "RAY_GCS_SERVER_PORT"} & os.environ.keys()
    print("FOUND ITSELF", flush=True)
"""


def test_what_runs_in_a_private_ray_finds_that_one_and_no_other() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        ours = subprocess.run(
            [sys.executable, "-c", OURS], capture_output=True, text=True, timeout=180, check=False
        )
        assert "FOUND ITSELF" in ours.stdout, ours.stdout + ours.stderr
    finally:
        other.communicate(timeout=60)
