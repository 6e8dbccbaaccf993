"""`ray-ckpt interruptions`: when and why attempts of a run ended; and what is known of failures from before a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from ray_ckpt.commands.output import print_json
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.policy.history import COLUMNS, history_of_csv, history_to_json
from ray_ckpt.policy.words import seconds
from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines
from ray_ckpt.view.human import shorten
from ray_ckpt.view.place import open_run
from ray_ckpt.view.tables import Column, printable, render_table

IMPORT = "import"
_FIELDS = ("time", "generation", "kind", "cause", "step", "lost_steps")


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the command.

    Args:
        add: makes a command of a name, a function and a sentence.
    """
    command = add(
        "interruptions",
        command_interruptions,
        "List when and why attempts ended; or, as `interruptions import FILE.csv`, make what was seen before a run "
        f"into a file for --policy.history. Columns: {', '.join(COLUMNS)}.",
    )
    command.add_argument(
        "file", metavar="FILE.csv", nargs="?", help="with RUN given as the word import: the table"
    )
    command.add_argument(
        "--to", default=None, metavar="FILE.json", help="with import (default: beside FILE.csv)"
    )


def command_interruptions(args: argparse.Namespace) -> int:
    """`interruptions RUN`, or `interruptions import FILE.csv`."""
    if args.run == IMPORT and args.file:
        return _import(Path(args.file), args.to, as_json=args.json)
    if args.file or args.to:
        raise ConfigError("FILE.csv and --to go with: ray-ckpt interruptions import FILE.csv")
    run = open_run(args.run, args.storage)
    with run.records_folder() as folder:
        found = interruptions(list(read_lines(folder / JOURNAL_NAME)))
    if args.json:
        print_json(found)
    elif not found:
        print(f"{printable(str(run))}: no interruptions")
    else:
        print(interruptions_text(found))
    return 0


def interruptions(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The interruptions in a journal, oldest first, with the number of workers of each."""
    sizes = {
        event.get("generation"): event.get("world_size")
        for event in events
        if event.get("event") == "attempt_started"
    }
    return [
        {
            **{name: event.get(name) for name in _FIELDS},
            "world_size": sizes.get(event.get("generation")),
        }
        for event in events
        if event.get("event") == "interruption"
    ]


def interruptions_text(found: list[dict[str, Any]]) -> str:
    """As a table."""
    columns = [
        Column("TIME"),
        Column("ATTEMPT", "right"),
        Column("WORKERS", "right"),
        Column("STEP", "right"),
        Column("LOST", "right"),
        Column("KIND"),
        Column("CAUSE"),
    ]
    rows = [
        [
            _date(each["time"]),
            *(_text(each[name]) for name in ("generation", "world_size", "step", "lost_steps")),
            _text(each["kind"]),
            shorten(_text(each["cause"]), 100),
        ]
        for each in found
    ]
    return render_table(columns, rows)


def _date(time_s: Any) -> str:
    if not isinstance(time_s, int | float):
        return "-"
    return datetime.fromtimestamp(time_s).astimezone().isoformat(" ", "seconds")


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _import(table: Path, to: str | None, *, as_json: bool) -> int:
    target = table.with_suffix(".json") if to is None else Path(to)
    try:
        seen = history_of_csv(table.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{table} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{table}: {error}") from error
    text = json.dumps(history_to_json(seen), indent=2)
    try:
        target.write_text(text + "\n")
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    if as_json:
        print(text)
        return 0
    for each in seen:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(each.failures.items()))
        print(f"{each.world_size} workers: {seconds(each.exposure_s)}, {kinds or 'no failures'}")
    print(f"{target}: give it to runs with --policy.history {target.absolute()}")
    return 0
