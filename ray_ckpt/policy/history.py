"""What a team knows of failures from before a run: exposure and failures by number of workers, as a table.

The table is CSV with the columns ``workers, hours, kind, failures``. Each row adds up: so many hours of running with so
many workers, and so many failures of a kind. A row may leave out the hours or the failures, so that hours are written
once and kinds one a row. Lines that begin with ``#`` are notes.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_ckpt.policy.belief import Seen

COLUMNS = ("workers", "hours", "kind", "failures")
SCHEMA = 1


def history_of_csv(lines: Iterable[str]) -> tuple[Seen, ...]:
    """What a table says, by number of workers.

    Raises:
        ValueError: it is no such table; the message names line and column.
    """
    numbered = [(number, line) for number, line in enumerate(lines, 1) if _counts(line)]
    rows = csv.DictReader(line for _, line in numbered)
    names = [name.strip() for name in rows.fieldnames or ()]
    if missing := [name for name in COLUMNS if name not in names]:
        raise ValueError(f"column {missing[0]} is missing; the columns are {', '.join(COLUMNS)}")
    rows.fieldnames = names
    hours: dict[int, float] = defaultdict(float)
    failures: dict[int, Counter[str]] = defaultdict(Counter)
    # As many rows as lines after the first: no cell holds a line end.
    for (number, _), row in zip(numbered[1:], rows, strict=True):
        workers = int(_number(row, "workers", number, least=1))
        hours[workers] += _number(row, "hours", number)
        count, kind = int(_number(row, "failures", number)), (row["kind"] or "").strip()
        if count and not kind:
            raise ValueError(f"line {number}: {count} failures of no kind")
        if kind:
            failures[workers][kind] += count
    return _checked(
        Seen(world_size=size, exposure_s=3600 * each, failures=dict(failures[size]))
        for size, each in sorted(hours.items())
    )


def _counts(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _number(row: Mapping[str, str | None], name: str, line: int, least: float = 0.0) -> float:
    text = (row[name] or "").strip()
    if not text and not least:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    whole = name == "hours" or value.is_integer()
    if not (least <= value < float("inf") and whole):
        kind = "a number" if name == "hours" else "a whole number"
        raise ValueError(f"line {line}: {name} is {text!r}; give {kind}, {least:g} or more")
    return value


def _checked(seen: Iterable[Seen]) -> tuple[Seen, ...]:
    found = tuple(seen)
    for each in found:
        if each.failures and not each.exposure_s:
            raise ValueError(
                f"{each.world_size} workers have failures and no hours: how often they fail cannot be told"
            )
    return found


def history_to_json(seen: Sequence[Seen]) -> dict[str, Any]:
    """As it is stored for ``--policy.history``."""
    return {
        "schema": SCHEMA,
        "seen": [
            {
                "world_size": each.world_size,
                "exposure_s": each.exposure_s,
                "failures": dict(each.failures),
            }
            for each in seen
        ],
    }


def history_from_json(value: Any) -> tuple[Seen, ...]:
    """The same, read again.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError(f"it is no history of schema {SCHEMA}")
    try:
        return _checked(
            Seen(
                world_size=int(each["world_size"]),
                exposure_s=float(each["exposure_s"]),
                failures={str(kind): int(count) for kind, count in each["failures"].items()},
            )
            for each in value["seen"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a part of it is missing or no number ({error!r})") from error
