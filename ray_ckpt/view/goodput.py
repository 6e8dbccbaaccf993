"""A ledger as people read it: where the time went, how long restarts take, what the interval cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ray_ckpt.tracker.buckets import BUCKETS, PHASES, RESTART, Ledger, Restart
from ray_ckpt.view.human import human_duration
from ray_ckpt.view.tables import Column, render_table

# Columns of the tables by attempt and by day: the buckets in groups.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "USEFUL": ("useful",),
    "REWORK": ("rework",),
    "SAVING": ("stall", "slowdown"),
    "RESTART": PHASES,
    "WAITING": ("waiting_for_resources",),
    "DATA": ("data_wait",),
    "EVAL": ("evaluation",),
    "START": ("start",),
    "IDLE": ("idle",),
    "UNKNOWN": ("unknown",),
}


def goodput_line(ledger: Ledger) -> str:
    """The goodput in one line."""
    return (
        f"goodput {_percent(ledger.goodput or 0.0)}: {human_duration(ledger.buckets['useful'])} of useful steps in "
        f"{human_duration(ledger.wall_s)}"
    )


def goodput_text(ledger: Ledger) -> str:
    """All of it: buckets, restarts, rework by cause, and what the totals say about the interval."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(ledger.interruptions.items()))
    parts = [
        goodput_line(ledger),
        _buckets(ledger),
        f"interruptions: {kinds or 'none'}; steps done again: {ledger.lost_steps}",
    ]
    if rework := _causes(ledger):
        parts.append(rework)
    if restarts := _restarts([each for each in ledger.restarts if each.complete]):
        parts.append(restarts)
    parts.append(f"interval: {ledger.reason}")
    return "\n\n".join(parts)


def attempts_text(ledger: Ledger) -> str:
    """A line for each attempt, with the way into it."""
    return _grouped("ATTEMPT", {str(key): each for key, each in ledger.by_attempt.items()})


def days_text(ledger: Ledger) -> str:
    """A line for each day (UTC)."""
    return _grouped("DAY", ledger.by_day)


def _buckets(ledger: Ledger) -> str:
    columns = [
        Column("BUCKET"),
        Column("SECONDS", "right"),
        Column("TIME", "right"),
        Column("SHARE", "right"),
        Column("WHAT"),
    ]
    rows = [
        [name, f"{seconds:.1f}", human_duration(seconds), _percent(seconds / ledger.wall_s), what]
        for name, what in BUCKETS.items()
        if (seconds := ledger.buckets[name]) > 0
    ]
    whole = [f"{ledger.wall_s:.1f}", human_duration(ledger.wall_s), _percent(1.0)]
    rows.append(["wall", *whole, "from the first submit to the last sign of life"])
    return render_table(columns, rows)


def _causes(ledger: Ledger) -> str:
    columns = [Column("REWORK AFTER"), Column("TIME", "right"), Column("SHARE", "right")]
    rows = [
        [kind, human_duration(seconds), _percent(seconds / ledger.wall_s)]
        for kind, seconds in sorted(ledger.rework_by_cause.items())
    ]
    return render_table(columns, rows) if rows else ""


def _restarts(restarts: Sequence[Restart]) -> str:
    """For each kind of interruption and each phase the median and the worst."""
    if not restarts:
        return ""
    kinds = sorted({each.kind for each in restarts})
    columns = [Column("RESTART, MEDIAN / WORST"), *(Column(kind, "right") for kind in kinds)]

    def row(title: str, values: Mapping[str, list[float]]) -> list[str]:
        return [
            title,
            *(
                f"{human_duration(median(values[kind]))} / {human_duration(max(values[kind]))}"
                for kind in kinds
            ),
        ]

    rows = [["how many", *(str(sum(each.kind == kind for each in restarts)) for kind in kinds)]]
    for phase in (*PHASES, "waiting_for_resources"):
        values = {
            kind: [each.buckets.get(phase, 0.0) for each in restarts if each.kind == kind]
            for kind in kinds
        }
        if any(max(found) > 0 for found in values.values()):
            rows.append(row(phase.removeprefix(RESTART).replace("_", " "), values))
    whole = {kind: [each.seconds for each in restarts if each.kind == kind] for kind in kinds}
    rows.append(row("all phases", whole))
    return render_table(columns, rows)


def _grouped(title: str, rows_of: Mapping[str, Mapping[str, float]]) -> str:
    sums = {
        key: {name: sum(each[bucket] for bucket in names) for name, names in _GROUPS.items()}
        for key, each in rows_of.items()
    }
    shown = [name for name in _GROUPS if any(each[name] > 0 for each in sums.values())]
    columns = [Column(title, "right"), Column("WALL", "right"), Column("GOODPUT", "right")]
    columns += [Column(name, "right") for name in shown]
    rows = []
    for key, each in sums.items():
        wall_s = sum(each.values())
        share = _percent(each["USEFUL"] / wall_s) if wall_s > 0 else "-"
        rows.append(
            [key, human_duration(wall_s), share, *(human_duration(each[name]) for name in shown)]
        )
    return render_table(columns, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
