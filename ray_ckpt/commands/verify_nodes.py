"""`ray-ckpt verify --nodes`: has the nodes of a run that trains read back what they hold.

Their memory and disks are theirs: the run's tracker asks the holder on each node, which reads beside the training.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.commands.steer import running_tracker, wait
from ray_ckpt.errors import StorageError
from ray_ckpt.view.tables import paint, printable, wants_colour


def copies(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each checkpoint in each tier on the nodes, once all of it was read: as `verify --json` prints them.

    Raises:
        ConfigError: the run does not train, or its Ray is not found.
        StorageError: it takes longer than ``--timeout-s``.
    """
    tracker, _ = running_tracker(args)
    tracker.call("ask_read_back")
    deadline = time.monotonic() + args.timeout_s
    while True:
        rows = _read_back(tracker)
        left = sum(not row["done"] for row in rows)
        if not left:
            break
        wait(deadline, args.timeout_s, f"{left} of {len(rows)} copies on the nodes were not read")
    found = [{key: value for key, value in row.items() if key != "done"} for row in rows]
    if not args.json:
        for row in found:
            _print(row)
    return found


def _read_back(tracker: Any) -> list[dict[str, Any]]:
    from ray.exceptions import RayError

    try:
        rows: list[dict[str, Any]] = tracker.call("read_back")
    except RayError as error:
        raise StorageError(f"the run's tracker is gone ({type(error).__name__})") from error
    return rows


def _print(row: dict[str, Any]) -> None:
    word = paint(
        "ok" if row["ok"] else "FAULT", "good" if row["ok"] else "bad", colour=wants_colour()
    )
    many = len(row["nodes"])
    name = checkpoint_name(row["step"], row["generation"])
    print(f"{name}  {word}  in {row['tier']} of {many} node{'' if many == 1 else 's'}")
    for fault in row["faults"]:
        print(f"  {printable(fault['path'] or '-')}: {printable(fault['fault'])}")
