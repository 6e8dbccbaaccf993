"""`ray-ckpt`: look at the checkpoints of a run and prove them, from nothing but its folder.

Works on a storage path, or the address of an object store, without Ray and (but for `export` and `drill`) without
torch, so it answers at once, on any machine that sees the storage, also while the run goes on. The commands here
change nothing in a run; those that pin and delete are in :mod:`ray_ckpt.commands.retention`, and `drill` writes its
outcome beside the manifest. `plan` is about no run at all.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from ray_ckpt.commands import completion as completion_command
from ray_ckpt.commands import dashboard as dashboard_command
from ray_ckpt.commands import drill as drill_command
from ray_ckpt.commands import export as export_command
from ray_ckpt.commands import goodput as goodput_command
from ray_ckpt.commands import interruptions as interruptions_command
from ray_ckpt.commands import listing as listing_command
from ray_ckpt.commands import plan as plan_command
from ray_ckpt.commands import report as report_command
from ray_ckpt.commands import simulate as simulate_command
from ray_ckpt.commands import steer as steer_command
from ray_ckpt.commands import verify as verify_command
from ray_ckpt.commands.output import EXIT_FAULT
from ray_ckpt.commands.parser import Parser
from ray_ckpt.commands.retention import add_retention_commands
from ray_ckpt.errors import ConfigError, RayCkptError

STORAGE_VARIABLE = "RAY_CKPT_STORAGE"
DEFAULT_STORAGE = "~/ray_ckpt/runs"

EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 2, 130, 141

_EXIT_CODES = """exit codes:
  0    done; for verify: every committed checkpoint is as it was written
  1    a fault, named with its file; storage that cannot be read; or a wait that took too long
  2    wrong usage: an unknown option, run or step
  130  interrupted
  141  the reader of the output went away (as in `ray-ckpt ls RUN | head -1`)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (see `--help`)."""
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that the terminal's encoding lacks must not end the listing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"ray-ckpt: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RayCkptError as error:
        print(f"ray-ckpt: {error}", file=sys.stderr)
        return EXIT_FAULT
    except BrokenPipeError:
        # Python flushes once more at exit; into nothing, or it would complain after all.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The command line: commands that share RUN, --storage and --json."""
    layout: dict[str, Any] = {
        "epilog": _EXIT_CODES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = Parser(
        prog="ray-ckpt",
        description="Look at the checkpoints of a run, prove them, pin them, delete the old ones; see where time went.",
        **layout,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    step_help = "a step, such as 1200 (newest generation), or 1200-g3"

    def add(
        name: str, function: Any, text: str, *, folder_only: bool = False
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, **layout)
        command.set_defaults(command=function)
        address = "" if folder_only else "its address on an object store, "
        command.add_argument(
            "run",
            metavar="RUN",
            help=f"a run's folder, {address}or the name of a run below --storage",
        )
        command.add_argument(
            "--storage",
            default=os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE,
            help=f"folder of runs{'' if folder_only else ', or an address'} "
            f"(default: ${STORAGE_VARIABLE} or {DEFAULT_STORAGE})",
        )
        command.add_argument("--json", action="store_true", help="print JSON for scripts")
        return command

    add("ls", listing_command.command_ls, "List checkpoints, newest first, usable or not.")
    show = add(
        "show", listing_command.command_show, "Show all that one checkpoint's manifest says."
    )
    show.add_argument("step", metavar="STEP", help=step_help)
    verify = add(
        "verify", verify_command.command_verify, "Read every byte again and compare checksums."
    )
    verify.add_argument("step", metavar="STEP", nargs="?", help=f"{step_help}; default: all")
    verify.add_argument(
        "--nodes",
        action="store_true",
        help="of a run that trains: also the copies in memory and on the disks of its nodes, all of them",
    )
    steer_command.add_arguments(verify)
    export = add(
        "export",
        export_command.command_export,
        "Write the weights of a checkpoint as safetensors.",
        folder_only=True,
    )
    export_command.add_arguments(export, step_help)
    drill = add(
        "drill",
        drill_command.command_drill,
        "Restore a checkpoint as a restart would, on one CPU, and compare its loss.",
        folder_only=True,
    )
    drill_command.add_arguments(drill, step_help)
    save = add(
        "save",
        steer_command.command_save,
        "Have a run that trains save now, and wait.",
        folder_only=True,
    )
    stop = add(
        "stop",
        steer_command.command_stop,
        "Have a run save, and end its job.",
        folder_only=True,
    )
    for command in (save, stop):
        steer_command.add_arguments(command)
    goodput_command.add_command(add)
    interruptions_command.add_command(add)
    plan_command.add_command(commands, layout)
    simulate_command.add_command(commands, layout)
    add_retention_commands(add, step_help)
    report = add(
        "report",
        report_command.command_report,
        "Write what the dashboard shows of a run into one HTML file.",
    )
    report_command.add_arguments(report)
    dashboard_command.add_dashboard_command(commands, layout)
    completion_command.add_completion_command(commands, layout, parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
