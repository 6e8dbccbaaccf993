"""The files for Kubernetes have no field that would be dropped, and sums that come out: memory, time, sizes, names."""

from __future__ import annotations

import copy
import gzip
import json
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from ray_ckpt.config import ElasticConfig, TiersConfig

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "cluster" / "kuberay"
SCHEMA = ROOT / "tests" / "kuberay" / "schema.json.gz"
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "": 1}


@cache
def schema() -> dict[str, Any]:
    return json.loads(gzip.decompress(SCHEMA.read_bytes()))


def faults(document: Any, kind: str) -> list[str]:
    """What the API server would refuse, or drop without a word."""
    validator = Draft202012Validator({**schema(), "$ref": f"#/kinds/{kind}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@cache
def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERAY / name).read_text()))


def documents(name: str) -> list[dict[str, Any]]:
    return copy.deepcopy(_documents(name))


def cluster() -> dict[str, Any]:
    [document] = documents("raycluster.yaml")
    return document


def job() -> dict[str, Any]:
    [document] = documents("rayjob.yaml")
    return document


def groups() -> list[dict[str, Any]]:
    spec = cluster()["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    [found] = group["template"]["spec"]["containers"]
    return found


def amount(text: str) -> int:
    """Bytes of a quantity of Kubernetes, such as 12Gi."""
    number = text.rstrip("KMGTi")
    return int(number) * UNITS[text[len(number) :]]


def environment(group: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(group)["env"]}


def flags(command: list[str]) -> dict[str, str]:
    """The value after each flag."""
    return {a: b for a, b in zip(command, [*command[1:], ""], strict=True) if a.startswith("--")}


def leaving(group: dict[str, Any]) -> dict[str, str]:
    return flags(container(group)["lifecycle"]["preStop"]["exec"]["command"])


# ---- fields -------------------------------------------------------------------------------------


def test_every_field_is_one_that_kuberay_knows() -> None:
    assert faults(cluster(), "RayCluster") == []
    assert faults(job(), "RayJob") == []


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a document has fields with names that are not free."""
    free = ("labels", "annotations", "rayStartParams", "matchLabels", "limits", "requests")
    if isinstance(node, dict):
        for key, value in node.items():
            if not path or path[-1] not in free:
                yield (*path, key)
            yield from places(value, (*path, key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from places(value, (*path, number))


@pytest.mark.parametrize(("name", "kind"), [("raycluster", "RayCluster"), ("rayjob", "RayJob")])
def test_a_misspelled_field_is_found_wherever_it_is(name: str, kind: str) -> None:
    [good] = documents(f"{name}.yaml")
    validator = Draft202012Validator({**schema(), "$ref": f"#/kinds/{kind}"})
    found = [way for way in places(good) if "rayClusterSpec" not in way[:-1]]  # the same, as below
    assert len(found) >= 20
    for *way, key in found:
        inner = good
        for step in way:
            inner = inner[step]
        value = inner.pop(key)
        inner[key + "x"] = value
        assert not validator.is_valid(good), [*way, key]
        del inner[key + "x"]
        inner[key] = value
    assert validator.is_valid(good)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("workerGroupSpecs", 0, "replicas"), "4", "integer"),
        (("autoscalerOptions", "version"), "v3", "v3"),
        (("authOptions", "mode"), "password", "password"),
        (("rayVersion",), 2.60, "string"),
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0, "string"),
        (
            ("headGroupSpec", "template", "spec", "volumes", 1, "emptyDir", "sizeLimit"),
            "2 GB",
            "2 GB",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_found(path: tuple[Any, ...], value: Any, word: str) -> None:
    document = cluster()
    inner: Any = document["spec"]
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert any(word in fault for fault in faults(document, "RayCluster"))


def test_what_is_around_them_is_in_order() -> None:
    claim, *budgets = documents("around.yaml")
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    # A pod may bring a claim of its own, so KubeRay's definition has the fields of one.
    pod = cluster()
    pod["spec"]["headGroupSpec"]["template"]["spec"]["volumes"].append(
        {"name": "own", "ephemeral": {"volumeClaimTemplate": {"spec": claim["spec"]}}}
    )
    assert faults(pod, "RayCluster") == []
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for group in groups()
        for volume in group["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == {claim["metadata"]["name"]}
    for budget in budgets:
        assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
        assert set(budget["spec"]) == {"minAvailable", "selector"}
        assert isinstance(budget["spec"]["minAvailable"], int)  # all that such pods may have
    head, worker = groups()
    least = {
        json.dumps(budget["spec"]["selector"]["matchLabels"]): budget["spec"]["minAvailable"]
        for budget in budgets
    }
    assert least == {
        json.dumps(head["template"]["metadata"]["labels"]): 1,
        json.dumps(worker["template"]["metadata"]["labels"]): worker["minReplicas"],
    }


# ---- the two are the same ------------------------------------------------------------------------


def test_the_cluster_of_the_job_is_the_cluster() -> None:
    assert job()["spec"]["rayClusterSpec"] == cluster()["spec"]


def test_all_pods_have_one_image_and_the_version_of_ray_that_is_required() -> None:
    spec = job()["spec"]
    submitter = spec["submitterPodTemplate"]["spec"]["containers"][0]["image"]
    assert {container(group)["image"] for group in groups()} == {submitter}
    version = cluster()["spec"]["rayVersion"]
    assert (
        f'"ray[default,train]>={version.rpartition(".")[0]},'
        in (ROOT / "pyproject.toml").read_text()
    )
    assert f"rayproject/ray:{version}-" in (ROOT / "cluster" / "Dockerfile").read_text()


def test_what_kuberay_refuses_beyond_its_schema() -> None:
    spec = job()["spec"]
    # restartPolicy is the operator's with the autoscaler v2; no container of its own name may be there.
    for group in groups():
        assert "restartPolicy" not in group["template"]["spec"]
        assert "labels" not in group["rayStartParams"]
    assert spec["backoffLimit"] > 0
    assert "clusterSelector" not in spec  # neither tries again nor ends the cluster
    assert spec["shutdownAfterJobFinishes"]  # or there may be no ttlSecondsAfterFinished
    assert len(cluster()["metadata"]["name"]) <= 63
    assert len(job()["metadata"]["name"]) <= 47


# ---- sums ---------------------------------------------------------------------------------------


def test_the_head_neither_trains_nor_has_a_gpu() -> None:
    head = groups()[0]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert not any("gpu" in key for key in container(head)["resources"]["limits"])


def test_a_run_uses_as_many_workers_as_the_group_may_have() -> None:
    said = flags(shlex.split(job()["spec"]["entrypoint"]))
    worker = groups()[1]
    assert said["--workers"] == f"{worker['minReplicas']}:{worker['maxReplicas']}"
    assert worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
    limits = container(worker)["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"  # one worker for each
    assert float(limits["cpu"]) >= ElasticConfig().cpus_per_worker


def shared_memory(group: dict[str, Any]) -> int:
    [volume] = [v for v in group["template"]["spec"]["volumes"] if "emptyDir" in v]
    assert volume["emptyDir"]["medium"] == "Memory"
    mounts = {m["name"]: m["mountPath"] for m in container(group)["volumeMounts"]}
    assert mounts[volume["name"]] == "/dev/shm"
    return amount(volume["emptyDir"]["sizeLimit"])


def test_shared_memory_has_room_for_the_object_store_and_the_memory_tier() -> None:
    head, worker = groups()
    said = flags(shlex.split(job()["spec"]["entrypoint"]))
    checkpoint = amount(worker["template"]["metadata"]["annotations"]["ray-ckpt.io/checkpoint"])
    share = checkpoint / worker["minReplicas"]
    keep = int(said.get("--tiers.memory-keep", TiersConfig().memory_keep))
    replicas = int(said.get("--tiers.replicas", TiersConfig().replicas))
    tier = share * (keep + 1) * (replicas + 1)
    assert "--tiers.use memory durable" in job()["spec"]["entrypoint"]
    assert shared_memory(worker) >= int(worker["rayStartParams"]["object-store-memory"]) + tier
    assert shared_memory(head) >= int(head["rayStartParams"]["object-store-memory"])


def test_a_container_has_memory_beyond_its_shared_memory() -> None:
    for group in groups():
        limits = container(group)["resources"]["limits"]
        assert amount(limits["memory"]) >= 2 * shared_memory(group)
        assert container(group)["resources"]["requests"] == limits


def test_leaving_fits_into_the_grace_period() -> None:
    for group in groups():
        said = leaving(group)
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        # What is left is for Python to start, for Ray to answer, and for the node to end.
        assert grace_s >= float(said["--within-s"]) + float(said.get("--drain-s", 5)) + 20
        assert environment(group)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"


def detection_s(variables: dict[str, str]) -> float:
    """Until a machine that vanishes is believed dead, at most: each check may come late, and wait to no end."""
    period, timeout, failures = (
        int(variables[f"RAY_health_check_{name}"])
        for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    return failures * (period + timeout) / 1000


def test_a_dead_node_is_known_before_the_run_waits_no_longer() -> None:
    head = groups()[0]
    told = detection_s(environment(head))
    assert told < ElasticConfig().node_loss_wait_s
    assert f"{told:g} s at most" in (KUBERAY / "raycluster.yaml").read_text()
    # Quicker than Ray by itself (3 s, 10 s, 5), and slower than one lost packet, which TCP sends again after a second.
    assert told < 5 * (3 + 10)
    assert int(environment(head)["RAY_health_check_timeout_ms"]) >= 3000
    # A probe that kills is the last to give up.
    for group in groups():
        probe = container(group)["livenessProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] > 2 * told


def test_an_idle_node_outlives_a_restart_of_the_workers() -> None:
    elastic = ElasticConfig()
    idle_s = cluster()["spec"]["autoscalerOptions"]["idleTimeoutSeconds"]
    assert idle_s > 2 * (elastic.node_loss_wait_s + elastic.start_timeout_s)


def test_the_launcher_believes_nodes_dead_as_kubernetes_does() -> None:
    launcher = yaml.safe_load((ROOT / "cluster" / "launcher.yaml").read_text())
    words = " ".join(launcher["head_start_ray_commands"]).split()
    said = dict(word.split("=", 1) for word in words if word.startswith("RAY_health"))
    there = environment(groups()[0])
    assert said == {key: value for key, value in there.items() if "health" in key}
    assert (
        launcher["idle_timeout_minutes"] * 60
        >= cluster()["spec"]["autoscalerOptions"]["idleTimeoutSeconds"]
    )
    spot = launcher["available_node_types"]["spot"]
    assert spot["max_workers"] <= launcher["max_workers"]


def test_jobs_leave_the_same_files_behind_everywhere() -> None:
    here = yaml.safe_load((ROOT / "cluster" / "runtime_env.yaml").read_text())
    there = yaml.safe_load(job()["spec"]["runtimeEnvYAML"])
    assert sorted(there["excludes"]) == sorted(here["excludes"])
    assert there["working_dir"] in (ROOT / "cluster" / "Dockerfile").read_text()


def test_the_image_has_what_the_pods_run() -> None:
    copied = (ROOT / "cluster" / "Dockerfile").read_text()
    for group in groups():
        script = Path(container(group)["lifecycle"]["preStop"]["exec"]["command"][1])
        inside = script.relative_to("/opt/ray_ckpt")
        assert (ROOT / inside).is_file()
        assert f"{inside.parts[0]} /opt/ray_ckpt/{inside.parts[0]}" in copied
    program = Path(shlex.split(job()["spec"]["entrypoint"])[1])
    assert (ROOT / program).is_file()
    assert f"{program.parts[0]} /opt/ray_ckpt/{program.parts[0]}" in copied
