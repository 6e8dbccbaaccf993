"""Bringing a training state to where its run is, from the newest checkpoint that is whole."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.checkpoint.restore import NotBroughtError, load, verify_together
from ray_ckpt.config import Config
from ray_ckpt.errors import RestoreError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.gathering import Gathering
from ray_ckpt.initial import check_unchanged
from ray_ckpt.segment import Segment
from ray_ckpt.skips import Skip
from ray_ckpt.state import rng
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.state.weights import load_weights
from ray_ckpt.tracker.core import Attempt, RestorePlan
from ray_ckpt.tracker.talk import Talk

logger = logging.getLogger(__name__)


def resume(
    state: TrainState,
    config: Config,
    talk: Talk,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    nodes: list[str],
    node: str,
    first_micro_batch: int,
) -> Attempt:
    """Begins an attempt and restores what the tracker says; every rank calls it.

    Every rank verifies its share of the checkpoint's bytes first. A checkpoint that fails is set aside by the
    tracker, and the next older one is taken.

    Args:
        state: changed in place.
        config: of the run.
        talk: to the tracker.
        group: gloo process group of all ranks.
        device: of this rank.
        nodes: on rank 0, node of each rank.
        node: of this rank.
        first_micro_batch: of this rank; names its random numbers when there are none to restore.

    Returns:
        The attempt, and the segment that it trains in.

    Raises:
        RestoreError: no checkpoint can be used although there are some, or they do not fit the state.
    """
    attempt: Attempt = talk.ask("begin_attempt", world_size=dist.get_world_size(), nodes=nodes)
    started = time.monotonic()
    plan, not_brought = attempt.plan, ""
    while plan is not None:
        if plan.sources:
            gathering = Gathering(plan, attempt, config, group=group, node=node)
            folder, problem = gathering.folder, ""
            try:
                exact = gathering.load(state, device)
            except NotBroughtError as error:
                problem = str(error)
            bad, damaged = gathering.found_bad()
            if bad:
                talk.ask("bad_copies", generation=attempt.generation, name=plan.name, bad=bad)
            if problem:
                not_brought = f"{plan.name} could not be taken from the nodes ({problem})"
                plan = talk.ask(
                    "not_gathered",
                    generation=attempt.generation,
                    name=plan.name,
                    problem=problem,
                    damaged=damaged,
                )
                continue
        else:
            folder = config.run_dir / CHECKPOINTS_DIR / plan.name
            fault_point("restore.verify")
            faults = verify_together(folder, plan.manifest, group)
            if faults:
                plan = talk.ask(
                    "reject", generation=attempt.generation, name=plan.name, faults=faults
                )
                continue
            fault_point("restore.verified")
            exact = load(state, folder, plan.manifest, group, device, config.saving.allow_missing)
        if not exact:
            rng.seed_all(config.seed, state.progress.step, first_micro_batch)
        _check_progress(state, plan, folder)
        break
    if plan is None:
        if not_brought:
            raise RestoreError(
                f"{not_brought}. There is no other checkpoint, and a run that has one never starts from zero by "
                "itself: the next attempt asks the nodes again."
            )
        if config.init_from:
            _load_initial(state, config)
        rng.seed_all(config.seed, 0, first_micro_batch)
    # First the segment, then the mark that the attempt has begun: what begins knows which samples are next.
    segment = talk.ask(
        "segment_at",
        generation=attempt.generation,
        step=state.progress.step,
        samples=state.progress.samples,
        mark=dict(plan.manifest.segment) if plan else None,
        source=plan.name if plan else "",
    )
    fault_point("restore.loaded")
    talk.ask(
        "restored",
        generation=attempt.generation,
        step=state.progress.step,
        seconds=time.monotonic() - started,
        source=plan.name if plan else "",
        reason=plan.reason if plan else _beginning(config),
        worker_monotonic=time.monotonic(),
    )
    return replace(attempt, segment=segment, skips=_skips(attempt, plan, segment))


def _skips(attempt: Attempt, plan: RestorePlan | None, segment: Segment) -> tuple[Skip, ...]:
    """Holes in the order of the segment: those of one before are not its own."""
    if plan is None:
        return attempt.skips
    if segment.number != plan.manifest.segment["number"]:
        return ()
    # A journal that was lost takes its holes with it; the checkpoint knows them too.
    return attempt.skips or plan.manifest.skipped


def _beginning(config: Config) -> str:
    return "no checkpoint yet" + (f", weights of {config.init_from}" if config.init_from else "")


def _load_initial(state: TrainState, config: Config) -> None:
    """Weights of ``--init-from``; averaged weights begin with them too."""
    check_unchanged(config)
    prefix = (
        "model."  # as the names of a checkpoint have it, whose rules --saving.allow-missing states
    )
    allowed = [name.removeprefix(prefix) for name in config.saving.allow_missing]
    load_weights(state.model, config.init_from, allowed)
    if isinstance(state.ema, torch.nn.Module):
        load_weights(state.ema, config.init_from, [*allowed, "n_averaged"])
    elif state.ema is not None:
        logger.warning("--init-from does not change the averaged weights: they are no module")


def _check_progress(state: TrainState, plan: RestorePlan, folder: Path) -> None:
    """The state in a checkpoint must be the one that its manifest speaks of."""
    found = (state.progress.step, state.progress.samples)
    if found != (plan.manifest.step, plan.manifest.sample_offset):
        raise RestoreError(
            f"{folder}: the manifest is of step {plan.manifest.step}, the state in it of step {found[0]}. Set the "
            "folder aside and start again: an older one will be used."
        )
