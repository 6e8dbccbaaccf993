"""What the tracker is told when it starts, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_ckpt.checkpoint.guard import GuardRule
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.policy.belief import FAILURES_PER_1000_WORKER_DAYS, PRIOR_WEIGHT, ScalePrior, Seen
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.policy.loops import LoopRule
from ray_ckpt.policy.resize import ResizeRules
from ray_ckpt.policy.stragglers import StragglerRule
from ray_ckpt.segment import FIRST, Segment
from ray_ckpt.skips import Skip
from ray_ckpt.tiers.holder import Source
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stack import Stack

BUNDLE_S = 0.25  # rank 0 tells its steps in bundles; killed, it takes at most this much of steps.jsonl with it


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What every manifest of a run repeats.

    Attributes:
        run: name of the run.
        run_dir: its folder.
        config_fingerprint: of the options that decide the course of training.
        data_fingerprint: of the data.
        parallel: "ddp" or "fsdp".
        versions: of the libraries.
        identity: the options that decide the course of training, by name.
        change_reason: why those of a segment may be others than before; empty when they may not.
    """

    run: str
    run_dir: str
    config_fingerprint: str
    data_fingerprint: str
    parallel: str
    versions: dict[str, str]
    identity: Mapping[str, Any] = field(default_factory=dict)
    change_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """How the tracker decides.

    Attributes:
        limits: bounds of the interval.
        prior_mtbf_s: mean time between failures that come with the job, before any was seen, seconds.
        prior_per_1000_worker_days: failures that come with the workers, before any was seen.
        prior_weight: failures that each of the two is worth.
        history: exposure and failures from before the run.
        max_fruitless: attempts in a row without a new step before the run is stopped.
        retention: which checkpoints are kept; by default all.
        guard: what may be committed, and what to do when the run is no longer finite.
        stack: the tiers.
        tier_steps: a tier to a fixed number of steps between its copies; one that is not named is decided.
        loops: when the run does not simply go on after a failure.
        stragglers: when a node is one.
        drain_margin_s: how much sooner than the last moment a run saves and leaves a node that will be taken away.
        resize: when the run takes more workers.
    """

    limits: IntervalLimits
    prior_mtbf_s: float
    prior_per_1000_worker_days: float = FAILURES_PER_1000_WORKER_DAYS
    prior_weight: float = PRIOR_WEIGHT
    history: tuple[Seen, ...] = ()
    max_fruitless: int = 3
    retention: Rules = field(default_factory=Rules)
    guard: GuardRule = field(default_factory=GuardRule)
    stack: Stack = field(default_factory=Stack)
    tier_steps: Mapping[str, int] = field(default_factory=dict)
    loops: LoopRule = field(default_factory=LoopRule)
    stragglers: StragglerRule = field(default_factory=StragglerRule)
    drain_margin_s: float = 5.0
    resize: ResizeRules = field(default_factory=ResizeRules)

    def prior(self) -> ScalePrior:
        """How often the job fails, before any failure was seen."""
        return ScalePrior(
            job_mtbf_s=self.prior_mtbf_s,
            per_1000_worker_days=self.prior_per_1000_worker_days,
            weight=self.prior_weight,
        )


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """The one checkpoint that all ranks of an attempt restore.

    Attributes:
        name: its folder's name.
        manifest: its manifest.
        reason: why this one, in words.
        sources: file to where it can be taken from, fastest first; empty: all from the run's folder.
        holders: node to the name of the holder there, who takes them.
    """

    name: str
    manifest: Manifest
    reason: str
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    holders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a new worker group is told.

    Attributes:
        generation: of this attempt.
        plan: what to restore; None starts from the beginning.
        directive: how often to save.
        segment: that it trains in; known once it has restored.
        skips: holes in the run's order.
        signed: whether manifests are signed, which takes a SHA-256 of every file.
        holders: node to the name of the holder there; none without tiers on the nodes.
    """

    generation: int
    plan: RestorePlan | None
    directive: Directive
    segment: Segment = FIRST
    skips: tuple[Skip, ...] = ()
    signed: bool = False
    holders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Why the workers are to end the attempt, as somebody planned it, at the end of their step.

    Attributes:
        kind: "drain" or "preempted".
        cause: in words.
        saves: whether they save first; no when a save could not finish.
    """

    kind: str
    cause: str
    saves: bool


@dataclass(frozen=True, kw_only=True)
class Directive:
    """What rank 0 goes by until the next one.

    Attributes:
        every_steps: steps between saves.
        reason: why.
        save_request: number of the latest request for a save at the next step; grows.
        hold_s: how long the workers wait after that save, for what it was asked for; seconds.
        last_commit_step: step of the newest commit, None before the first.
        failed_in_a_row: failed saves since the last commit.
        durable_step: step of the newest checkpoint in the durable tier, None before the first.
        leave: why the attempt is to end; None when it is not.
    """

    every_steps: int
    reason: str
    save_request: int
    hold_s: float
    last_commit_step: int | None
    failed_in_a_row: int
    durable_step: int | None = None
    leave: Leave | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the run goes on after an interruption.

    Attributes:
        go_on: whether another attempt is worth it.
        reason: why.
        wait_s: how long to wait before another attempt, seconds.
    """

    go_on: bool
    reason: str
    wait_s: float = 0.0
