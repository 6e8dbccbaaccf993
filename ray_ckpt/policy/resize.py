"""When a run takes more workers: at a good moment, where it is worth a restart.

A step takes as long as the worker with the most micro-batches, so that ``W`` workers need ``ceil(V / W)`` passes for a
global batch of ``V`` micro-batches. More workers that do not make that number smaller win nothing, and what they win
counts until the next failure: the restart after that takes them in anyway.

Fewer workers are never argued about: whoever takes them away does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Why = Literal[
    "grow",
    "shrink",
    "same",
    "starting",
    "leaving",
    "settling",
    "cooldown",
    "save_due",
    "gain",
    "cost",
    "end",
]

# A save that is due within this time is waited for, seconds; never longer than half an interval.
SOON_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRules:
    """What a run's options say about its size.

    Attributes:
        micro_batches: V, of a global batch.
        total_steps: of the run.
        sizes: numbers of workers that are preferred, growing; empty for any.
        min_gain: least that steps must become faster, as a share; 0 takes every worker that there is, unweighed.
        cooldown_s: least time from one growth to the next, seconds.
        settle_s: how long the cluster must have offered the same before, seconds.
    """

    micro_batches: int = 1 << 30
    total_steps: int = 1 << 62
    sizes: tuple[int, ...] = ()
    min_gain: float = 0.05
    cooldown_s: float = 60.0
    settle_s: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """How the run does just now.

    Attributes:
        workers: that it has.
        steps_left: until its end.
        step_s: typical time of a step; None while nothing is known.
        restart_s: expected time without a step at the new size, with what the first step takes longer; None when
            none was measured.
        mtbf_s: mean time between failures at the new size.
        save_due_s: until the next save, by the present interval; None when that is not known.
        interval_s: between saves.
        still_s: how long the cluster has offered the same.
        since_growth_s: since the run last grew; None when it has not.
        leaves: whether a node of the run will be taken away.
        begun: whether the workers train: a group that starts is not restarted before it has begun.
    """

    workers: int
    steps_left: int
    step_s: float | None
    restart_s: float | None
    mtbf_s: float
    save_due_s: float | None
    interval_s: float
    still_s: float
    since_growth_s: float | None
    leaves: bool = False
    begun: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Resizing:
    """Whether a run takes the workers that it could have.

    Attributes:
        workers: how many it is to have now.
        why: in one word, for those who count.
        reason: in words.
    """

    workers: int
    why: Why
    reason: str


def usable(possible: int, sizes: Sequence[int], micro_batches: int) -> int:
    """How many of the workers that the cluster has room for a run uses.

    The largest preferred number that fits, and where none does, all: a run that waits for a preferred size does not
    train. Never more than there are micro-batches.
    """
    fitting = [size for size in sizes if size <= possible]
    return max(0, min(max(fitting, default=possible), micro_batches))


def speedup(workers: int, more: int, micro_batches: int) -> float:
    """How many times faster steps are with another number of workers."""
    return -(-micro_batches // workers) / -(-micro_batches // more)


def decide_resize(possible: int, moment: Moment, rules: ResizeRules) -> Resizing:
    """Decides whether a run that trains takes more workers now.

    Args:
        possible: workers that the cluster has room for.
        moment: how it does.
        rules: what its options say.
    """

    def stay(why: Why, reason: str) -> Resizing:
        return Resizing(workers=moment.workers, why=why, reason=reason)

    now, target = moment.workers, usable(possible, rules.sizes, rules.micro_batches)
    if possible < now:
        return Resizing(
            workers=target, why="shrink", reason=f"there is room for {possible} workers only"
        )
    if target <= now:
        return stay(
            "same",
            f"{now} workers are as many as the run uses of the {possible} that it could have",
        )
    if not moment.begun:
        return stay("starting", f"{now} workers start, and there is room for {possible}")
    if moment.leaves:
        return stay(
            "leaving", "a node of the run will be taken away: the restart after that takes them in"
        )
    if moment.still_s < rules.settle_s:
        return stay(
            "settling",
            f"room for {target} workers since {moment.still_s:.1f} s: waits until nothing has changed for "
            f"{rules.settle_s:g} s, for one restart and not several",
        )
    if moment.since_growth_s is not None and moment.since_growth_s < rules.cooldown_s:
        return stay(
            "cooldown",
            f"the run grew {moment.since_growth_s:.0f} s ago: not again before --elastic.cooldown-s "
            f"{rules.cooldown_s:g}",
        )
    if rules.min_gain > 0 and (objection := _objection(target, moment, rules)) is not None:
        return objection
    due_s, soon_s = moment.save_due_s, min(SOON_S, moment.interval_s / 2)
    if due_s is not None and 0 < due_s <= soon_s:
        return stay("save_due", f"a save is due in {due_s:.1f} s: right after it")
    faster = speedup(now, target, rules.micro_batches)
    return Resizing(
        workers=target,
        why="grow",
        reason=f"{target} workers make steps {faster:.2f} times as fast as {now}",
    )


def _objection(target: int, moment: Moment, rules: ResizeRules) -> Resizing | None:
    """Why more workers are not worth a restart; None when they are, or nothing is measured."""
    now, faster = moment.workers, speedup(moment.workers, target, rules.micro_batches)

    def stay(why: Why, reason: str) -> Resizing:
        return Resizing(workers=now, why=why, reason=reason)

    if faster - 1 < rules.min_gain:
        return stay(
            "gain",
            f"{target} workers instead of {now} make steps {faster - 1:.0%} faster, and --elastic.min-gain asks for "
            f"{rules.min_gain:.0%} ({rules.micro_batches} micro-batches in {-(-rules.micro_batches // target)} and "
            f"{-(-rules.micro_batches // now)} passes)",
        )
    if moment.restart_s is None:
        return None
    restart_s, mtbf_s = moment.restart_s, moment.mtbf_s
    if moment.step_s is not None and moment.steps_left * moment.step_s <= restart_s:
        return stay(
            "end",
            f"{moment.steps_left} steps are left, and take less than a restart ({restart_s:.1f} s)",
        )
    won_s = (mtbf_s - restart_s) * faster - mtbf_s
    if won_s <= 0:
        return stay(
            "cost",
            f"a restart takes {restart_s:.1f} s, more than {target} workers instead of {now} win before the next "
            f"failure, which is expected within {mtbf_s:.0f} s",
        )
    return None
