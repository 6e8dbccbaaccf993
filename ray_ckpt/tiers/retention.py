"""Which checkpoints of a tier are kept, and why: pure, values in and verdicts out.

A rule looks at the usable checkpoints and names those that it wants to keep, each with a reason in words. Rules
are composed with "any of": what one of them keeps is kept. Whatever they say, :func:`plan` never gives up

- the newest checkpoint, nor the newest verified one, nor one that is newer than that;
- a pinned one, nor one that is in use;
- one of which it is not known what it is.

So an older checkpoint goes only after a newer one was read back. Nothing here deletes: that is ``collect.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is known of one committed checkpoint.

    Attributes:
        name: of its folder.
        step: optimizer steps finished in it.
        generation: attempt that wrote it.
        committed_at: time of the commit by the clock of its day, seconds since the epoch.
        metrics: numbers of its step, such as the loss.
        pinned: why it is pinned, one sentence a pin.
        verified: whether every byte of it was read and compared, in this tier or a more durable one.
        quarantined: why it must not be used; None when it may be.
        refused: set aside before it was committed.
        in_use: what it is used for just now, in words; empty when it is not.
        fault: why nothing can be said of it; None when its manifest was read.
    """

    name: str
    step: int
    generation: int
    committed_at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
    verified: bool = False
    quarantined: str | None = None
    refused: bool = False
    in_use: str = ""
    fault: str | None = None

    @property
    def usable(self) -> bool:
        """Whether a run could be restored from it."""
        return self.quarantined is None and self.fault is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What becomes of one checkpoint.

    Attributes:
        name: of its folder.
        keep: False deletes it.
        reasons: why, in words; all that speak for it when it is kept.
    """

    name: str
    keep: bool
    reasons: tuple[str, ...]


class KeepPolicy(Protocol):
    """A rule that keeps checkpoints."""

    @property
    def words(self) -> str:
        """The rule, as it is told of a checkpoint that it does not keep."""
        ...

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        """Names of the checkpoints to keep, each with the reason.

        Applied to what it kept, and to any others that stayed, it keeps the same again: else each look would
        delete some more.

        Args:
            records: the usable checkpoints, newest first.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keeps everything."""

    words: str = "every one"

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        return {record.name: "nothing is deleted" for record in records}


@dataclass(frozen=True, slots=True)
class KeepNewest:
    """Keeps the newest ``count``."""

    count: int

    @property
    def words(self) -> str:
        return f"the newest {self.count}"

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        return {record.name: f"one of {self.words}" for record in records[: max(0, self.count)]}


@dataclass(frozen=True, slots=True)
class KeepEverySteps:
    """Keeps the first checkpoint at or after each multiple of ``every`` steps.

    Saves do not fall on multiples: their interval is computed. Of two attempts that saved the same step the
    later one counts.
    """

    every: int

    @property
    def words(self) -> str:
        return f"one per {self.every} steps"

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        first: dict[int, Record] = {}
        for record in records:  # newest first: what comes later is older
            bucket = record.step // self.every
            if bucket not in first or record.step < first[bucket].step:
                first[bucket] = record
        return {
            record.name: f"the first from step {bucket * self.every} on ({self.words})"
            for bucket, record in first.items()
        }


@dataclass(frozen=True, slots=True)
class KeepEverySeconds:
    """Keeps one checkpoint per ``every_s`` seconds of wall time, in the order in which they were written.

    Only the kept ones set the pace, so the same are kept whenever it is asked. A clock that jumped back would
    make everything after it "not yet due": a checkpoint that is older than the one kept before it is kept, and
    time is counted from there. A jump costs one checkpoint too many, or one gap of up to twice the time.
    """

    every_s: float

    @property
    def words(self) -> str:
        return f"one per {self.every_s:g} s"

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        kept: dict[str, str] = {}
        last_s: float | None = None
        # Steps may be done again by a later attempt; the number of the attempt only grows.
        for record in sorted(records, key=lambda record: (record.generation, record.step)):
            at_s = record.committed_at
            if last_s is None or not last_s <= at_s < last_s + self.every_s:
                kept[record.name] = f"the first of its time ({self.words})"
                last_s = at_s
        return kept


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keeps the ``count`` with the lowest or highest value of a metric; of equals the newer one.

    A value that is not a finite number is never best, and neither is one that is missing.
    """

    metric: str
    count: int
    mode: Mode = "min"

    @property
    def words(self) -> str:
        return f"the {self.count} with the {'lowest' if self.mode == 'min' else 'highest'} {self.metric}"

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        known = [r for r in records if math.isfinite(r.metrics.get(self.metric, math.nan))]
        sign = 1 if self.mode == "min" else -1
        best = sorted(known, key=lambda record: sign * record.metrics[self.metric])
        return {
            record.name: f"{self.metric} {record.metrics[self.metric]:g}, one of {self.words}"
            for record in best[: max(0, self.count)]
        }


