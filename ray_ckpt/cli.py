"""`ray-ckpt`: look at the checkpoints of a run and prove them, from nothing but its folder.

Works on a storage path without Ray and (but for `export`) without torch, so it answers at once, on any
machine that sees the storage, also while the run goes on. It changes nothing in a run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST_NAME,
    CheckpointEntry,
    list_checkpoints,
    usable,
)
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import ConfigError, RayCkptError, StorageError
from ray_ckpt.export_command import add_arguments, command_export
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME, read_lines
from ray_ckpt.view.human import ago, human_bytes, human_count, human_duration
from ray_ckpt.view.tables import Column, Style, paint, printable, render_fields, render_table

STORAGE_VARIABLE = "RAY_CKPT_STORAGE"
DEFAULT_STORAGE = "~/ray_ckpt/runs"
TIER = "durable"  # the one tier whose copies lie in the run's folder

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 1, 2, 130, 141

_EXIT_CODES = """exit codes:
  0    done; for verify: every committed checkpoint is as it was written
  1    a fault, named with its file; or storage that cannot be read
  2    wrong usage: an unknown option, run or step
  130  interrupted
  141  the reader of the output went away (as in `ray-ckpt ls RUN | head -1`)
"""
_STEP = re.compile(r"(?:step-)?([0-9]{1,18})(?:-g([0-9]{1,9}))?")
_NAMES_SHOWN = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (see `--help`)."""
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that the terminal's encoding lacks must not end the listing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"ray-ckpt: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RayCkptError as error:
        print(f"ray-ckpt: {error}", file=sys.stderr)
        return EXIT_FAULT
    except BrokenPipeError:
        # Python flushes once more at exit; into nothing, or it would complain after all.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The command line: commands that share RUN, --storage and --json."""
    layout: dict[str, Any] = {
        "epilog": _EXIT_CODES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(
        prog="ray-ckpt", description="Look at the checkpoints of a run and prove them.", **layout
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    step_help = "a step, such as 1200 (newest generation), or 1200-g3"

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, **layout)
        command.set_defaults(command=function)
        command.add_argument(
            "run", metavar="RUN", help="a run's folder, or the name of a run below --storage"
        )
        command.add_argument(
            "--storage",
            default=os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE,
            help=f"folder of runs (default: ${STORAGE_VARIABLE} or {DEFAULT_STORAGE})",
        )
        command.add_argument("--json", action="store_true", help="print JSON for scripts")
        return command

    add("ls", command_ls, "List checkpoints, newest first, usable or not.")
    show = add("show", command_show, "Show all that one checkpoint's manifest says.")
    show.add_argument("step", metavar="STEP", help=step_help)
    verify = add("verify", command_verify, "Read every byte again and compare checksums.")
    verify.add_argument("step", metavar="STEP", nargs="?", help=f"{step_help}; default: all")
    export = add("export", command_export, "Write the weights of a checkpoint as safetensors.")
    add_arguments(export, step_help)
    return parser


def command_ls(args: argparse.Namespace) -> int:
    """`ls RUN`: one line per checkpoint folder."""
    run = find_run(args.run, args.storage)
    entries = list_checkpoints(run)
    verified_at = verified_times(run)
    if args.json:
        _print_json([_listing(entry, verified_at) for entry in entries])
        return 0
    if not entries:
        print(f"{printable(str(run))}: no checkpoints yet")
        return 0
    now_s = time.time()
    columns = [
        Column("STEP", "right"),
        Column("GEN", "right"),
        Column("COMMITTED"),
        Column("SIZE", "right"),
        Column("WORKERS", "right"),
        Column("SAMPLES", "right"),
        Column("VERIFIED"),
        Column("STATE"),
    ]
    rows, styles = [], []
    for entry in entries:
        state, style = _state(entry)
        checked_s = verified_at.get(entry.folder.name)
        verified = "-" if checked_s is None else ago(checked_s, now_s)
        manifest = entry.manifest
        known = ("-", "-", "-", "-")
        if manifest is not None:
            known = (
                ago(manifest.committed_at, now_s),
                human_bytes(manifest.total_bytes),
                str(manifest.world_size),
                human_count(manifest.sample_offset),
            )
        rows.append([str(entry.step), str(entry.generation), *known, verified, state])
        styles.append(style)
    print(render_table(columns, rows, styles=styles, colour=_colour()))
    good = usable(entries)
    newest = f"newest step {good[0].step}" if good else "nothing to restore from"
    total = human_bytes(sum(e.manifest.total_bytes for e in entries if e.manifest is not None))
    print(f"{len(good)} of {len(entries)} usable, {newest}, {total} in {printable(str(run))}")
    return 0


def command_show(args: argparse.Namespace) -> int:
    """`show RUN STEP`: one manifest, in full."""
    entry = pick(list_checkpoints(find_run(args.run, args.storage)), args.step)
    if entry.manifest is None:
        print(f"ray-ckpt: {entry.folder / MANIFEST_NAME}: {entry.fault}", file=sys.stderr)
        return EXIT_FAULT
    document = entry.manifest.to_json()
    if args.json:
        _print_json({**document, "quarantined": entry.quarantined})
        return 0
    files = document.pop("files")
    committed_at = document["committed_at"]
    when = datetime.fromtimestamp(committed_at).astimezone().isoformat(" ", "seconds")
    document["committed_at"] = f"{when} ({ago(committed_at, time.time())})"
    for name in ("sample_offset", "tokens"):
        document[name] = f"{document[name]} ({human_count(document[name])})"
    pairs = [("state", _state(entry)[0]), ("folder", str(entry.folder)), *_flat(document)]
    pairs.append(("files", f"{len(files)}, {human_bytes(entry.manifest.total_bytes)}"))
    print(render_fields(pairs), end="\n\n")
    columns = [Column("FILE"), Column("SIZE", "right"), Column(entry.manifest.checksum_algorithm)]
    rows = [[file["path"], human_bytes(file["bytes"]), file["checksum"]] for file in files]
    print(render_table(columns, rows))
    return 0


def command_verify(args: argparse.Namespace) -> int:
    """`verify RUN [STEP]`: reads every byte of one or of all committed checkpoints."""
    run = find_run(args.run, args.storage)
    entries = list_checkpoints(run)
    if args.step is not None:
        entries = [pick(entries, args.step)]
    results = []
    for entry in entries:
        if not entry.committed and args.step is None:
            _note(f"{entry.folder.name}: not committed, nothing to verify")
            continue
        started_s = time.monotonic()
        faults = _faults(entry)
        if faults and entry.manifest and not (entry.folder / MANIFEST_NAME).exists():
            # Retention takes the manifest away first: what is missing now is no fault.
            _note(f"{entry.folder.name}: deleted by the run meanwhile")
            continue
        results.append(_verdict(entry, faults))
        if not args.json:
            _print_verdict(entry, faults, time.monotonic() - started_s)
    if args.json:
        _print_json(results)
    num_bad = sum(not result["ok"] for result in results)
    if not results:
        _note(f"{run}: no committed checkpoint to verify")
    elif num_bad:
        _note(f"{num_bad} of {len(results)} checkpoints damaged")
    return EXIT_FAULT if num_bad else 0


def find_run(text: str, storage_text: str) -> Path:
    """The folder of a run, from a path or from a name below the storage.

    Raises:
        ConfigError: there is no run; the message says what is there.
        StorageError: storage cannot be read.
    """
    if not text:
        raise ConfigError("RUN is empty; give a run's folder or the name of a run")
    storage = Path(storage_text).expanduser().absolute()
    given = Path(text).expanduser().absolute()
    is_name = text == Path(text).name
    for folder in (storage / text, given) if is_name else (given, storage / text):
        if _is_run(folder):
            return folder
    around = next((parent for parent in given.parents if _is_run(parent)), None)
    if around is not None:
        raise ConfigError(f"{given} is inside a run, not a run; give {around}")
    said = f"{given} is not a run (a run has {CHECKPOINTS_DIR}/ or {JOURNAL_NAME})"
    if is_name:
        said = f"no run {text!r} in {storage}"
    for place in (given, storage):
        if runs := _runs_in(place):
            raise ConfigError(f"{said}. Runs in {place}: {_some(runs)}")
    raise ConfigError(f"{said}, and no other run is there. Say where with --storage FOLDER.")


def pick(entries: list[CheckpointEntry], text: str) -> CheckpointEntry:
    """The checkpoint of a step: the newest committed generation, or the one asked for.

    Raises:
        ConfigError: the step is not a step, or there is no such checkpoint.
    """
    match = _STEP.fullmatch(text)
    if match is None:
        raise ConfigError(f"STEP is {text!r}; give a number such as 1200, or 1200-g3")
    step, generation = int(match[1]), match[2] and int(match[2])
    found = [e for e in entries if e.step == step and generation in (None, e.generation)]
    if not found:
        there = _some([f"{e.step}-g{e.generation}" for e in entries]) or "none"
        raise ConfigError(f"no checkpoint {text}; there are: {there}")
    # An attempt that died while it saved must not hide the good save of the attempt before.
    return next((entry for entry in found if entry.committed), found[0])


def verified_times(run: Path) -> dict[str, float]:
    """Name of a checkpoint to the last time the run verified it, from the run's journal.

    Every event that proves a checkpoint's bytes carries `verified: <name of the checkpoint>`.
    """
    times: dict[str, float] = {}
    for event in read_lines(run / JOURNAL_NAME):
        name, time_s = event.get("verified"), event.get("time")
        if isinstance(name, str) and isinstance(time_s, int | float):
            times[name] = max(time_s, times.get(name, time_s))
    return times


def _listing(entry: CheckpointEntry, verified_at: dict[str, float]) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "generation": entry.generation,
        "committed_at": manifest and manifest.committed_at,
        "tiers": [TIER] if manifest is not None else [],
        "verified_at": verified_at.get(entry.folder.name),
        "pinned": False,
        "world_size": manifest and manifest.world_size,
        "sample_offset": manifest and manifest.sample_offset,
        "bytes": manifest and manifest.total_bytes,
        "fault": entry.fault,
        "quarantined": entry.quarantined,
    }


