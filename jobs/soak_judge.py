"""Whether a run that went through a soak is the run that was left alone: arithmetic over what it left on record.

What counts is held against the order of samples, which needs no run: it is a function of data, seed and position. What
was done more than once must have been the same each time, to the last bit: a soak trains in exact mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soak_schedule import ENDS, Event

SAME = ("sample_offset", "sample_digest", "tokens", "loss_hex", "grad_norm", "rng_digest")
PLANNED = frozenset({"resize", "drain", "preempted", "user_stop"})
ANY_TIME = frozenset({"resize"})  # the cluster has changed, and the run follows when it is worth it
LEDGER_SHARE = 1e-3
SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that must not be.

    Attributes:
        rule: that is broken, in a few words.
        text: where, and how.
    """

    rule: str
    text: str


def judge_history(
    rows: Sequence[Mapping[str, Any]],
    steps: int,
    global_batch: int,
    digests: Callable[[int], str],
) -> list[Finding]:
    """Holds what was executed against the global order.

    Args:
        rows: all lines of ``steps.jsonl``, as they were written.
        steps: of the run.
        global_batch: samples per step.
        digests: step to the digest of the samples that belong to it.
    """
    found = []
    surviving = {int(row["step"]): row for row in rows}
    if missing := sorted(set(range(1, steps + 1)) - surviving.keys()):
        found.append(
            Finding(rule="every step is made", text=f"missing: {_some(missing)} of {steps}")
        )
    if beyond := sorted(surviving.keys() - set(range(1, steps + 1))):
        found.append(Finding(rule="no step beyond the last", text=f"there are {_some(beyond)}"))
    for step, row in sorted(surviving.items()):
        for what, right in (
            ("sample_offset", global_batch * step),
            ("sample_digest", digests(step)),
        ):
            if row[what] != right:
                text = f"step {step}: {what} is {row[what]!r}, the order says {right!r}"
                found.append(Finding(rule="every sample once, in order", text=text))
    return [*found, *_repeats(rows), *_generations(rows)][:SHOWN]


def _repeats(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Steps that were done more than once, and not the same way."""
    first: dict[int, Mapping[str, Any]] = {}
    found = []
    for row in rows:
        before = first.setdefault(int(row["step"]), row)
        found += [
            Finding(
                rule="what is done again is the same",
                text=f"step {row['step']}: {what} was {before.get(what)!r} in attempt {before['generation']} with "
                f"{before['world_size']} workers, {row.get(what)!r} in {row['generation']} with {row['world_size']}",
            )
            for what in SAME
            if before.get(what) != row.get(what)
        ]
    return found


def _generations(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Lines of an attempt after those of a later one: it was over, and wrote what counts."""
    newest, found = 0, []
    for row in rows:
        if row["generation"] < newest:
            text = f"step {row['step']} of attempt {row['generation']} comes after lines of attempt {newest}"
            found.append(Finding(rule="what is over writes nothing", text=text))
        newest = max(newest, int(row["generation"]))
    return found


def judge_journal(events: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What the journal says of attempts: planned ends lose nothing, attempts only grow, no commit of an old one."""
    found, newest = [], 0
    for event in events:
        if event["event"] == "attempt_started":
            if event["generation"] <= newest:
                text = f"attempt {event['generation']} began after attempt {newest}"
                found.append(Finding(rule="generations only grow", text=text))
            newest = max(newest, int(event["generation"]))
        if event["event"] == "commit" and event["generation"] < newest:
            text = f"step {event['step']} of attempt {event['generation']} was committed in attempt {newest}"
            found.append(Finding(rule="what is over writes nothing", text=text))
    return found[:SHOWN]


def judge_ledger(wall_s: float, buckets: Mapping[str, float]) -> list[Finding]:
    """Every second is in one bucket."""
    total = sum(buckets.values())
    if abs(total - wall_s) <= LEDGER_SHARE * wall_s and min(buckets.values(), default=0.0) >= 0.0:
        return []
    return [Finding(rule="time adds up", text=f"the buckets hold {total:.2f} s of {wall_s:.2f} s")]


def judge_causes(
    happened: Sequence[tuple[float, Event]],
    events: Sequence[Mapping[str, Any]],
    lost: Collection[str] = (),
) -> list[Finding]:
    """Ends of attempts that nothing that happened explains.

    Args:
        happened: when each event began, by the clock of the journal, and the event.
        events: of the journal.
        lost: nodes that were lost by none of the events, as on a machine that is too busy to answer.
    """
    found = []
    for end in events:
        if end["event"] != "interruption":
            continue
        # Of all events so far: an end may come late, and what a node's return brings comes when it is worth it.
        before = [event for began_s, event in happened if began_s <= end["time"] + 1.0]
        allowed = ANY_TIME.union(*(ENDS[event.kind] for event in before[-3:]))
        by_itself = end["kind"] == "node_loss" and any(name in end["cause"] for name in lost)
        if end["kind"] not in allowed | {"user_stop"} and not by_itself:
            last = before[-1].words() if before else "nothing"
            text = f"attempt {end['generation']} ended as {end['kind']} ({end.get('cause', '')}); before it: {last}"
            found.append(Finding(rule="each end has its cause", text=text))
    return found[:SHOWN]


def lost_by_kind(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Kind of interruption to how many there were and the steps that they lost."""
    count: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for event in events:
        if event["event"] == "interruption":
            count[event["kind"]] += 1
            lost[event["kind"]] += int(event.get("lost_steps") or 0)
    return {kind: (count[kind], lost[kind]) for kind in sorted(count)}


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
