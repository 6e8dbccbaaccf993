"""What the options of `ray-ckpt simulate` mean: the settings that are played, and the failures that they meet."""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ray_ckpt.commands.plan import times
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy import draws
from ray_ckpt.policy.belief import JOB_MTBF_S
from ray_ckpt.policy.failures import PRIOR_SHARES
from ray_ckpt.policy.scenes import Contest, Scene
from ray_ckpt.policy.setting import Fleet, Setting, table_of_restarts
from ray_ckpt.policy.tiers import TierCost
from ray_ckpt.policy.words import DAY_S
from ray_ckpt.tiers.stack import TIER_NAMES, Stack, tier_rates

EXAMPLE = "ray-ckpt simulate --mtbf 3h --stall 30s --restart 5m --workers 1024"
# Llama 3 405B (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs.
LLAMA3_MTBF_S, LLAMA3_WORKERS, LLAMA3_DAYS = 54 * DAY_S / 419, 16_384, 54.0
# Words for what a job does when a node is lost.
REPLACED, WAITS, ELASTIC = "lost nodes are replaced at once", "waits for lost nodes", "elastic"
_TABLE = "restart_cost_by_scale.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What was asked for.

    Attributes:
        scenes: what is played; the one that was asked for first, then what it is compared with.
        contest: who plays, and for how long.
        about: the same as numbers, for scripts.
    """

    scenes: list[Scene]
    contest: Contest
    about: dict[str, Any]


def asked(args: argparse.Namespace) -> Asked:
    """From the options.

    Raises:
        ConfigError: options that make no sense.
        ValueError: as above, from what takes them.
    """
    if args.runs < 1 or (args.days is not None and not args.days > 0):
        raise ConfigError("--runs must be at least 1, --days more than 0")
    if args.weibull is not None and not args.weibull > 0:
        raise ConfigError(f"--weibull {args.weibull}: the shape must be more than 0")
    if args.every_steps < 0:
        raise ConfigError(f"--every-steps {args.every_steps}: must be 0 (nobody) or more")
    workers = args.workers or (LLAMA3_WORKERS if args.llama3 else 64)
    failing = _failing(args, workers)
    base = Setting(
        tiers=(TierCost(name="durable", stall_s=0.0),),
        step_s=one("--step", args.step, more_than_0=True),
        mtbf_s=failing.mtbf_s,
        job_share=failing.job_share,
        shares=_shares(args.shares),
    )
    fleets = _fleets(args, workers)
    scenes = [
        Scene(
            tiers=" + ".join(tier.name for tier in tiers.tiers),
            job=job,
            setting=replace(tiers, fleet=fleet),
        )
        for tiers in _tierings(args, base)
        for job, fleet in fleets.items()
    ]
    days = args.days or (LLAMA3_DAYS if args.llama3 else 14.0)
    contest = Contest(
        believed_mtbf_s=one(
            "--believed-mtbf", args.believed_mtbf or f"{JOB_MTBF_S:g}", more_than_0=True
        ),
        naive_s=one("--naive", args.naive, more_than_0=True),
        every_steps=args.every_steps,
        runs=args.runs,
        wall_s=days * DAY_S,
        seed=args.seed,
        draw=failing.draw,
    )
    about = {
        "runs": args.runs,
        "days": days,
        "mtbf_s": failing.mtbf_s,
        "workers": workers,
        "failures": failing.words,
        "job_share": failing.job_share,
        "restart_s": scenes[0].setting.restart_s(len(scenes[0].setting.tiers) - 1, workers),
    }
    return Asked(scenes=scenes, contest=contest, about=about)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failing:
    """How the whole job fails, and words for it."""

    mtbf_s: float
    job_share: float
    draw: Any
    words: str


def _failing(args: argparse.Namespace, workers: int) -> _Failing:
    given = [args.mtbf is not None, args.llama3, args.trace is not None]
    if sum(given) != 1:
        raise ConfigError(f"give one of --mtbf, --llama3 and --trace. For example: {EXAMPLE}")
    if not 0 <= args.job_share <= 1:
        raise ConfigError(f"--job-share {args.job_share}: is a share, 0 to 1")
    gaps_s = None if args.trace is None else np.array(_trace(Path(args.trace)))
    if gaps_s is not None:
        seen_s = float(gaps_s.mean())
    else:
        seen_s = LLAMA3_MTBF_S if args.llama3 else one("--mtbf", args.mtbf, more_than_0=True)
    seen_at = args.mtbf_workers or (LLAMA3_WORKERS if args.llama3 else workers)
    if seen_at < 1:
        raise ConfigError(f"--mtbf-workers {seen_at}: must be 1 or more")
    grown = args.job_share + (1 - args.job_share) * workers / seen_at
    if not grown > 0:
        raise ConfigError("--job-share 0 with 0 workers never fails: give --workers of 1 or more")
    mtbf_s = seen_s / grown
    if gaps_s is not None:
        draw, words = (lambda rng: draws.trace(gaps_s / grown, rng)), "as they were seen"
    elif args.weibull is not None:
        draw = lambda rng: draws.weibull(mtbf_s, args.weibull, rng)  # noqa: E731
        words = f"Weibull, shape {args.weibull:g}"
    else:
        draw, words = (lambda rng: draws.exponential(mtbf_s, rng)), "memoryless"
    return _Failing(mtbf_s=mtbf_s, job_share=args.job_share / grown, draw=draw, words=words)


def _fleets(args: argparse.Namespace, workers: int) -> dict[str, Fleet]:
    each = args.workers_per_node
    if each < 1 or workers < each or workers % each:
        raise ConfigError(
            f"--workers-per-node {each}: {workers} workers are no whole number of such nodes"
        )
    if args.spares < 0 or args.least_workers < 0:
        raise ConfigError("--spares and --least-workers must be 0 or more")
    away = args.elastic or args.spares
    repair_s = one("--repair", args.repair or ("2h" if away else "0"))
    if away and not repair_s:
        raise ConfigError(
            "--repair 0: lost nodes are back at once, so there is nothing that --elastic or --spares could do"
        )
    fleet = Fleet(
        nodes=workers // each, workers_per_node=each, spares=args.spares, repair_s=repair_s
    )
    if not repair_s:
        return {REPLACED: fleet}
    spares = f" beyond {args.spares} spares" if args.spares else ""
    found = {f"{WAITS}{spares}": fleet}
    if args.elastic:
        least = max(1, -(-args.least_workers // each))
        elastic = replace(fleet, elastic=True, least_nodes=least)
        found = {f"{ELASTIC}{spares}": elastic, **found}
    return found


def _tierings(args: argparse.Namespace, base: Setting) -> list[Setting]:
    """The tiers that were asked for, and the durable one alone beside them."""
    table = _restarts(args)
    specs = [_tier(text) for text in args.tiers]
    names = [name for name, _ in specs]
    if names != [name for name in TIER_NAMES if name in names] or names[-1] != "durable":
        raise ConfigError(
            f"--tiers {' '.join(names)}: name each tier once, the fastest first ({' '.join(TIER_NAMES)}), and durable "
            "as the last"
        )
    stack = Stack(
        use=tuple(names),  # type: ignore[arg-type]
        local_folder="/local" if "local" in names else "",
        replicas=args.replicas,
    )
    stacks = [(specs, stack)] + ([(specs[-1:], Stack())] if len(specs) > 1 else [])
    return [_tiering(args, base, given, used, table) for given, used in stacks]


def _tiering(
    args: argparse.Namespace,
    base: Setting,
    specs: list[tuple[str, dict[str, float]]],
    stack: Stack,
    table: tuple[tuple[int, float], ...],
) -> Setting:
    general = {"upload": one("--upload", args.upload)}
    stall_s = one("--stall", args.stall, more_than_0=True)
    tiers, restarts = [], []
    for place, (name, own) in enumerate(specs):
        tiers.append(
            TierCost(
                name=name,
                # Slower tiers take their copies from the fastest.
                stall_s=0.0 if place else own.get("stall", stall_s),
                upload_s=own.get("upload", general["upload"]),
            )
        )
        restarts.append(((1, own["restart"]),) if "restart" in own else table)
    kinds = {*PRIOR_SHARES, *base.shares}
    outlives = {kind: tier_rates({kind: 1.0}, stack) for kind in kinds}
    needs = {kind: list(rates.values()).index(1.0) for kind, rates in outlives.items()}
    return replace(base, tiers=tuple(tiers), needs=needs, restarts=tuple(restarts))


def _tier(text: str) -> tuple[str, dict[str, float]]:
    """A tier and its own times, from name:stall=2s,upload=10s,restart=1m."""
    name, _, rest = text.partition(":")
    own = {}
    for part in rest.split(",") if rest else []:
        what, _, value = part.partition("=")
        if what not in ("stall", "upload", "restart"):
            raise ConfigError(
                f"--tiers {text}: {part!r} is none of stall=TIME, upload=TIME and restart=TIME"
            )
        own[what] = one(f"--tiers {name}:{what}", value)
    return name, own


def _shares(text: str) -> dict[str, float]:
    """Shares of the failures by kind, from kind=share,kind=share."""
    if not text:
        return dict(PRIOR_SHARES)
    found: dict[str, float] = {}
    for part in text.split(","):
        kind, _, value = part.partition("=")
        if kind not in PRIOR_SHARES:
            raise ConfigError(f"--shares {kind!r}: a kind is one of {', '.join(PRIOR_SHARES)}")
        try:
            found[kind] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"--shares {part!r}: give kind=share, such as node_loss=0.2"
            ) from error
    if min(found.values()) < 0 or not sum(found.values()) > 0:
        raise ConfigError(f"--shares {text}: must be 0 or more, and not all 0")
    whole = sum(found.values())
    return {kind: share / whole for kind, share in found.items()}


def _restarts(args: argparse.Namespace) -> tuple[tuple[int, float], ...]:
    """Workers and seconds of restarts."""
    if (args.restart is None) == (args.restart_by_scale is None):
        raise ConfigError(
            "give one of --restart TIME, --restart table (published times by scale) and --restart-by-scale FILE"
        )
    if args.restart is not None and args.restart != "table":
        return ((1, one("--restart", args.restart)),)
    if args.restart is not None:
        text, source = resources.files("ray_ckpt.policy").joinpath(_TABLE).read_text(), _TABLE
    else:
        source = f"--restart-by-scale {args.restart_by_scale}"
        try:
            text = Path(args.restart_by_scale).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read ({error})") from error
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    try:
        return table_of_restarts(list(rows))
    except ValueError as error:
        raise ConfigError(
            f"{source}: must be a CSV file with the columns gpus and recovery_s: {error}"
        ) from error


def one(option: str, text: str, *, more_than_0: bool = False) -> float:
    """The time of an option, seconds."""
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