def _verdict(entry: CheckpointEntry, faults: list[Fault]) -> dict[str, Any]:
    return {
        "step": entry.step,
        "generation": entry.generation,
        "tier": TIER,
        "ok": not faults,
        "faults": [{"path": fault.path, "fault": fault.fault} for fault in faults],
        "quarantined": entry.quarantined,
    }


def _faults(entry: CheckpointEntry) -> list[Fault]:
    if entry.manifest is None:
        return [Fault(MANIFEST_NAME, str(entry.fault))]
    return verify_files(entry.folder, entry.manifest)


def _print_verdict(entry: CheckpointEntry, faults: list[Fault], took_s: float) -> None:
    size = human_bytes(entry.manifest.total_bytes) if entry.manifest is not None else "-"
    style: Style = "bad" if faults else "good"
    word = paint("FAULT" if faults else "ok", style, colour=_colour())
    kept = f", quarantined: {printable(entry.quarantined)}" if entry.quarantined else ""
    print(f"{entry.folder.name}  {word}  {size} in {human_duration(took_s)}{kept}")
    for fault in faults:
        print(f"  {printable(str(entry.folder / fault.path))}: {printable(fault.fault)}")
    sys.stdout.flush()  # one checkpoint can take minutes


def _state(entry: CheckpointEntry) -> tuple[str, Style]:
    if entry.quarantined is not None:
        return f"QUARANTINED: {entry.quarantined}", "bad"
    if not entry.committed:
        return "not committed", "dim"
    if entry.mistrusted:
        return f"NOT TRUSTED: {entry.fault}", "bad"
    if entry.manifest is None:
        return f"DAMAGED: {entry.fault}", "bad"
    return "committed", ""


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested fields as lines: metrics.loss, versions.torch."""
    pairs = []
    for name, value in document.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            pairs.append((prefix + name, text))
    return pairs


def _is_run(folder: Path) -> bool:
    try:
        marks = (CHECKPOINTS_DIR, JOURNAL_NAME, STEPS_NAME)
        return any((folder / mark).exists() for mark in marks)
    except OSError as error:
        raise StorageError(f"{folder} cannot be read ({error}); mend access to it") from error


def _runs_in(folder: Path) -> list[str]:
    """Names of runs, for a hint: what cannot be read is left out."""
    with contextlib.suppress(OSError, StorageError):
        return sorted(item.name for item in folder.iterdir() if _is_run(item))
    return []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _colour() -> bool:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


if __name__ == "__main__":
    sys.exit(main())
