"""`ray-ckpt simulate`: what policies of saving cost over weeks of failures, with the code that decides in a run."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ckpt.errors import ConfigError
from ray_ckpt.plan_command import times
from ray_ckpt.policy.words import DAY_S, percent, seconds
from ray_ckpt.view.tables import Column, render_table

if TYPE_CHECKING:  # numpy takes a moment: after the options were looked at
    from ray_ckpt.policy.replay import Draw, Policy, Totals

_EXAMPLE = "ray-ckpt simulate --mtbf 3h --stall 30s --restart 5m --workers 1024"
# Llama 3 405B (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs.
LLAMA3 = {"mtbf_s": 54 * DAY_S / 419, "workers": 16_384, "days": 54.0}


def add_command(commands: Any, layout: dict[str, Any]) -> None:
    """Adds the command, which is about no run.

    Args:
        commands: of the command line.
        layout: of its help.
    """
    text = "Play policies of saving through weeks of random failures, and compare what they waste."
    command = commands.add_parser("simulate", help=text, description=f"{text} {_EXAMPLE}", **layout)
    command.set_defaults(command=command_simulate)
    add = command.add_argument
    add("--mtbf", metavar="TIME", help="true mean time between failures of the whole job")
    add("--llama3", action="store_true", help="failures as Llama 3 405B had them, for 54 days")
    add("--trace", metavar="FILE", help="CSV with a column gap_s: failures as they were seen")
    add("--weibull", type=float, metavar="SHAPE", help="failures in bursts (shape below 1)")
    add("--stall", required=True, metavar="TIME", help="of one save")
    add("--restart", required=True, metavar="TIME", help="from a failure to the first new step")
    add("--upload", default="0", metavar="TIME", help="end of a stall to a usable checkpoint")
    add("--step", default="1s", metavar="TIME", help="time of a step (default: 1s)")
    add("--workers", type=int, default=None, metavar="N", help="default: 64")
    add("--believed-mtbf", metavar="TIME", help="before any failure is seen (default: 1d)")
    add("--naive", default="60m", metavar="TIME", help="interval to compare with (default: 60m)")
    add("--days", type=float, default=None, metavar="D", help="length of a run (default: 14)")
    add("--runs", type=int, default=200, metavar="N", help="how many (default: 200)")
    add("--seed", type=int, default=0, metavar="N", help="of the failures (default: 0)")
    add("--json", action="store_true", help="print JSON for scripts")


def command_simulate(args: argparse.Namespace) -> int:
    """`simulate`: a line for each policy; all of them meet the same failures."""
    try:
        rows, about = simulated(args)
    except ValueError as error:
        raise ConfigError(f"{error}. For example: {_EXAMPLE}") from error
    if args.json:
        print(json.dumps({**about, "policies": rows}, indent=2))
        return 0
    columns = [Column("POLICY"), Column("INTERVAL", "right"), Column("SAVE", "right")]
    columns += [
        Column(name, "right") for name in ("+ REWORK", "+ RESTART", "= WASTE", "OVER THE BEST")
    ]
    cells = [
        [
            row["policy"],
            seconds(row["interval_s"]),
            *(percent(row["waste"][part]) for part in ("save", "rework", "restart", "total")),
            percent(row["regret"]),
        ]
        for row in rows
    ]
    print(
        f"{about['runs']} runs of {about['days']:g} days, failures every {seconds(about['mtbf_s'])} "
        f"({about['failures']}), {about['failures_per_run']:.0f} a run\n"
    )
    print(render_table(columns, cells))
    print(
        "\nWaste: seconds lost for each useful one, all runs together. Interval: at the end of a run, median. Over the "
        "best: of\nits waste, against the interval that somebody would choose who knew the true rate."
    )
    return 0


def simulated(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each policy wastes, and what they all met.

    Raises:
        ConfigError: options that make no sense.
        ValueError: as above, from what takes them.
    """
    import numpy as np

    from ray_ckpt.policy import replay as play
    from ray_ckpt.policy.belief import ScalePrior
    from ray_ckpt.policy.limits import IntervalLimits

    if args.runs < 1 or (args.days is not None and not args.days > 0):
        raise ConfigError("--runs must be at least 1, --days more than 0")
    if args.weibull is not None and not args.weibull > 0:
        raise ConfigError(f"--weibull {args.weibull}: the shape must be more than 0")
    gaps = None if args.trace is None else np.array(_trace(Path(args.trace)))
    mtbf_s = _mtbf(args, None if gaps is None else float(gaps.mean()))
    workers = args.workers or (LLAMA3["workers"] if args.llama3 else 64)
    days = args.days or (LLAMA3["days"] if args.llama3 else 14.0)
    costs = play.Costs(
        stall_s=_one("--stall", args.stall, more_than_0=True),
        upload_s=_one("--upload", args.upload),
        restart_s=_one("--restart", args.restart),
        step_s=_one("--step", args.step, more_than_0=True),
    )
    limits = IntervalLimits(min_s=costs.step_s, max_s=max(DAY_S, 2 * costs.step_s))
    believed_s = _one("--believed-mtbf", args.believed_mtbf or "1d", more_than_0=True)
    naive_s = _one("--naive", args.naive, more_than_0=True)
    policies: dict[str, Policy] = {
        "knows the rate": play.clairvoyant(costs, mtbf_s, limits),
        "learns (this project)": play.Online(
            costs, ScalePrior(job_mtbf_s=believed_s), int(workers), limits
        ),
        f"Young, for {seconds(believed_s)}": play.young_fixed(costs, believed_s),
        f"every {seconds(naive_s)}": play.Fixed(naive_s),
    }

    def draw() -> Draw:
        rng = np.random.default_rng(args.seed)
        if gaps is not None:
            return play.trace(gaps, rng)
        if args.weibull is not None:
            return play.weibull(mtbf_s, args.weibull, rng)
        return play.exponential(mtbf_s, rng)

    found = {
        name: play.replay(policy, costs, draw(), runs=args.runs, wall_s=days * DAY_S)
        for name, policy in policies.items()
    }
    best = _waste(next(iter(found.values())))["total"]
    rows = [
        {
            "policy": name,
            "interval_s": float(np.median(totals.last_interval_s)),
            "waste": _waste(totals),
            "regret": _waste(totals)["total"] / best - 1 if best else 0.0,
        }
        for name, totals in found.items()
    ]
    kind = "as they were seen" if gaps is not None else "memoryless"
    about = {
        "runs": args.runs,
        "days": days,
        "mtbf_s": mtbf_s,
        "workers": int(workers),
        "failures": f"Weibull, shape {args.weibull:g}" if args.weibull is not None else kind,
        "failures_per_run": float(next(iter(found.values())).failures.mean()),
    }
    return rows, about


