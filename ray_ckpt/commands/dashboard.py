"""`ray-ckpt dashboard enable|disable|status`: the page of checkpoints in Ray's dashboard."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ray_ckpt import ray_dashboard

_ACTIONS = {
    "enable": ray_dashboard.enable,
    "disable": ray_dashboard.disable,
    "status": ray_dashboard.status,
}


def add_dashboard_command(commands: Any, layout: dict[str, Any]) -> None:
    """Adds the command; it is about an installation of Ray, not about a run."""
    text = "Put the page /checkpoints into the dashboard of this Python's Ray, or take it away."
    command = commands.add_parser("dashboard", help=text, description=text, **layout)
    command.set_defaults(command=command_dashboard)
    command.add_argument("action", choices=list(_ACTIONS), help="what to do")
    command.add_argument("--json", action="store_true", help="print JSON for scripts")


def command_dashboard(args: argparse.Namespace) -> int:
    """`dashboard ACTION`."""
    before = ray_dashboard.status()
    found = _ACTIONS[args.action]()
    if args.json:
        print(json.dumps({**asdict(found), "folder": found.folder and str(found.folder)}, indent=2))
        return 0
    print(found.words)
    if found.enabled and not before.enabled:
        print("Each Ray that is started from now on has http://HEAD:8265/checkpoints.")
    if before.enabled and not found.enabled:
        print("A Ray that runs keeps the page until it ends.")
    return 0
