"""`ray-ckpt completion SHELL`: a script with which a shell completes the commands, their options, and the runs.

The script is made from the parser of the command line itself and is static: completing starts no Python.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

SHELLS = ("bash", "zsh", "fish")

_HOW = """Puts the script on standard output. In your shell's own start file:
  bash  eval "$(ray-ckpt completion bash)"             in ~/.bashrc
  zsh   ray-ckpt completion zsh > DIR/_ray-ckpt        with DIR in $fpath, before compinit
  fish  ray-ckpt completion fish > ~/.config/fish/completions/ray-ckpt.fish
"""
_NAMES = 'command ls "${RAY_CKPT_STORAGE:-$HOME/ray_ckpt/runs}" 2>/dev/null'
# Names below the default storage, and folders, since a RUN may be either.
_RUNS = {"bash": "_ray_ckpt_runs", "zsh": "_ray_ckpt_runs", "fish": "(_ray_ckpt_runs)"}
_FUNCTIONS = {
    "bash": f"""
_ray_ckpt_runs() {{
  compgen -W "$({_NAMES})" -- "$1"
  compgen -d -- "$1"
}}
""",
    "zsh": f"""
_ray_ckpt_runs() {{
  local -a runs
  runs=("${{(@f)$({_NAMES})}}")
  compadd -a runs
  _files -/
}}
""",
    "fish": """
function _ray_ckpt_runs
  set -l runs ~/ray_ckpt/runs
  set -q RAY_CKPT_STORAGE; and set runs $RAY_CKPT_STORAGE
  command ls $runs 2>/dev/null
  __fish_complete_directories
end
""",
}
_FOLDERS, _FILES = ("storage", "to"), ("html", "job", "file")


def add_completion_command(
    commands: Any, layout: dict[str, Any], parser: argparse.ArgumentParser
) -> None:
    """Adds the command.

    Args:
        commands: of the command line.
        layout: of a command's help.
        parser: of the whole command line.
    """
    text = "Print a script with which your shell completes ray-ckpt."
    command = commands.add_parser(
        "completion", help=text, description=f"{text}\n\n{_HOW}", **layout
    )
    command.set_defaults(command=partial(command_completion, parser))
    command.add_argument("shell", choices=SHELLS, help="which shell")


def command_completion(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """`completion SHELL`."""
    print(script(parser, args.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of a command line.

    Args:
        parser: of the command line; its arguments are told how they are completed.
        shell: one of :data:`SHELLS`.
    """
    import shtab

    for command in _commands(parser):
        for action in command._actions:
            if action.dest == "run":
                action.complete = _RUNS  # type: ignore[attr-defined]
            elif action.dest in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.dest in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell=shell, preamble=_FUNCTIONS))


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of all commands."""
    found: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found