def _waste(totals: Totals) -> dict[str, float]:
    useful_s = float(totals.useful_s.sum())
    parts = {
        "save": float(totals.save_s.sum()) / useful_s,
        "rework": float(totals.rework_s.sum()) / useful_s,
        "restart": float(totals.restart_s.sum()) / useful_s,
    }
    return {**parts, "total": sum(parts.values())}


def _mtbf(args: argparse.Namespace, of_trace_s: float | None) -> float:
    given = [args.mtbf is not None, args.llama3, of_trace_s is not None]
    if sum(given) != 1:
        raise ConfigError(f"give one of --mtbf, --llama3 and --trace. For example: {_EXAMPLE}")
    if of_trace_s is not None:
        return of_trace_s
    return LLAMA3["mtbf_s"] if args.llama3 else _one("--mtbf", args.mtbf, more_than_0=True)


def _one(option: str, text: str, *, more_than_0: bool = False) -> float:
    (found,) = times(option, text, most=1)
    if more_than_0 and not found > 0:
        raise ConfigError(f"{option} {text}: must be more than 0")
    return found


def _trace(path: Path) -> list[float]:
    """Times between failures from a CSV file, seconds."""
    try:
        with path.open(newline="") as file:
            gaps = [float(row["gap_s"]) for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--trace {path}: must be a CSV file with a column gap_s, seconds between failures ({error!r})"
        ) from error
    if not gaps or min(gaps) < 0 or not sum(gaps) > 0:
        raise ConfigError(f"--trace {path}: gap_s must be 0 or more, and not all 0")
    return gaps
