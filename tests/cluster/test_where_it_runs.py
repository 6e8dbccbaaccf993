"""The files for production agree with Ray and with the main job: options, variables, schemas, what a job brings."""

from __future__ import annotations

import copy
import importlib.util
import mmap
import re
import shlex
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cluster.leave import drain_arguments
from ray_ckpt.options import parse

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"


def read(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


def launcher_words() -> list[str]:
    launcher = read("launcher.yaml")
    starts = [*launcher["head_start_ray_commands"], *launcher["worker_start_ray_commands"]]
    return " ".join(starts).split()


# ---- commands -----------------------------------------------------------------------------------


def job_commands() -> dict[str, list[str]]:
    """Where a main job is started, and its flags."""
    found = {"rayjob.yaml": shlex.split(read("kuberay/rayjob.yaml")["spec"]["entrypoint"])[2:]}
    for path in (CLUSTER / "kuberay" / "raycluster.yaml", CLUSTER / "launcher.yaml"):
        said = path.read_text().replace("\\\n#", "")
        match = re.search(r"python jobs/pretrain\.py (.*)", said)
        assert match is not None, path
        found[path.name] = shlex.split(match[1])
    return found


@pytest.mark.parametrize("where", ["rayjob.yaml", "raycluster.yaml", "launcher.yaml"])
def test_the_options_of_the_job_are_options_of_the_main_job(where: str) -> None:
    from pretrain import PretrainConfig

    flags = job_commands()[where]
    config = parse(PretrainConfig, flags)
    assert config != PretrainConfig()
    assert Path(config.storage).is_absolute()
    assert all(Path(source.path).is_absolute() for source in config.sources)
    assert config.worker_range == (4, 8)  # what there is to grow and shrink, in all of the files
    with pytest.raises(SystemExit):
        parse(PretrainConfig, [*flags, "--tiers.replica", "1"])


def commands(name: str) -> click.Command:
    from ray.scripts.scripts import cli

    return cli.commands[name]


def options_of(command: click.Command) -> set[str]:
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def test_ray_takes_the_drain_that_a_leaving_node_asks_for() -> None:
    command, *arguments = drain_arguments(
        "1.2.3.4:6379", "ab" * 28, "the node is about to end", 4.6
    )
    context = commands(command).make_context(command, list(arguments))
    assert context.params == {
        "address": "1.2.3.4:6379",
        "node_id": "ab" * 28,
        "reason": "DRAIN_NODE_REASON_PREEMPTION",
        "reason_message": "the node is about to end",
        "deadline_remaining_seconds": 5,
    }
    # 0 would be no deadline at all to Ray.
    assert drain_arguments("a:1", "ab", "why", 0.1)[-1] == "1"


def test_ray_start_has_the_options_that_nodes_are_started_with() -> None:
    known = options_of(commands("start"))
    job = read("kuberay/rayjob.yaml")["spec"]["rayClusterSpec"]
    for group in (job["headGroupSpec"], *job["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
    from ray._private.label_utils import parse_node_labels_string

    spot = read("launcher.yaml")["available_node_types"]["spot"]
    for labels in (*(group["labels"] for group in job["workerGroupSpecs"]), spot["labels"]):
        text = ",".join(f"{key}={value}" for key, value in labels.items())  # as KubeRay passes them
        assert parse_node_labels_string(text) == labels
    flags = {word.partition("=")[0] for word in launcher_words() if word.startswith("--")}
    ours = {"--on-spot-notice", "--within-s"}
    assert ours <= flags
    assert flags - ours <= known
    assert "--grace-period" in options_of(commands("stop"))


# ---- variables ----------------------------------------------------------------------------------


@cache
def named_in_ray() -> set[str]:
    """Variables that Ray reads, of those that the files set."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    found = set()
    with (root / "_raylet.so").open("rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
            for name in variables():
                # Options of the C++ side are read as RAY_<name>, and have a property of that name in Python's.
                option = f"ray._raylet.Config.{name.removeprefix('RAY_')}"
                if binary.find(option.encode() + b"\0") >= 0:
                    found.add(name)
    constants = (root / "_private" / "ray_constants.py").read_text()
    constants += (
        root / "_private" / "authentication" / "authentication_token_setup.py"
    ).read_text()
    return found | {name for name in variables() if f'"{name}"' in constants}


def variables() -> set[str]:
    spec = read("kuberay/raycluster.yaml")["spec"]
    names = {
        each["name"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
        for each in group["template"]["spec"]["containers"][0]["env"]
    }
    names |= {word.partition("=")[0] for word in launcher_words() if word.startswith("RAY_")}
    return {*names, "RAY_health_check_perod_ms"}


def test_ray_reads_the_variables_that_the_files_set() -> None:
    ours = {name for name in variables() if name.startswith("RAY_CKPT_")}
    package = "".join(path.read_text() for path in (ROOT / "ray_ckpt" / "view").glob("*.py"))
    assert all(name in package for name in ours)
    unknown = variables() - ours - named_in_ray()
    assert unknown == {"RAY_health_check_perod_ms"}  # and a misspelled one is seen


# ---- the launcher -------------------------------------------------------------------------------


def test_ray_accepts_the_file_of_the_launcher() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    good = read("launcher.yaml")
    prepared = prepare_config(copy.deepcopy(good))
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert types["head"]["max_workers"] == 0  # it is the head and no worker
    assert types["spot"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    for wrong in ("idle_timeout_minute", "setup_command", "file_mount"):
        with pytest.raises(ValidationError):
            validate_config(prepare_config({**copy.deepcopy(good), wrong: []}))
    worse = copy.deepcopy(good)
    worse["available_node_types"]["spot"]["max_worker"] = 8
    with pytest.raises(ValidationError):
        validate_config(prepare_config(worse))


def test_the_folder_that_is_sent_to_the_nodes_is_where_commands_look_for_it() -> None:
    launcher = read("launcher.yaml")
    sent = {Path(path) for path in launcher["file_mounts"]}
    said = " ".join(str(c) for key in launcher if key.endswith("_commands") for c in launcher[key])
    for path in re.findall(r"/home/ubuntu/[\w./]+", said):
        assert any(Path(path).is_relative_to(folder) for folder in sent), path
    assert (ROOT / "cluster" / "leave.py").is_file()
    assert "ray_ckpt/cluster/leave.py" in said


# ---- what a job brings along --------------------------------------------------------------------

STAYS = [
    *("data/rows.parquet", "runs/mine/journal.jsonl", "runs/mine/checkpoints/a.distcp"),
    *(".git/objects/ab", ".venv/bin/python", "venv/bin/python", "tests/unit/test_a.py", ".ci/run"),
    *("ray_ckpt/__pycache__/a.cpython-311.pyc", ".mypy_cache/a.json", ".pytest_cache/a"),
    *(
        ".ruff_cache/a",
        ".hypothesis/a",
        "ray_ckpt.egg-info/PKG-INFO",
        "build/lib/a.py",
        "dist/a.whl",
    ),
    *("big.parquet", "model.safetensors", "jobs/old.pt", "train.log", "wandb/run/a"),
]
GOES = [
    *("jobs/pretrain.py", "ray_ckpt/data/index.py", "ray_ckpt/config.py", "cluster/leave.py"),
    *("ray_ckpt/view/static/page.js", "pyproject.toml", "README.md", "my_run.toml"),
]


def test_a_job_brings_its_code_and_nothing_else(tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package
    from ray.dashboard.modules.dashboard_sdk import parse_runtime_env_args
    from ray.runtime_env import RuntimeEnv

    folder = tmp_path / "project"
    for name in (*STAYS, *GOES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    said = parse_runtime_env_args(
        runtime_env=str(CLUSTER / "runtime_env.yaml"), working_dir=str(folder)
    )
    accepted = RuntimeEnv(**said)  # refuses what it does not know
    assert accepted["working_dir"] == str(folder)
    package = tmp_path / "package.zip"
    create_package(
        str(folder),
        package,
        include_gitignore=False,  # there may be none: the list has to do
        excludes=accepted["excludes"],
    )
    with zipfile.ZipFile(package) as found:
        names = {name for name in found.namelist() if not name.endswith("/")}
    assert names == set(GOES)


def test_nothing_of_this_repository_that_a_job_needs_is_left_behind() -> None:
    from ray._private.runtime_env.packaging import _get_excludes

    left = _get_excludes(ROOT, read("runtime_env.yaml")["excludes"])
    parts = ("ray_ckpt", "jobs", "cluster")
    files = [p for part in parts for p in (ROOT / part).rglob("*") if "__pycache__" not in p.parts]
    assert files
    assert [path for path in files if path.is_file() and left(path)] == []
