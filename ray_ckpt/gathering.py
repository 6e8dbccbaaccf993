"""Making a checkpoint's files readable on this node, from wherever its copies live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.config import Config
from ray_ckpt.errors import RayCkptError
from ray_ckpt.tiers.holder import Report
from ray_ckpt.tiers.ray_fleet import holder_by_name, take
from ray_ckpt.tracker.core import Attempt, RestorePlan
from ray_ckpt.tracker.talk import Talk


def gather(
    plan: RestorePlan,
    attempt: Attempt,
    config: Config,
    talk: Talk,
    *,
    group: dist.ProcessGroup,
    node: str,
) -> Path | str:
    """Every rank asks the holder of its node for the files; every rank calls this.

    The holder compares each byte with the manifest. Copies that are bad are told to the tracker, also when there was
    another one in their place.

    Returns:
        The folder on this node, when every rank has its files; else what is missing, in words, on every rank.
    """
    report = _ask_holder(plan, attempt.holders.get(node, ""), config.saving.timeout_s)
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    bad = [each for report in reports for each in report.bad]
    if bad:
        bad = list(dict.fromkeys(bad))
        talk.ask("bad_copies", generation=attempt.generation, name=plan.name, bad=bad)
    problems = [text for report in reports for text in report.problems.values()]
    if problems:
        return str(problems[0])
    stack = config.tiers.stack()
    return stack.root(stack.node_tiers[0], config.run_dir) / CHECKPOINTS_DIR / plan.name


def _ask_holder(plan: RestorePlan, holder: str, timeout_s: float) -> Report:
    try:
        actor = holder_by_name(holder)
        ticket = actor.provide.remote(manifest=plan.manifest, sources=plan.sources)
        done, report = take(ticket, timeout_s)
    except RayCkptError as error:
        return Report(problems={"": str(error)})
    return report if done else Report(problems={"": f"its holder took more than {timeout_s:g} s"})
