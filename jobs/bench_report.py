"""How every bench ends: targets printed, figures written as JSON, an exit code that says whether all hold."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ray_ckpt import facts


def target_of(name: str, value: float, limit: float) -> dict[str, Any]:
    """A figure that may not be more than its limit."""
    return {"name": name, "value": value, "limit": limit, "ok": value <= limit}


def at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    """A figure that may not be less than its limit."""
    return {"name": name, "value": value, "limit": f">= {limit:g}", "ok": value >= limit}


def between(name: str, value: float, low: float, high: float) -> dict[str, Any]:
    """A figure that lies in a range, its ends included."""
    ok = low <= value <= high
    return {"name": name, "value": value, "limit": f"{low:.3g} to {high:.3g}", "ok": ok}


def conclude(
    targets: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    path: str = "",
    *,
    also: Sequence[str] = (),
) -> int:
    """Prints the targets, writes them with the rows as JSON if a file is named.

    Args:
        targets: what is held, each with ``name``, ``value``, ``limit`` and ``ok``.
        rows: the figures behind them.
        path: the file, empty for none.
        also: distributions that were measured beside this project's own, to be named with their versions.

    Returns:
        The exit code: 0 only if all targets hold.
    """
    width = max((len(target["name"]) for target in targets), default=0)
    for target in targets:
        word = "ok" if target["ok"] else "MISSED"
        print(f"{target['name']:<{width}}{target['value']:>11.4g}  limit {target['limit']}  {word}")
    if path:
        versions = {**facts.versions(), "cpus": str(os.cpu_count())}
        versions |= {name: _version(name) for name in also}
        document = {"targets": list(targets), "rows": list(rows), "versions": versions}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(target["ok"] for target in targets) else 1


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