@dataclass(frozen=True, slots=True)
class KeepSteps:
    """Keeps the checkpoints of certain steps."""

    steps: tuple[int, ...]

    @property
    def words(self) -> str:
        return "the steps " + ", ".join(map(str, self.steps))

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        return {
            record.name: f"step {record.step} was asked for"
            for record in records
            if record.step in self.steps
        }


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Keeps what one of several rules keeps."""

    policies: tuple[KeepPolicy, ...]

    @property
    def words(self) -> str:
        return ", ".join(policy.words for policy in self.policies) or "none"

    def keep(self, records: Sequence[Record]) -> dict[str, str]:
        kept: dict[str, str] = {}
        for policy in self.policies:
            for name, reason in policy.keep(records).items():
                kept[name] = f"{kept[name]}; {reason}" if name in kept else reason
        return kept


def plan(
    context: Sequence[Record], policies: Sequence[KeepPolicy], *, quarantined: int = 1
) -> list[Verdict]:
    """Decides for every committed checkpoint of a tier whether it stays.

    Args:
        context: all of them, newest first (by step, then generation).
        policies: a checkpoint that one of them keeps is kept.
        quarantined: how many quarantined ones to keep as evidence; of the newest at least one stays.

    Returns:
        A verdict for each, in the same order.
    """
    keys = [(record.step, record.generation) for record in context]
    assert keys == sorted(set(keys), reverse=True), "the context must be newest first"
    usable = [record for record in context if record.usable]
    reasons: dict[str, list[str]] = {record.name: _must_stay(record) for record in context}
    trusted = next((record for record in usable if record.verified), None)
    if usable:
        reasons[usable[0].name].append("the newest")
    if trusted is not None:
        reasons[trusted.name].append("the newest that is verified")
    for record in context:
        if trusted is None or _key(record) > _key(trusted):
            if record.usable and record is not usable[0]:
                reasons[record.name].append("no newer one is verified yet")
            elif trusted is None and not record.usable and not record.refused:
                # Somebody may yet repair it; what was never committed is no way back.
                reasons[record.name].append("no usable one is verified yet")
    for policy in policies:
        for name, reason in policy.keep(usable).items():
            reasons[name].append(reason)
    evidence = [record for record in context if record.quarantined is not None]
    limit = max(1, quarantined)
    for record in evidence[:limit]:
        reasons[record.name].append(
            f"evidence, one of the newest {limit} quarantined: {record.quarantined}"
        )
    rules = AnyOf(tuple(policies)).words
    verdicts = []
    for record in context:
        why = tuple(reasons[record.name])
        if not why:
            if record.usable:
                assert trusted is not None
                why = (f"no rule keeps it ({rules}), and {trusted.name} is verified",)
            else:
                why = (f"quarantined, and {limit} newer quarantined ones are kept",)
            verdicts.append(Verdict(name=record.name, keep=False, reasons=why))
        else:
            verdicts.append(Verdict(name=record.name, keep=True, reasons=why))
    return verdicts


def to_read_back(
    context: Sequence[Record], policies: Sequence[KeepPolicy], *, quarantined: int = 1
) -> str:
    """Which checkpoint to read back first because more could be deleted then; empty for none."""
    newest = next((record for record in context if record.usable), None)
    if newest is None or newest.verified:
        return ""
    trusted = [replace(r, verified=True) if r is newest else r for r in context]

    def deleted(records: Sequence[Record]) -> set[str]:
        verdicts = plan(records, policies, quarantined=quarantined)
        return {verdict.name for verdict in verdicts if not verdict.keep}

    return newest.name if deleted(trusted) - deleted(context) else ""


def _must_stay(record: Record) -> list[str]:
    reasons = [f"pinned: {reason}" for reason in record.pinned]
    if record.in_use:
        reasons.append(record.in_use)
    if record.fault is not None and record.quarantined is None:
        reasons.append(f"not judged: {record.fault}")
    return reasons


def _key(record: Record) -> tuple[int, int]:
    return record.step, record.generation
