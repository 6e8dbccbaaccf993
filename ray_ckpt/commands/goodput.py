"""`ray-ckpt goodput`: where the wall time of a run went, from its journal and its step lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ray_ckpt.commands.output import print_json
from ray_ckpt.errors import ConfigError
from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view.goodput import attempts_text, days_text, goodput_text
from ray_ckpt.view.place import open_run
from ray_ckpt.view.tables import printable


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the command.

    Args:
        add: makes a command of a name, a function and a sentence.
    """
    command = add(
        "goodput",
        command_goodput,
        "Show where the wall time went: useful steps, saves, rework, restarts by phase, idle.",
    )
    command.add_argument("--attempts", action="store_true", help="also a line for each attempt")
    command.add_argument("--days", action="store_true", help="also a line for each day (UTC)")


def command_goodput(args: argparse.Namespace) -> int:
    """`goodput RUN`: the ledger of a run."""
    run = open_run(args.run, args.storage)
    with run.records_folder() as folder:
        ledger = read_ledger(folder)
    if ledger is None:
        raise ConfigError(
            f"{run}: no attempt has begun, or its journal is lost: no time to tell of"
        )
    if args.json:
        print_json(ledger.to_json())
        return 0
    texts = [printable(str(run)), goodput_text(ledger)]
    if args.attempts:
        texts.append(attempts_text(ledger))
    if args.days:
        texts.append(days_text(ledger))
    print("\n\n".join(texts))
    return 0
