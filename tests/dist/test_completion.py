"""`ray-ckpt completion`: what the shells themselves make of the scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ray_ckpt.cli import build_parser
from ray_ckpt.commands.completion import SHELLS, script

pytestmark = pytest.mark.dist

CHECKS = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}
# What bash does when somebody presses the tabulator key.
PRESS = r"""
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
[[ $(complete -p ray-ckpt) =~ -F\ ([^ ]+) ]] && "${BASH_REMATCH[1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        (folder / shell).write_text(script(build_parser(), shell))
    return folder


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_valid_to_its_shell(scripts: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run(
        [*CHECKS[shell], str(scripts / shell)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def offered(scripts: Path, storage: Path, *words: str) -> set[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", PRESS, "bash", str(scripts / "bash"), "ray-ckpt", *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=storage,
        env={"PATH": "/usr/bin:/bin", "RAY_CKPT_STORAGE": str(storage), "HOME": str(storage)},
    )
    assert not done.stderr, done.stderr
    return {word for word in done.stdout.split("\n") if word}


def test_bash_offers_every_command(scripts: Path, tmp_path: Path) -> None:
    commands = {
        name
        for action in build_parser()._actions
        if action.nargs == "A..."
        for name in action.choices or ()
    }
    assert {"ls", "goodput", "gc", "completion"} <= commands
    assert offered(scripts, tmp_path, "") == commands
    assert offered(scripts, tmp_path, "goo") == {"goodput"}


def test_bash_offers_runs_options_and_choices(scripts: Path, tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
    assert offered(scripts, tmp_path, "verify", "al") == {"alpha"}
    assert offered(scripts, tmp_path, "verify", "") >= {"alpha", "beta"}
    assert "--attempts" in offered(scripts, tmp_path, "goodput", "alpha", "--")
    assert offered(scripts, tmp_path, "dashboard", "") == {"enable", "disable", "status"}
    assert offered(scripts, tmp_path, "completion", "") == set(SHELLS)
