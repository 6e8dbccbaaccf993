"""Every command of README.md is run by a test, or says here why none can; and each has only options that there are."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tyro
from readme import ROOT, commands
from test_cli import add_checkpoint

from cluster import leave, local
from ray_ckpt import cli, ray_dashboard
from ray_ckpt.options import parse
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME

# Given as they are, below, on a run of two checkpoints: what begins so.
HERE = (
    "ray-ckpt ls", "ray-ckpt show", "ray-ckpt pin", "ray-ckpt gc", "ray-ckpt report", "ray-ckpt goodput",
    "ray-ckpt plan", "ray-ckpt interruptions import", "ray-ckpt dashboard enable",
)  # fmt: skip
HERE_EXACTLY = ("ray-ckpt verify RUN",)

STORY, PROOFS = "tests/cluster/test_readme_story.py", "tests/cluster/test_readme_proofs.py"

# Run by another test, with other values or another store: which one, and what in it does so.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "pip install -e . && python jobs/pretrain.py": (".ci/run", "python jobs/pretrain.py"),
    "pip install -e '.[test]' && pytest": (".ci/run", "pip install -q -e '.[test]'"),
    "python jobs/pretrain.py": (".ci/run", "python jobs/pretrain.py"),
    "RAY_ADDRESS=HOST:6379 python jobs/pretrain.py --workers 1:8": ("tests/cluster/test_prometheus.py", "ray.env()"),
    "ray job submit --working-dir . --runtime-env cluster/runtime_env.yaml -- python jobs/pretrain.py --workers 1:8": (
        STORY, "SUBMIT"
    ),
    "python jobs/prepare.py --input my_text/ more.jsonl.gz --output /shared/data/mine --seq-len 1024": (
        "tests/cluster/test_prepare.py", '"jobs" / "prepare.py"'
    ),
    "python cluster/local.py demo": (STORY, '"python cluster/local.py demo"'),
    "python cluster/leave.py --node node1 && python cluster/local.py kill node1": (STORY, "cluster/leave.py"),
    "python cluster/local.py drain node1 --deadline-s 30 --then-kill": (STORY, "block_of"),
    'python jobs/pretrain.py --run mine --global-batch 48 --change-at-resume "larger batch after warm-up"': (
        "tests/dist/test_segments.py", "change_at_resume"
    ),
    "python jobs/pretrain.py --tiers.use memory durable --tiers.replicas 2": (
        "tests/cluster/test_tiers_on_nodes.py", "--tiers.use"
    ),
    "python jobs/pretrain.py --tiers.use memory local durable --tiers.local-folder '/nvme/$USER' --tiers.remote "
    "s3://bucket/runs": (STORY, '"--tiers.remote" in line'),
    "ray-ckpt verify RUN --nodes": ("tests/cluster/test_tiers_on_nodes.py", "--nodes"),
    "ray-ckpt export RUN STEP --to DIR": ("tests/unit/test_weights.py", '"export"'),
    "ray-ckpt drill RUN": ("tests/dist/test_drill_worlds.py", '"ray_ckpt", "drill"'),
    'ray-ckpt drill RUN --options "--data /shared/data/mine" --every-s 3600': (
        "tests/dist/test_drill_worlds.py", '"--options", data'
    ),
    "ray job submit --working-dir . --runtime-env cluster/runtime_env.yaml -- python jobs/drill.py --run mine "
    "--every-s 3600": ("tests/dist/test_drill_worlds.py", '"drill.py"'),
    "python jobs/soak.py --seed 7 --events 5 --nodes 3": ("tests/cluster/test_soak.py", '"jobs" / "soak.py"'),
    "ray-ckpt save RUN": ("tests/cluster/test_planned_ends.py", 'ask(cluster, "save"'),
    "ray-ckpt stop RUN": (STORY, "ray-ckpt stop mine"),
    "curl http://HEAD:8265/api/ray_ckpt/runs": ("tests/cluster/test_dashboard_page.py", '"/api/ray_ckpt/runs"'),
    'curl -H "Authorization: Bearer $(cat ~/.ray/auth_token)" http://HEAD:8265/api/ray_ckpt/runs': (
        "tests/cluster/test_dashboard_page.py", 'f"Bearer {token}"'
    ),
    "ray-ckpt simulate --mtbf 3h --stall 30s --restart 5m --workers 1024 --workers-per-node 8 --elastic --repair 6h": (
        "tests/dist/test_simulate.py", 'c.startswith("ray-ckpt simulate")'
    ),
    "ray-ckpt simulate --mtbf 3h --stall 30s --restart 5m --upload 5m --tiers memory:stall=2s,upload=10s,restart=1m "
    "durable": ("tests/dist/test_simulate.py", 'c.startswith("ray-ckpt simulate")'),
    "ray-ckpt simulate --llama3 --workers 131072 --workers-per-node 8 --stall 20s --restart table --html "
    "planned.html": ("tests/dist/test_simulate.py", 'c.startswith("ray-ckpt simulate")'),
    "python jobs/pretrain.py --policy.history /shared/seen.json": (
        "tests/unit/test_history.py", "PolicyConfig(history="
    ),
    "RAY_CKPT_KEY=@$HOME/ckpt.key python jobs/pretrain.py --run mine": ("tests/dist/test_signed.py", "KEY_VARIABLE"),
}  # fmt: skip

# Of a block that a test gives to a shell line by line.
BY_HAND = {STORY: "python cluster/local.py up --nodes 3 --cpus 1", PROOFS: "python jobs/prove.py"}

# No test runs these, and why.
NOT_RUN: dict[str, str] = {
    "python jobs/soak.py": "half an hour; tests/cluster/test_soak.py runs a few of its events",
    "kubectl patch raycluster ray-ckpt --type json -p "
    '\'[{"op": "replace", "path": "/spec/workerGroupSpecs/0/maxReplicas", "value": 6}]\'': (
        "needs Kubernetes; tests/unit/test_kube_files.py checks the path against the file and KubeRay's definitions"
    ),
    "kubectl delete pod ray-ckpt-spot-worker-abcde": "needs Kubernetes; what the pod runs then is cluster/leave.py",
    "kubectl drain NODE --ignore-daemonsets --delete-emptydir-data": "needs Kubernetes; the same, pod by pod",
    "ray exec cluster/launcher.yaml 'ray-ckpt save mine --storage /shared/runs'": (
        "needs machines of AWS; the file is checked by Ray's schema, the command in tests/cluster/test_planned_ends.py"
    ),
    "ray up --no-restart --yes cluster/launcher.yaml": "needs machines of AWS; the file is checked with Ray's schema",
    "openssl rand -hex 32 > ~/ckpt.key; chmod 600 ~/ckpt.key": "openssl's own; its output is hexadecimal digits",
}  # fmt: skip


def by_hand() -> dict[str, str]:
    from readme import block_of

    return {line: path for path, first in BY_HAND.items() for line in block_of(first)}


def is_here(command: str) -> bool:
    return command.startswith(HERE) or command in HERE_EXACTLY


@pytest.mark.parametrize("command", commands())
def test_each_command_is_run_by_a_test_or_says_why_not(command: str) -> None:
    ways = [is_here(command), command in ELSEWHERE, command in by_hand(), command in NOT_RUN]
    assert sum(ways) == 1, "name the test that runs it, or why none can, in this file"


def test_tables_name_commands_that_there_are_and_tests_that_run_them() -> None:
    assert {*ELSEWHERE, *NOT_RUN} <= {*commands()}
    for command, (path, needle) in ELSEWHERE.items():
        assert needle in (ROOT / path).read_text(), f"{path} does not run {command!r} any more"
    for path, first in BY_HAND.items():
        assert f'block_of("{first}")' in (ROOT / path).read_text()
    assert all(len(why.split()) >= 4 for why in NOT_RUN.values())


# ---- options ----------------------------------------------------------------------------------------


def ours() -> dict[str, list[list[str]]]:
    """Program to the arguments that README.md gives it."""
    found: dict[str, list[list[str]]] = {}
    for line in commands():
        for command in line.split(" && "):
            words = [
                word for word in shlex.split(command) if "=" not in word or word.startswith("-")
            ]
            words = words[words.index("--") + 1 :] if "--" in words else words
            if words and words[0] == "python":
                words = words[1:]
            if words and words[0].startswith(("jobs/", "cluster/", "ray-ckpt")):
                found.setdefault(words[0], []).append(words[1:])
    return found


@pytest.mark.parametrize(
    "arguments", [*ours()["ray-ckpt"], *[["--local", *a] for a in ours()["cluster/local.py"]]]
)
def test_options_of_the_command_line_are_there(arguments: list[str]) -> None:
    if arguments[0] == "--local":
        local._parser().parse_args(arguments[1:])
    else:
        cli.build_parser().parse_args(arguments)


CONFIGS = {
    "jobs/pretrain.py": "PretrainConfig", "jobs/prove.py": "ProveConfig", "jobs/drill.py": "DrillConfig",
    "jobs/prepare.py": "PrepareOptions", "jobs/soak.py": "SoakConfig",
}  # fmt: skip


@pytest.mark.parametrize("script", CONFIGS)
def test_options_of_the_jobs_are_there(script: str) -> None:
    module = importlib.import_module(Path(script).stem)
    # All at once: to read the options of one class takes a while.
    words = [word for arguments in ours()[script] for word in arguments]
    options = getattr(module, CONFIGS[script])
    if script == "jobs/prepare.py":
        tyro.cli(options, args=words)
    else:
        parse(options, words)


def test_options_of_leaving_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    (arguments,) = ours()["cluster/leave.py"]
    monkeypatch.setattr(sys, "argv", ["leave.py", *arguments])
    monkeypatch.setattr(leave, "leave", lambda options: 7 if options.node == "node1" else 1)
    assert leave.main() == 7


def test_no_program_of_ours_is_forgotten() -> None:
    assert ours().keys() == {"ray-ckpt", "cluster/local.py", "cluster/leave.py", *CONFIGS}


# ---- run as they are --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    def make() -> Path:
        folder = tmp_path_factory.mktemp("readme")
        run = folder / "runs" / "mine"
        for step in (1000, 1200, 1400):
            add_checkpoint(run, step)
        events = [
            {"event": "tracker_started", "time": 1.7e9, "host": "h", "pid": 1, "events_read": 0, "boot": "b",
             "monotonic": 0.0, "submitted_ago_s": 1.0},
            {"event": "attempt_started", "time": 1.7e9, "monotonic": 1.0, "generation": 1, "world_size": 2, "nodes": [],
             "boot": "b"},
            {"event": "restored", "time": 1.7e9, "monotonic": 2.0, "generation": 1, "step": 0, "seconds": 0.1,
             "source": "", "reason": "new", "worker_monotonic": 2.0},
        ]  # fmt: skip
        (run / JOURNAL_NAME).write_text("".join(json.dumps(event) + "\n" for event in events))
        line = {
            "step": 1,
            "generation": 1,
            "loss": 2.0,
            "step_time_s": 1.0,
            "time": 1.7e9 + 3,
            "monotonic": 3.0,
        }
        (run / STEPS_NAME).write_text(json.dumps(line) + "\n")
        (folder / "seen.csv").write_text("workers,hours,kind,failures\n8,100,node_loss,2\n")
        (folder / "modules").mkdir()
        return folder

    return make


@pytest.mark.parametrize("command", filter(is_here, commands()))
def test_it_does_what_it_says(
    command: str,
    folder: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = folder()
    monkeypatch.chdir(place)
    monkeypatch.setattr(
        ray_dashboard, "_modules", lambda: (place / "modules", ray_dashboard.READ_IN)
    )
    values = {"RUN": str(place / "runs" / "mine"), "STEP": "1200", "F": "f.html"}
    arguments = [values.get(word, word) for word in shlex.split(command)[1:]]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out
