"""Policies of saving against each other, in one or several settings that meet the same failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ray_ckpt.policy.belief import ScalePrior
from ray_ckpt.policy.contenders import (
    Clairvoyant,
    EverySteps,
    Fixed,
    Online,
    Policy,
    young_fixed,
)
from ray_ckpt.policy.draws import Draw, Failures
from ray_ckpt.policy.limits import IntervalLimits
from ray_ckpt.policy.replay import Totals, replay
from ray_ckpt.policy.setting import Floats, Setting
from ray_ckpt.policy.tiers import plan_intervals
from ray_ckpt.policy.words import DAY_S, seconds

KNOWS, LEARNS = "knows the rate", "learns (this project)"
PARTS = ("save", "rework", "restart", "wait", "fewer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A setting with its names.

    Attributes:
        tiers: as text, fastest first.
        job: what it does when a node is lost.
        setting: all else.
    """

    tiers: str
    job: str
    setting: Setting

    @property
    def name(self) -> str:
        """For a title."""
        return f"{self.tiers}; {self.job}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Who plays, and for how long.

    Attributes:
        believed_mtbf_s: by those who have seen no failure yet.
        naive_s: interval of the habit, seconds.
        every_steps: steps of another habit; 0 is none.
        runs: how many of each.
        wall_s: length of each, seconds.
        seed: of the failures.
        draw: from a generator, of the times between failures.
    """

    believed_mtbf_s: float
    naive_s: float
    every_steps: int = 0
    runs: int
    wall_s: float
    seed: int
    draw: Callable[[np.random.Generator], Draw]

    def failures(self, setting: Setting) -> Failures:
        """The same for each setting that has the same shares."""
        gaps, kinds = np.random.default_rng(self.seed).spawn(2)
        return Failures(self.draw(gaps), setting.shares, runs=self.runs, rng=kinds)

    def policies(self, setting: Setting) -> dict[str, Policy]:
        """All who play, the one who knows the truth first."""
        limits = limits_of(setting)
        prior = ScalePrior(job_mtbf_s=self.believed_mtbf_s)
        found: dict[str, Policy] = {
            KNOWS: Clairvoyant(setting, limits),
            LEARNS: Online(setting, prior, limits),
            f"Young, for {seconds(self.believed_mtbf_s)}": young_fixed(
                setting, self.believed_mtbf_s
            ),
            f"every {seconds(self.naive_s)}": Fixed(setting, self.naive_s),
        }
        if self.every_steps:
            found[f"every {self.every_steps} steps"] = EverySteps(setting, self.every_steps)
        return found

    def play(self, scene: Scene, at_s: Sequence[float] = ()) -> dict[str, Totals]:
        """What became of each policy's runs."""
        failures = self.failures(scene.setting)
        return {
            name: replay(
                policy,
                scene.setting,
                failures,
                runs=self.runs,
                wall_s=self.wall_s,
                at_s=at_s,
            )
            for name, policy in self.policies(scene.setting).items()
        }

    def curve(self, scene: Scene, intervals_s: Sequence[float], runs: int) -> list[float]:
        """The waste with each of these intervals of the fastest tier, and the best ones of the others."""
        few = replace(self, runs=min(runs, self.runs))
        failures = few.failures(scene.setting)
        return [
            wasted(
                replay(
                    _Held(scene.setting, interval_s),
                    scene.setting,
                    failures,
                    runs=few.runs,
                    wall_s=self.wall_s,
                )
            )["total"]
            for interval_s in intervals_s
        ]


class _Held(Fixed):
    """A fixed interval of the fastest tier; those of slower ones are planned for the true rates."""

    def __init__(self, setting: Setting, interval_s: float) -> None:
        workers = setting.fleet.workers
        limits, steps = limits_of(setting), max(1, round(interval_s / setting.step_s))
        plan = plan_intervals(
            setting.costs(setting.true_rates(workers), workers),
            setting.step_s,
            [replace(limits, fixed_steps=steps), *[limits] * (len(setting.tiers) - 1)],
        ).every_steps
        super().__init__(setting, steps * setting.step_s, [each // steps for each in plan])


def limits_of(setting: Setting) -> IntervalLimits:
    """From a step to a day."""
    step_s = setting.step_s
    return IntervalLimits(min_s=step_s, max_s=max(DAY_S, 2 * step_s))


def wasted(totals: Totals) -> dict[str, float]:
    """Seconds lost for each useful one, all runs together, by part."""
    useful_s = float(totals.useful_s.sum())
    parts = {
        part: float(getattr(totals, f"{part}_s").sum()) / useful_s if useful_s else float("inf")
        for part in PARTS
    }
    return {**parts, "total": sum(parts.values())}


def band(values: Floats) -> tuple[Floats, Floats]:
    """Where 8 of 10 runs are: [times, runs] to two of [times]."""
    low, high = np.quantile(values, [0.1, 0.9], axis=1)
    return low, high
