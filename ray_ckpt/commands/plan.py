"""`ray-ckpt plan`: which interval, and what it costs, for a cluster that is known by numbers alone."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from ray_ckpt.commands.output import print_json
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.interval import daly
from ray_ckpt.policy.plan import Costs, Plan, mtbf_of
from ray_ckpt.policy.words import percent, seconds
from ray_ckpt.view.tables import Column, render_table

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|m|h|d)?")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}

_EXAMPLE = "ray-ckpt plan --mtbf 186m --stall 15s,1m,5m --restart 10m,2m"


def add_command(commands: Any, layout: dict[str, Any]) -> None:
    """Adds the command, which is about no run.

    Args:
        commands: of the command line.
        layout: of its help.
    """
    text = "Compute the interval between saves and what it wastes, for numbers that you give."
    command = commands.add_parser("plan", help=text, description=f"{text} {_EXAMPLE}", **layout)
    command.set_defaults(command=command_plan)
    times = "a time such as 90, 15s, 1.5m, 2h or 1d; several with commas"
    command.add_argument(
        "--mtbf", metavar="TIME", help=f"mean time between failures of the whole job: {times}"
    )
    command.add_argument(
        "--workers", type=int, default=None, help="instead of --mtbf: how many workers"
    )
    command.add_argument(
        "--rate-per-1000-node-days",
        type=float,
        default=None,
        metavar="RATE",
        help="and how often each of them fails; count what fails as one as one worker",
    )
    command.add_argument("--stall", required=True, metavar="TIME", help=f"of one save: {times}")
    command.add_argument(
        "--restart", required=True, metavar="TIME", help=f"failure to first new step: {times}"
    )
    command.add_argument(
        "--upload", default="0", metavar="TIME", help="end of a stall to a usable checkpoint"
    )
    command.add_argument(
        "--naive", default="60m", metavar="TIME", help="interval to compare with (default: 60m)"
    )
    command.add_argument("--json", action="store_true", help="print JSON for scripts")


def command_plan(args: argparse.Namespace) -> int:
    """`plan`: a line for each combination."""
    found = plans(args)
    if args.json:
        print_json([plan.to_json() for plan in found])
    else:
        print(plan_text(found))
    return 0


def plans(args: argparse.Namespace) -> list[Plan]:
    """All combinations, in the order in which they were given.

    Raises:
        ConfigError: an option that is no time, or a combination that makes no sense.
    """
    by_rate = (args.workers, args.rate_per_1000_node_days)
    if (args.mtbf is None) == (by_rate == (None, None)) or (by_rate.count(None) == 1):
        raise ConfigError(
            "give either --mtbf, or --workers together with --rate-per-1000-node-days"
        )
    try:
        mtbfs = times("--mtbf", args.mtbf) if args.mtbf is not None else [mtbf_of(*by_rate)]
        grid = product(
            mtbfs,
            times("--upload", args.upload),
            times("--stall", args.stall),
            times("--restart", args.restart),
        )
        (naive_s,) = times("--naive", args.naive, most=1)
        return [
            Plan(
                costs=Costs(mtbf_s=mtbf, stall_s=stall, restart_s=restart, upload_s=upload),
                naive_s=naive_s,
            )
            for mtbf, upload, stall, restart in grid
        ]
    except ValueError as error:
        raise ConfigError(f"{error}. For example: {_EXAMPLE}") from error


def times(option: str, text: str, most: int = 0) -> list[float]:
    """Times of an option, seconds; at most so many, if a number is given.

    Raises:
        ConfigError: a part that is no time, or too many.
    """
    found = []
    for part in text.split(","):
        match = _DURATION.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{option} {text!r}: {part.strip()!r} is no time. Give a number and s, m, h or d, such as 15s"
            )
        found.append(float(match[1]) * _UNITS_S[match[2]])
    if most and len(found) > most:
        raise ConfigError(f"{option} {text!r}: give one time")
    return found


def plan_text(found: Sequence[Plan]) -> str:
    """The table, and what would help most."""
    several = len({plan.costs.mtbf_s for plan in found}) > 1
    uploads = any(plan.costs.upload_s for plan in found)
    titles = (
        [Column("MTBF", "right")] * several
        + [Column("STALL", "right"), Column("RESTART", "right")]
        + [Column("UPLOAD", "right")] * uploads
        + [Column(name, "right") for name in ("YOUNG", "DALY", "EXACT")]
        + [Column(name, "right") for name in ("SAVE", "+ REWORK", "+ RESTART", "= WASTE")]
        + [Column("GOODPUT", "right"), Column("NAIVE WASTE", "right"), Column("HALVE FIRST")]
    )
    rows = []
    for plan in found:
        costs, waste, halved = plan.costs, plan.waste, plan.halved()
        best = max(halved, key=lambda name: halved[name])
        rows.append(
            [
                *[seconds(costs.mtbf_s)] * several,
                seconds(costs.stall_s),
                seconds(costs.restart_s),
                *[seconds(costs.upload_s)] * uploads,
                seconds(costs.interval_s),
                seconds(daly(costs.stall_s, costs.mtbf_s)),
                seconds(plan.exact_s),
                *(percent(part) for part in (waste.save, waste.rework, waste.restart)),
                percent(waste.total) + " *" * plan.is_rough,
                percent(plan.goodput(plan.exact_s)),
                percent(plan.naive.total),
                f"{best} (-{percent(halved[best])})",
            ]
        )
    first = found[0]
    lines = [
        f"failures every {seconds(first.costs.mtbf_s)}; naive: a save every {seconds(first.naive_s)}"
        if not several
        else f"naive: a save every {seconds(first.naive_s)}",
        "",
        render_table(titles, rows),
        "",
        "Intervals are useful time between saves. Waste: seconds lost for each useful one at Young's interval, first "
        "order.",
        "Goodput: useful share of the wall time at the exact interval. Halve first: what saves most when it is half.",
    ]
    if any(plan.is_rough for plan in found):
        lines.append("* an interval of more than half an MTBF: the first order says too little.")
    return "\n".join(lines)
