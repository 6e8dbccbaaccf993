"""Every event in words, for who looks on: also those that are not worth a line of the log, and those nobody knows yet.

A log is read while it grows, and says what matters (:mod:`ray_ckpt.view.story`). A page is where people look when
something is missing, so nothing is left out there: an event of a newer version is told by its name and its fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ray_ckpt.view.human import human_duration
from ray_ckpt.view.story import TELLERS, tell

_STAMP = frozenset({"time", "monotonic", "generation", "event"})
_MOST_FIELDS = 8


def describe(event: dict[str, Any]) -> str:
    """One line for an event, whatever it is; what lacks fields is told by those that it has."""
    kind = event.get("event")
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
        if kind in QUIET:
            return QUIET[str(kind)](event)
        # The log tells it once in an attempt that there are fewer copies than are wanted.
        line = tell({**event, "first": True})
        if line:
            return line
    return _by_its_fields(event)


def knows(kind: str) -> bool:
    """Whether there are words for this kind of event."""
    return kind in TELLERS or kind in QUIET


def _by_its_fields(event: dict[str, Any]) -> str:
    fields = [(name, value) for name, value in event.items() if name not in _STAMP]
    said = [f"{name} {_short(value)}" for name, value in fields[:_MOST_FIELDS]]
    more = ", ..." if len(fields) > _MOST_FIELDS else ""
    name = str(event.get("event")).replace("_", " ")
    return f"{name}: {', '.join(said)}{more}" if said else name


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _copies(e: dict[str, Any]) -> str:
    held = dict(e["tiers"])
    if not held:
        return "the nodes hold no whole checkpoint"
    told = ", ".join(f"{name} ({' and '.join(tiers)})" for name, tiers in list(held.items())[:3])
    more = f" and {len(held) - 3} more" if len(held) > 3 else ""
    return f"the nodes hold {told}{more}"


def _tiers(e: dict[str, Any]) -> str:
    remote = f", durable on {e['remote']}" if e.get("remote") else ""
    copies = f", {e['replicas']} on other nodes" if e.get("replicas") else ""
    return f"copies are kept in {', '.join(e['use'])}{copies}{remote}"


def _retention(e: dict[str, Any]) -> str:
    rules = dict(e["rules"])
    if not rules.get("keep_newest"):
        return "kept is every checkpoint: nothing is deleted"
    kept = [f"the newest {rules['keep_newest']}"]
    if every_s := rules.get("keep_every_s"):
        kept.append(f"one per {human_duration(every_s)}")
    if every := rules.get("keep_every_steps"):
        kept.append(f"one per {every} steps")
    if best := rules.get("keep_best"):
        kept.append(f"the best {best} by {rules.get('metric')} ({rules.get('mode')})")
    if steps := rules.get("keep_steps"):
        kept.append(f"those of steps {', '.join(map(str, steps))}")
    return f"kept are {', '.join(kept)}"


def _limits(e: dict[str, Any]) -> str:
    kinds = ", ".join(f"{most} of {kind}" for kind, most in dict(e["budgets"]).items() if most)
    budget = (
        f"; at most {kinds} within {human_duration(e['window_s'])} of training" if kinds else ""
    )
    return f"the same failure may come {e['tries']} times in a row (then: {e['on_loop']}){budget}"


def _read_back(e: dict[str, Any]) -> str:
    copies, faults = int(e["copies"]), list(e["faults"])
    what = f"{copies} {'copy' if copies == 1 else 'copies'} on {_nodes(len(e['nodes']))}"
    if not faults:
        return f"as somebody asked for, {what} were read back: every byte is as written"
    first, many = faults[0], int(e.get("num_faults", len(faults)))
    found = "a fault was" if many == 1 else f"{many} faults were"
    return (
        f"as somebody asked for, {what} were read back, and {found} FOUND: {first['name']} in {first['tier']}: "
        f"{first['path'] or '-'}: {first['fault']}"
    )


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


QUIET: dict[str, Callable[[dict[str, Any]], str]] = {
    "copies": _copies,
    "tiers": _tiers,
    "retention": _retention,
    "limits": _limits,
    "read_back": _read_back,
}
