"""The last words of a run, from what it left on storage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.errors import StorageError
from ray_ckpt.tiers.address import is_uri, shown
from ray_ckpt.tiers.durable import durable_entries
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines
from ray_ckpt.tracker.recall import read_ledger, recall
from ray_ckpt.view.goodput import goodput_line
from ray_ckpt.view.human import human_bytes

_SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's own list of checkpoints


def surviving_steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The surviving history: per step its last line, in the order of steps."""
    lines = {int(line["step"]): line for line in read_lines(run_dir / STEPS_NAME)}
    return dict(sorted(lines.items()))


def summary(run_dir: Path) -> str:
    """Loss, goodput so far, interruptions, checkpoints, and where to look further."""
    memory = recall(run_dir)
    steps = surviving_steps(run_dir)
    stack = memory.stack or {}
    where = stack.get("remote") or str(run_dir / CHECKPOINTS_DIR)
    lines = []
    if steps:
        last = steps[max(steps)]
        lines.append(
            f"step {last['step']}, loss {last['loss']:.4f}, {last['sample_offset']} samples"
        )
    ledger = read_ledger(run_dir)
    if ledger is not None and steps:
        lines.append(goodput_line(ledger))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(memory.interruptions.items()))
    lines.append(f"interruptions: {kinds or 'none'}; steps done again: {memory.lost_steps}")
    lines.append(
        f"checkpoints: {_checkpoints(run_dir, stack)}, in {shown(where) if is_uri(where) else where}"
    )
    lines.append(
        f"look further: ray-ckpt ls {run_dir}   ray-ckpt verify {run_dir}   ray-ckpt goodput {run_dir}"
    )
    return "\n".join(lines)


def _checkpoints(run_dir: Path, stack: Mapping[str, Any]) -> str:
    tiers = (
        Stack(use=("memory", "durable"), remote=stack["remote"]) if stack.get("remote") else Stack()
    )
    try:
        found = [entry for entry in durable_entries(tiers, run_dir) if entry.usable]
    except StorageError as error:
        return f"they cannot be listed ({error})"
    size = sum(entry.manifest.total_bytes for entry in found if entry.manifest)
    return f"{len(found)} usable, {human_bytes(size)}"


def snapshot_problem(run_dir: Path) -> str | None:
    """Sets Ray Train's list of checkpoints aside when it names one that is gone, and says so.

    Ray refuses to start a run whose list names a missing folder (Ray 2.60), or whose list it cannot read
    (ray#62391). The manifests are the truth; the list is made anew.
    """
    path = run_dir / _SNAPSHOT
    try:
        text = path.read_text()
    except OSError:
        return None  # no list, nothing to refuse
    try:
        missing = [name for name in _named(json.loads(text)) if not (run_dir / name).exists()]
    except ValueError:
        missing = ["(the file is not JSON)"]
    if not missing:
        return None
    path.replace(path.with_suffix(".json.old"))
    return f"Ray Train's {_SNAPSHOT} names what is not there ({missing[0]}): set aside, the manifests count"


def _named(value: Any) -> list[str]:
    """Every checkpoint folder that a snapshot names, wherever in it."""
    if isinstance(value, dict):
        own = [v for k, v in value.items() if k == "checkpoint_dir_name" and isinstance(v, str)]
        return own + [name for v in value.values() for name in _named(v)]
    if isinstance(value, list):
        return [name for v in value for name in _named(v)]
    return []
