"""Is a run healthy? A verdict with its reasons, from what is known of it; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "attention", "failing", "unknown"]

_RANK: dict[Level, int] = {"unknown": 0, "ok": 0, "attention": 1, "failing": 2}
_LATE, _VERY_LATE = 3.0, 10.0  # times the interval
_GRACE_S = 120.0  # less than this is no delay
_SILENT_STEPS, _SILENT_S = 20.0, 300.0
_LONG_START_S = 1800.0
_FAILED_SAVES = 3
_FIRST_COPY_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """What a verdict is made of; times in seconds, None where it is not known.

    Attributes:
        state: "new", "training", "restarting", "finished", "stopped" or "lost".
        planned_end: whether the run was ended by somebody who wanted to.
        step: last step executed.
        step_s: time of a step.
        silent_s: since the last step.
        running_s: since the first attempt.
        durable_age_s: since the newest durable copy.
        durable_every_s: between durable copies, as decided.
        failed_in_a_row: saves that failed since the last commit.
        save_error: of the last one.
        trouble: why the run is not finite any more, empty while it is.
        trouble_stops: whether it ends the run.
        refusals: saves of the newest attempt that the guard refused.
        fruitless: attempts in a row that won nothing.
        loop: which failures came again until the run was ended for them; empty for none.
        slow_nodes: stragglers.
        excluded_nodes: that get no workers.
        failed_drill: the newest drill, in words, when it failed.
        missing: committed checkpoints that are gone without a word.
        damaged: committed checkpoints that cannot be used.
        problems: of looking, one sentence each.
    """

    state: str
    planned_end: bool = False
    step: int = 0
    step_s: float | None = None
    silent_s: float | None = None
    running_s: float = 0.0
    durable_age_s: float | None = None
    durable_every_s: float | None = None
    failed_in_a_row: int = 0
    save_error: str = ""
    trouble: str = ""
    trouble_stops: bool = False
    refusals: int = 0
    fruitless: int = 0
    loop: str = ""
    slow_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    failed_drill: str = ""
    missing: int = 0
    damaged: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """The verdict: a level, and one sentence for each thing that somebody should know."""

    level: Level
    reasons: tuple[str, ...]


READING = Health("unknown", ("still reading what the run has on record",))


def judge(signs: Signs) -> Health:
    """The worst of what is found; the worst first. A sentence holds no time that grows: it stays the same."""
    found = [*_course(signs), *_copies(signs), *_proofs(signs)]
    found.sort(key=lambda item: -_RANK[item[0]])
    if not found:
        return Health("ok", (_fine(signs),))
    return Health(found[0][0], tuple(reason for _, reason in found))


def _fine(signs: Signs) -> str:
    if signs.state == "finished":
        return f"finished at step {signs.step}"
    if signs.state == "stopped":
        return f"stopped on purpose at step {signs.step}; the same command goes on"
    if signs.state == "new":
        return "starting: no step has been made yet"
    return "training, and saves are on time"


def _course(signs: Signs) -> list[tuple[Level, str]]:
    found: list[tuple[Level, str]] = []
    if signs.trouble:
        found.append(("failing" if signs.trouble_stops else "attention", signs.trouble))
    if signs.state == "restarting":
        if (signs.silent_s or 0.0) > _LONG_START_S:
            found.append(("failing", "restarting for more than half an hour"))
        else:
            found.append(("attention", "restarting: no new step yet"))
    if signs.state == "new" and signs.running_s > _LONG_START_S:
        found.append(("attention", "starting for more than half an hour, and no step yet"))
    if signs.state == "lost":
        found.append(
            (
                "failing",
                "nobody drives the run, and it was not told to end; the same command goes on",
            )
        )
    if signs.state == "stopped" and not signs.planned_end:
        found.append(("failing", "the run has ended early; the same command goes on"))
    if signs.fruitless >= 2:
        found.append(
            (
                "failing",
                f"{signs.fruitless} attempts in a row ended without a new step or checkpoint",
            )
        )
    if signs.loop:
        found.append(("failing", signs.loop))
    if signs.slow_nodes:
        found.append(("attention", f"slower than the others: node {', '.join(signs.slow_nodes)}"))
    if signs.excluded_nodes:
        found.append(("attention", f"left out after hangs: node {', '.join(signs.excluded_nodes)}"))
    limit_s = max(_SILENT_S, _SILENT_STEPS * (signs.step_s or 0.0))
    if signs.state == "training" and signs.silent_s is not None and signs.silent_s > limit_s:
        found.append(("failing", "no step for much longer than a step takes"))
    return found


def _copies(signs: Signs) -> list[tuple[Level, str]]:
    found: list[tuple[Level, str]] = []
    if signs.failed_in_a_row:
        level: Level = "failing" if signs.failed_in_a_row >= _FAILED_SAVES else "attention"
        words = "save" if signs.failed_in_a_row == 1 else f"{signs.failed_in_a_row} saves"
        found.append((level, f"the last {words} failed: {signs.save_error}"))
    if signs.missing:
        found.append(
            ("failing", f"{_checkpoints(signs.missing)} gone without a word in the journal")
        )
    if signs.damaged:
        found.append(("attention", f"{_checkpoints(signs.damaged)} committed and not usable now"))
    if signs.state not in ("training", "restarting"):
        return found
    every_s, age_s = signs.durable_every_s, signs.durable_age_s
    if age_s is None:
        if signs.running_s > _FIRST_COPY_S:
            found.append(("failing", "there is no durable copy yet, after more than an hour"))
    elif every_s is not None and age_s > _VERY_LATE * every_s + _GRACE_S:
        found.append(("failing", "the newest durable copy is ten intervals old or more"))
    elif every_s is not None and age_s > _LATE * every_s + _GRACE_S:
        found.append(("attention", "the newest durable copy is three intervals old or more"))
    return found


def _proofs(signs: Signs) -> list[tuple[Level, str]]:
    found: list[tuple[Level, str]] = []
    if signs.refusals:
        saves = "a save" if signs.refusals == 1 else f"{signs.refusals} saves"
        found.append(("attention", f"the guard refused {saves} of this attempt"))
    if signs.failed_drill:
        found.append(("failing", f"the newest restore drill failed: {signs.failed_drill}"))
    found += [("attention", problem) for problem in signs.problems]
    return found


def _checkpoints(count: int) -> str:
    return "1 checkpoint is" if count == 1 else f"{count} checkpoints are"
