"""A newcomer with README.md alone: from a clone to a survived node kill, by the commands that stand there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from readme import ROOT, block_of, commands
from s3 import object_store

from cluster._launch import without_ray

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SUBMIT = "ray job submit"


class Shell:
    """A shell in the clone, whose home is empty, with the Python of the tests."""

    def __init__(self, home: Path) -> None:
        environ = without_ray(os.environ) | {"HOME": str(home)}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
        environ["RAY_CKPT_DASHBOARD"] = "0"  # the Ray that is installed here stays as it is
        self.process = subprocess.Popen(
            ["bash"], cwd=ROOT, env=environ, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __call__(self, command: str) -> str:
        """Gives it a command and waits; what it printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # Not from this pipe, which has the commands that follow.
        self.process.stdin.write(f'{{ {command}; }} < /dev/null\nrc=$?; echo; echo "RC $rc"\n')
        self.process.stdin.flush()
        lines: list[str] = []
        for line in self.process.stdout:
            if line.startswith("RC "):
                assert line.strip() == "RC 0", f"{command}\n{''.join(lines)[-4000:]}"
                return "".join(lines)
            lines.append(line)
        raise AssertionError(f"the shell ended\n{''.join(lines)[-4000:]}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in text if line.endswith("\n")]


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def test_the_demo_ends_well(shell: Shell) -> None:
    began = time.monotonic()
    said = shell("python cluster/local.py demo")
    print(said, f"{time.monotonic() - began:.0f} s")
    assert "each sample once, on 3, 2 and 3 workers" in said


def test_by_hand_every_command_does_its_part(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "ray_ckpt" / "runs" / "mine"

    def steps_on(workers: int) -> Callable[[], bool]:
        at = len(lines(run / "steps.jsonl"))
        return lambda: any(row["world_size"] == workers for row in lines(run / "steps.jsonl")[at:])

    up, *others = block_of("python cluster/local.py up --nodes 3 --cpus 1")
    shell(up)  # refused where somebody has a cluster of that name, which then stays
    try:
        for command in others:
            print(command, flush=True)
            if command.endswith("down"):
                # What it did on the way: `leave` is the fourth way to go, see "Scale it mid-run".
                shell("python cluster/leave.py --node node3 && python cluster/local.py kill node3")
                wait_for("another node goes, saved", steps_on(1))
                print(shell("ray-ckpt stop mine"))
            shell(command)
            if command.startswith(SUBMIT):
                wait_for("steps on 3 workers", steps_on(3))
            if " kill " in command or " drain " in command:
                wait_for("steps on 2 workers", steps_on(2))
            if command.endswith(" add"):
                wait_for("steps on 3 workers again", steps_on(3))
    finally:
        shell("python cluster/local.py down --name main || true")
    ends = [event for event in lines(run / "journal.jsonl") if event["event"] == "interruption"]
    assert [end["kind"] for end in ends][:2] == ["node_loss", "resize"]
    assert "drain" in {end["kind"] for end in ends}
    assert ends[-1]["kind"] == "user_stop"
    assert all(
        end["lost_steps"] == 0 for end in ends if end["kind"] in ("resize", "drain", "user_stop")
    )
    print(shlex.join(f"{end['kind']} {end['lost_steps']}" for end in ends))


def test_with_every_tier_and_an_object_store(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = (line for line in commands() if "--tiers.remote" in line)
    with object_store() as store:
        address = store.uri("runs")
        shell("export AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b AWS_EC2_METADATA_DISABLED=true")
        command = command.replace("/nvme/$USER", str(tmp_path / "nvme"))
        command = command.replace("s3://bucket/runs", shlex.quote(address))
        print(shell(f"{command} --steps 40 --policy.interval-steps 10")[-3000:])
        run = address.replace("/runs?", "/runs/pretrain?")
        said = shell(f"ray-ckpt verify {shlex.quote(run)}")
        assert "step-00000040-g1" in said
        # A head that has nothing fetches the records, and the same command finds the run complete.
        said = shell(f"{command} --steps 40 --storage {tmp_path / 'elsewhere'}")
        assert "is complete: step 40 of 40" in said
