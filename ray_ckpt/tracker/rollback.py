"""What a run does that is no longer finite: where it goes back to, what it leaves out, when it gives up.

A checkpoint from before the trouble is finite, or it would not have been committed; it may all the same be the
one from which the trouble grows. So each further rollback in a row goes one checkpoint further back. A row ends
with a commit beyond the last place of trouble.

What an attempt wrote after the place it is rolled back to is never restored again, although it stays and verifies:
it belongs to a course that the run has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ray_ckpt.checkpoint.guard import GuardRule, OnNonfinite
from ray_ckpt.checkpoint.listing import Listed

LEFT = "the run was rolled back to before it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """What is done about a run that is no longer finite.

    Attributes:
        action: "stop", "rollback" or "rollback-and-skip".
        reason: what happened, what is done, and what the user can do.
    """

    action: OnNonfinite
    reason: str


class Place(Protocol):
    """Where in a run a checkpoint is."""

    @property
    def step(self) -> int: ...

    @property
    def generation(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """A course of the run that was left by a rollback.

    Attributes:
        to_step: step that the run went back to.
        generation: newest attempt on that course.
    """

    to_step: int
    generation: int

    def has(self, entry: Place) -> bool:
        """Whether a checkpoint belongs to what was left."""
        return entry.generation <= self.generation and entry.step > self.to_step


def left(entry: Place, courses: Iterable[Course]) -> bool:
    """Whether a checkpoint is on a course that the run has left."""
    return any(course.has(entry) for course in courses)


def passed_over(entries: Iterable[Listed], courses: Sequence[Course]) -> dict[str, str]:
    """Checkpoints on courses that the run has left: name to why they are never restored."""
    return {entry.folder.name: LEFT for entry in entries if left(entry, courses)}


def passed(courses: Iterable[Course]) -> Callable[[Place], str | None]:
    """For whoever keeps and deletes: why a checkpoint is never restored, although it is whole."""
    found = tuple(courses)  # as it is now: who asks may ask from another thread
    return lambda entry: LEFT if left(entry, found) else None


def choose(entries: Sequence[Listed], bad_step: int, rollbacks: int) -> Listed | None:
    """The checkpoint to go back to; None when there is none from before.

    Args:
        entries: usable ones that are on the run's course, newest first.
        bad_step: step, counted from 1, that was no longer finite.
        rollbacks: in a row so far.
    """
    before: dict[int, Listed] = {}
    for entry in entries:
        if entry.step < bad_step:
            before.setdefault(entry.step, entry)  # the newest attempt's, of those of one step
    found = list(before.values())
    return found[min(rollbacks, len(found) - 1)] if found else None


def gives_up(rule: GuardRule, rollbacks: int) -> bool:
    """Whether the run stops instead of going back once more."""
    return rule.on_nonfinite in ("stop", "go-on") or rollbacks >= rule.max_rollbacks


def remedy(rule: GuardRule, *, step: int, what: str, rollbacks: int, to_step: int) -> Remedy:
    """Decides what to do.

    Args:
        rule: the options.
        step: that was no longer finite.
        what: was not finite, in words.
        rollbacks: in a row so far.
        to_step: where the run goes back to, or would begin again after a stop.
    """
    option = f"--guard.on-nonfinite {rule.on_nonfinite}"
    head = f"the run is no longer finite at step {step}: {what}"
    if rule.on_nonfinite in ("stop", "go-on"):
        return Remedy(
            action="stop",
            reason=f"{head} ({option}). The state of step {to_step} is kept. What can be done: start again with "
            "--guard.on-nonfinite rollback (a fault of the hardware does not come again) or rollback-and-skip "
            "(leave out the batches that led there), lower the learning rate, or, if the training function leaves "
            "out such steps itself, --guard.on-nonfinite go-on",
        )
    if gives_up(rule, rollbacks):
        times = f"{rollbacks} rollback{'' if rollbacks == 1 else 's'} in a row"
        return Remedy(
            action="stop",
            reason=f"{head}, after {times} ({option}, --guard.max-rollbacks {rule.max_rollbacks}). The state of "
            f"step {to_step} is kept. It comes back, so it is no accident: look at the data and the learning rate "
            "of that step in steps.jsonl, or allow more with --guard.max-rollbacks",
        )
    skipping = rule.on_nonfinite == "rollback-and-skip"
    more = f", without the global batches since then up to step {step}" if skipping else ""
    return Remedy(
        action=rule.on_nonfinite,
        reason=f"{head}; back to step {to_step}{more} ({option}, rollback {rollbacks + 1} of {rule.max_rollbacks})",
    )
