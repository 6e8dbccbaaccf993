"""`ray-ckpt simulate`: what policies of saving cost over weeks of failures, with the code that decides in a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_ckpt.checkpoint.storing import without_nonfinite
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.policy.words import percent, seconds
from ray_ckpt.view.tables import Column, render_table

if TYPE_CHECKING:  # numpy takes a moment: after the options were looked at
    from ray_ckpt.policy.replay import Totals
    from ray_ckpt.policy.scenes import Scene

_EXAMPLE = "ray-ckpt simulate --mtbf 3h --stall 30s --restart 5m --workers 1024"
_TITLES = {
    "save": "SAVE",
    "rework": "+ REWORK",
    "restart": "+ RESTART",
    "wait": "+ WAITING",
    "fewer": "+ FEWER",
    "total": "= WASTE",
}


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
    add("--mtbf-workers", type=int, metavar="N", help="that these are for (default: --workers)")
    add(
        "--job-share",
        type=float,
        default=56 / 419,
        metavar="SHARE",
        help="of these failures, that come with the job whatever its size (default: 0.134, as Llama 3 had them)",
    )
    add("--stall", required=True, metavar="TIME", help="of one save")
    add("--restart", metavar="TIME", help="failure to first new step; table: as published by scale")
    add("--restart-by-scale", metavar="FILE", help="instead: CSV with columns gpus, recovery_s")
    add("--upload", default="0", metavar="TIME", help="end of a stall to a usable checkpoint")
    add("--step", default="1s", metavar="TIME", help="time of a step (default: 1s)")
    add("--workers", type=int, default=None, metavar="N", help="default: 64")
    _add_machines(command)
    add(
        "--believed-mtbf",
        metavar="TIME",
        help="before any failure is seen (default: that of a run)",
    )
    add("--naive", default="60m", metavar="TIME", help="interval to compare with (default: 60m)")
    add("--every-steps", type=int, default=0, metavar="N", help="another one, in steps")
    add("--days", type=float, default=None, metavar="D", help="length of a run (default: 14)")
    add("--runs", type=int, default=200, metavar="N", help="how many (default: 200)")
    add("--seed", type=int, default=0, metavar="N", help="of the failures (default: 0)")
    add("--html", metavar="FILE", help="write curves into one file that needs nothing else")
    add("--json", action="store_true", help="print JSON for scripts")


def _add_machines(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--tiers",
        nargs="+",
        default=["durable"],
        metavar="TIER",
        help="fastest first, each with times of its own if it has some: memory:stall=2s,upload=10s,restart=1m durable",
    )
    add("--replicas", type=int, default=1, metavar="N", help="copies in memory on other nodes")
    add("--shares", default="", metavar="KIND=SHARE,...", help="of failures (default: as Llama 3)")
    add("--elastic", action="store_true", help="go on with fewer workers while a node is away")
    add("--repair", metavar="TIME", help="until a lost node is back (default: 2h with --elastic)")
    add("--spares", type=int, default=0, metavar="N", help="nodes that stand by (default: 0)")
    add("--workers-per-node", type=int, default=1, metavar="N", help="lost together (default: 1)")
    add("--least-workers", type=int, default=0, metavar="N", help="of an elastic job (default: 1)")


def command_simulate(args: argparse.Namespace) -> int:
    """`simulate`: a line for each policy; all of them meet the same failures."""
    try:
        rows, about, page = simulated(args)
    except ValueError as error:
        raise ConfigError(f"{error}. For example: {_EXAMPLE}") from error
    if args.html:
        try:
            Path(args.html).write_text(page, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{args.html} cannot be written ({error.strerror})") from error
    if args.json:
        # A policy that gets nowhere wastes more than any number.
        print(json.dumps(without_nonfinite({**about, "policies": rows}), indent=2, allow_nan=False))
        return 0
    print(simulation_text(rows, about))
    if args.html:
        print(f"\n{args.html}: the same as curves")
    return 0


def simulated(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """What each policy wastes, what they all met, and a page of curves if one was asked for.

    Raises:
        ConfigError: options that make no sense.
        ValueError: as above, from what takes them.
    """
    from ray_ckpt.commands.simulate_options import asked
    from ray_ckpt.view.simulation import simulation_page, times_of

    found = asked(args)
    at_s = times_of(found.contest) if args.html else []
    played = [(scene, found.contest.play(scene, at_s)) for scene in found.scenes]
    rows = [row for scene, totals in played for row in rows_of(scene, totals)]
    first = next(iter(played[0][1].values()))
    about = {**found.about, "failures_per_run": float(first.failures.mean())}
    page = simulation_page(found.contest, played, rows, about) if args.html else ""
    return rows, about, page


def rows_of(scene: Scene, found: dict[str, Totals]) -> list[dict[str, Any]]:
    """A row for each policy; the first is the one that knows the truth."""
    import numpy as np

    from ray_ckpt.policy.scenes import wasted

    best = wasted(next(iter(found.values())))["total"]
    rows = []
    for name, totals in found.items():
        waste = wasted(totals)
        intervals_s = [float(each) for each in np.median(totals.last_interval_s, axis=1)]
        rows.append(
            {
                "policy": name,
                "tiers": scene.tiers,
                "job": scene.job,
                "interval_s": intervals_s[0],
                "intervals_s": intervals_s,
                "waste": waste,
                "goodput": float(totals.useful_s.sum() / totals.wall_s.sum()),
                "regret": waste["total"] / best - 1 if best else 0.0,
            }
        )
    return rows


def simulation_text(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """A table for each setting."""
    lines = [
        f"{about['runs']} runs of {about['days']:g} days with {about['workers']} workers, failures every "
        f"{seconds(about['mtbf_s'])} ({about['failures']}), {about['failures_per_run']:.0f} a run, restart "
        f"{seconds(about['restart_s'])}"
    ]
    scenes = list(dict.fromkeys((row["tiers"], row["job"]) for row in rows))
    parts = [name for name in _TITLES if any(row["waste"][name] for row in rows)]
    columns = [Column("POLICY"), Column("INTERVAL", "right")]
    columns += [Column(_TITLES[name], "right") for name in parts]
    columns += [Column("GOODPUT", "right"), Column("OVER THE BEST", "right")]
    for tiers, job in scenes:
        cells = [
            [
                row["policy"],
                " / ".join(seconds(each) for each in row["intervals_s"]),
                *(percent(row["waste"][part]) for part in parts),
                f"{100 * row['goodput']:.2f} %",
                percent(row["regret"]),
            ]
            for row in rows
            if (row["tiers"], row["job"]) == (tiers, job)
        ]
        title = f"{tiers}; {job}:\n" if len(scenes) > 1 or "wait" in parts else ""
        lines += ["", title + render_table(columns, cells)]
    lines += [
        "",
        "Waste: seconds lost for each useful one, all runs together. Interval: at the end of a run, median. Over the "
        "best: of\nits waste, against the interval that somebody would choose who knew the true rate.",
    ]
    if len(scenes) > 1 or "wait" in parts:
        lines.append(
            "Goodput: useful work in seconds of the whole job, over wall time. Waiting: for nodes. Fewer: what steps "
            "took\nlonger with fewer workers."
        )
    return "\n".join(lines)
