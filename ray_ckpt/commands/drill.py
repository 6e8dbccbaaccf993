"""`ray-ckpt drill`: restores a checkpoint as a restart would, and compares the loss. Needs torch, and no cluster."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import TYPE_CHECKING

from ray_ckpt.commands.output import note
from ray_ckpt.errors import ConfigError
from ray_ckpt.view.human import human_bytes
from ray_ckpt.view.runs import find_run
from ray_ckpt.view.tables import printable

if TYPE_CHECKING:
    from ray_ckpt.drill import DrillResult

MAIN_JOB = "jobs/drill.py"

EXIT_CODES = """exit codes:
  0    all drills were ok; with --every-s: until the run was finished
  1    a drill failed, or storage could not be read
  2    nothing to drill, another drill of the run is under way, or wrong usage
  130  interrupted
  141  the reader of the output went away
"""


def add_arguments(parser: argparse.ArgumentParser, step_help: str) -> None:
    """The options of the command."""
    parser.epilog = EXIT_CODES
    parser.add_argument("--step", default="", help=f"{step_help}; default: the newest")
    parser.add_argument(
        "--job",
        default=MAIN_JOB,
        metavar="FILE[:FUNCTION]",
        help="whose model it is: FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION, called with the run's folder and the "
        "--options, gives the run's options and its training function (default: jobs/drill.py, the main job)",
    )
    parser.add_argument(
        "--options",
        default="",
        metavar="TEXT",
        help="options for the job, such as \"--data /shared/data\"; the model's are on the run's record",
    )
    parser.add_argument(
        "--every-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="look every so many seconds and drill the newest checkpoint if it was not, until the run is finished",
    )
    parser.add_argument("--device", default="cpu", help="where to restore to (default: cpu)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=None,
        help="relative difference of losses that is let pass (default: 2e-6 on CPUs; more with GPUs)",
    )


def command_drill(args: argparse.Namespace) -> int:
    """`drill RUN`: one drill, or one after the other."""
    run = find_run(args.run, args.storage)
    if args.every_s < 0 or (args.every_s and args.step):
        raise ConfigError(
            "--every-s: a time of more than 0 s, without --step: it drills the newest checkpoint each time"
        )
    # torch takes seconds: after the checks
    from ray_ckpt.data.index import DataError
    from ray_ckpt.drill import drill
    from ray_ckpt.drill.job import load_job
    from ray_ckpt.drill.schedule import drill_every, end_in_order

    end_in_order()

    def tell(result: DrillResult) -> None:
        print_result(result, as_json=args.json)

    try:
        config, train = load_job(args.job)(run, shlex.split(args.options))
        if config.run_dir.resolve() != run.resolve():
            raise ConfigError(
                f"--job {args.job}: it gave the options of {config.run_dir}, not of {run}"
            )
        device, tolerance = args.device, args.tolerance
        if args.every_s:
            good = drill_every(
                config, train, args.every_s, tell, device=device, tolerance=tolerance
            )
            return 0 if good else 1
        result = drill(config, train, step=args.step, device=device, tolerance=tolerance)
    except DataError as error:
        raise ConfigError(f"--data: {error}") from error
    assert result is not None
    tell(result)
    if not result.drilled.ok and args.job == MAIN_JOB:
        note(
            f"The model is that of the main job (--job {MAIN_JOB}): if the run has a training function of its own, "
            "name the file that makes its model by --job FILE.py"
        )
    return 0 if result.drilled.ok else 1


def print_result(result: DrillResult, *, as_json: bool) -> None:
    """One outcome: a line and what there is to say, or a line of JSON."""
    drilled = result.drilled
    if as_json:
        named = {"name": result.name, "step": result.step, "generation": result.generation}
        print(json.dumps({**named, **drilled.to_json()}), flush=True)
        return
    print(printable(f"{result.name}  {drilled.words}"))
    if drilled.load_s:
        speed = human_bytes(int(drilled.bytes_per_s or 0))
        print(
            f"  {human_bytes(drilled.bytes)}: verified in {drilled.verify_s:.2f} s, loaded in {drilled.load_s:.2f} s, "
            f"{speed}/s on {drilled.device} of {printable(drilled.host)}"
        )
    for line in (*drilled.problems, *drilled.notes):
        print(printable(f"  {line}"))
    print(end="", flush=True)
