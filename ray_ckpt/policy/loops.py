"""Failures that come again: the same one at the same step, too many of one kind, one after the other. Pure.

A run is started again after every failure, which is right for those that come by chance. One that comes again at the
same place will come for ever; one that comes every minute has a reason that another start does not mend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

OnCrashLoop = Literal["stop", "rollback", "skip"]

# Kinds that the program itself can be the reason of; a lost node, or job, has its reason elsewhere.
OWN_KINDS = frozenset({"worker_error", "hang"})
# What may be counted, and limited.
BUDGET_KINDS = ("worker_error", "hang", "node_loss", "lost")
FAST_S = 60.0  # training since the failure before, within which another one is fast
MOST_BACKOFF_S = 30.0
SHORT = 200  # characters of a signature


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The end of an attempt that nobody wanted.

    Attributes:
        generation: of the attempt.
        kind: such as "worker_error".
        cause: in words.
        step: last one executed before it, as far as was told.
        at_step: that was worked on, when a worker could still be asked; 0 when none could.
        exposure_s: training time of the run up to it, seconds.
        nodes: that are known to be part of it.
        files: folder of what is known of it, relative to the run's; empty for nothing.
        restoring: checkpoint that it counts against, for it was just being restored; empty for the run.
    """

    generation: int
    kind: str
    cause: str
    step: int
    exposure_s: float
    nodes: tuple[str, ...] = ()
    files: str = ""
    restoring: str = ""
    at_step: int = 0

    @property
    def finished_steps(self) -> int:
        """Steps that were finished before it; those that were told, when nobody knows better."""
        return max(self.step, self.at_step - 1)

    @property
    def signature(self) -> str:
        """What two failures of the same reason have in common."""
        return f"{self.kind}: {normalised(self.cause)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRule:
    """When a run does not simply go on after a failure.

    Attributes:
        tries: times that the same failure may come at the same step, or while one checkpoint is restored.
        on_loop: what is done then.
        budgets: kind to how many failures of it are one too many within ``window_s``; 0 for any number.
        window_s: training time over which they are counted, seconds.
        backoff_s: wait after the second fast failure in a row, doubled with each further one, seconds; 0 never waits.
    """

    tries: int = 3
    on_loop: OnCrashLoop = "stop"
    budgets: Mapping[str, int] = field(default_factory=dict)
    window_s: float = 3600.0
    backoff_s: float = 1.0


def normalised(cause: str) -> str:
    """A cause without what differs from one time to the next: numbers, addresses, folders, names of nodes."""
    text = re.sub(r"\bnode \S+", "node #", cause)
    text = re.sub(r"(/[\w.@+-]+)+/", "/", text)
    text = re.sub(r"0x[0-9a-fA-F]+|\d+([.:]\d+)*", "#", text)
    return " ".join(text.split())[:SHORT]


def loops(failures: Sequence[Failure], rule: LoopRule, slack_steps: int) -> bool:
    """Whether the last failures in a row are the same one at the same step.

    Args:
        failures: oldest first.
        rule: the options.
        slack_steps: steps that may lie between two that are the same: the last lines of a worker that dies are lost.
    """
    last = [failure for failure in failures if not failure.restoring][-rule.tries :]
    if len(last) < rule.tries or last[-1].kind not in OWN_KINDS:
        return False
    steps = [failure.finished_steps for failure in last]
    same = len({failure.signature for failure in last}) == 1
    return same and max(steps) - min(steps) <= slack_steps


def over_budget(failures: Sequence[Failure], rule: LoopRule) -> str:
    """Which kind of failures has become too many, in words; empty when none has."""
    if not failures:
        return ""
    last = failures[-1]
    most = rule.budgets.get(last.kind, 0)
    begin_s = last.exposure_s - rule.window_s
    count = sum(f.kind == last.kind and f.exposure_s >= begin_s for f in failures)
    if not most or count < most:
        return ""
    return (
        f"{count} failures of kind {last.kind} within {rule.window_s:g} s of training "
        f"(--elastic.max-failures {last.kind}={most}, --elastic.failure-window-s)"
    )


def backoff_s(failures: Sequence[Failure], rule: LoopRule) -> float:
    """How long to wait before another attempt, seconds.

    Nobody waits for failures that have their reason elsewhere, nor for the first one.
    """
    if not failures or failures[-1].kind not in OWN_KINDS:
        return 0.0
    own = [failure for failure in failures if failure.kind in OWN_KINDS]
    fast = 0
    for before, after in zip(own[-2::-1], own[:0:-1], strict=True):
        if after.exposure_s - before.exposure_s >= FAST_S:
            break
        fast += 1
    if not fast:
        return 0.0
    return float(min(MOST_BACKOFF_S, rule.backoff_s * 2.0 ** min(fast - 1, 16)))


def story(failures: Sequence[Failure]) -> str:
    """What happened, a line for each failure."""
    lines = []
    for f in failures:
        on = f" on node {', '.join(f.nodes)}" if f.nodes else ""
        files = f"; see {f.files}" if f.files else ""
        lines.append(
            f"  attempt {f.generation} ended at step {f.step}{on} ({f.kind}): {f.cause[:400]}{files}"
        )
    return "\n".join(lines)


def parse_budgets(text: str) -> dict[str, int]:
    """The budgets of ``KIND=NUMBER,...``.

    Raises:
        ValueError: another form, or a kind that is not known.
    """
    budgets: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)=(\d+)", part)
        if match is None or match[1] not in BUDGET_KINDS:
            raise ValueError(
                f"{part!r} is not KIND=NUMBER, as in worker_error=20; kinds: {', '.join(BUDGET_KINDS)}"
            )
        budgets[match[1]] = int(match[2])
    return budgets
