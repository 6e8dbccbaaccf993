"""`ray-ckpt`: look at the checkpoints of a run and prove them, from nothing but its folder.

Works on a storage path without Ray and (but for `export` and `drill`) without torch, so it answers at once, on any
machine that sees the storage, also while the run goes on. The commands here change nothing in a run; those
that pin and delete are in :mod:`ray_ckpt.cli_retention`, and `drill` writes its outcome beside the manifest.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ray_ckpt import drill_command, export_command
from ray_ckpt.checkpoint.drilled import Drilled, read_drills
from ray_ckpt.checkpoint.listing import CheckpointEntry, list_checkpoints, usable
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.quarantine import read_quarantine_note
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.cli_retention import add_retention_commands
from ray_ckpt.errors import ConfigError, RayCkptError, StorageError
from ray_ckpt.view.human import ago, human_bytes, human_count, human_duration
from ray_ckpt.view.keeping import Keeping
from ray_ckpt.view.runs import find_run, pick, verified_times
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
        prog="ray-ckpt",
        description="Look at the checkpoints of a run, prove them, pin them, delete the old ones.",
        **layout,
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
    export = add(
        "export",
        export_command.command_export,
        "Write the weights of a checkpoint as safetensors.",
    )
    export_command.add_arguments(export, step_help)
    drill = add(
        "drill",
        drill_command.command_drill,
        "Restore a checkpoint as a restart would, on one CPU, and compare its loss.",
    )
    drill_command.add_arguments(drill, step_help)
    add_retention_commands(add, step_help)
    return parser


def command_ls(args: argparse.Namespace) -> int:
    """`ls RUN`: one line per checkpoint folder."""
    run = find_run(args.run, args.storage)
    entries = list_checkpoints(run)
    verified_at, keeping = verified_times(run), Keeping(run, entries)
    if args.json:
        listing = [{**_listing(e, verified_at), **keeping.of(e.folder.name)} for e in entries]
        _print_json(listing)
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
    drills = {entry.folder.name: drill for entry in entries if (drill := _drill(entry))}
    if drills:
        columns.insert(-1, Column("DRILLED"))
    rows, styles = [], []
    for entry in entries:
        state, style = _state(entry)
        state += keeping.pinned(entry.folder.name)
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
        row = [str(entry.step), str(entry.generation), *known, verified, state]
        if drills:
            row.insert(-1, _drilled(drills.get(entry.folder.name), now_s))
        rows.append(row)
        styles.append(style)
    print(render_table(columns, rows, styles=styles, colour=_colour()))
    good = usable(entries)
    newest = f"newest step {good[0].step}" if good else "nothing to restore from"
    total = human_bytes(sum(e.manifest.total_bytes for e in entries if e.manifest is not None))
    print(f"{len(good)} of {len(entries)} usable, {newest}, {total} in {printable(str(run))}")
    return 0


def command_show(args: argparse.Namespace) -> int:
    """`show RUN STEP`: one manifest, in full."""
    run = find_run(args.run, args.storage)
    entries = list_checkpoints(run)
    entry, keeping = pick(entries, args.step), Keeping(run, entries)
    if entry.manifest is None and entry.quarantined is not None and not args.json:
        _show_note(entry)
        return EXIT_FAULT
    if entry.manifest is None:
        print(f"ray-ckpt: {entry.folder / MANIFEST_NAME}: {entry.fault}", file=sys.stderr)
        return EXIT_FAULT
    document = entry.manifest.to_json()
    if args.json:
        more = {"quarantined": entry.quarantined, "drilled": _drill_json(entry)}
        _print_json({**document, **more, **keeping.of(entry.folder.name)})
        return 0
    files = document.pop("files")
    committed_at = document["committed_at"]
    when = datetime.fromtimestamp(committed_at).astimezone().isoformat(" ", "seconds")
    document["committed_at"] = f"{when} ({ago(committed_at, time.time())})"
    for name in ("sample_offset", "tokens"):
        document[name] = f"{document[name]} ({human_count(document[name])})"
    document["segment"] = _segment(document["segment"])
    pairs = [("state", _state(entry)[0]), *keeping.fields(entry.folder.name)]
    if drill := _drill(entry):
        pairs.append(("drilled", f"{drill.day} {drill.words}"))
    pairs += [("folder", str(entry.folder)), *_flat(document)]
    pairs.append(("files", f"{len(files)}, {human_bytes(entry.manifest.total_bytes)}"))
    print(render_fields(pairs), end="\n\n")
    columns = [Column("FILE"), Column("SIZE", "right"), Column(entry.manifest.checksum_algorithm)]
    rows = [[file["path"], human_bytes(file["bytes"]), file["checksum"]] for file in files]
    print(render_table(columns, rows))
    return 0


def _show_note(entry: CheckpointEntry) -> None:
    """What is known of a checkpoint that was set aside before it had a manifest."""
    note = read_quarantine_note(entry.folder) or {}
    findings = note.pop("findings", [])
    pairs = [("state", _state(entry)[0]), ("folder", str(entry.folder)), *_flat(note)]
    print(render_fields(pairs))
    if findings:
        rows = [[str(f.get("kind", "")), str(f.get("text", ""))] for f in findings]
        print("\n" + render_table([Column("FINDING"), Column("WHAT")], rows))


def command_verify(args: argparse.Namespace) -> int:
    """`verify RUN [STEP]`: reads every byte of one or of all committed checkpoints."""
    run = find_run(args.run, args.storage)
    entries = list_checkpoints(run)
    if args.step is not None:
        entries = [pick(entries, args.step)]
    results = []
    for entry in entries:
        if not entry.committed and args.step is None:
            why = f"quarantined ({entry.quarantined}), " if entry.quarantined else ""
            _note(f"{entry.folder.name}: {why}not committed, nothing to verify")
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


def _listing(entry: CheckpointEntry, verified_at: dict[str, float]) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "generation": entry.generation,
        "committed_at": manifest and manifest.committed_at,
        "tiers": [TIER] if manifest is not None else [],
        "verified_at": verified_at.get(entry.folder.name),
        "world_size": manifest and manifest.world_size,
        "sample_offset": manifest and manifest.sample_offset,
        "bytes": manifest and manifest.total_bytes,
        "fault": entry.fault,
        "quarantined": entry.quarantined,
        "drilled": _drill_json(entry),
    }


def _drill(entry: CheckpointEntry) -> Drilled | None:
    """The newest drill of a checkpoint; one that storage does not tell of is none."""
    try:
        drills = read_drills(entry.folder) if entry.manifest is not None else ()
    except StorageError:
        return None
    return drills[-1] if drills else None


def _drill_json(entry: CheckpointEntry) -> dict[str, Any] | None:
    drill = _drill(entry)
    return None if drill is None else drill.to_json()


def _drilled(drill: Drilled | None, now_s: float) -> str:
    if drill is None:
        return "-"
    return f"{f'ok in {drill.restore_s:.1f} s' if drill.ok else 'FAILED'}, {ago(drill.time, now_s)}"


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


def _segment(mark: dict[str, Any]) -> str:
    """The segment of a checkpoint in one line; the first needs no explanation."""
    if not mark["number"]:
        return "0"
    since = f"since step {mark['start_step']}, sample {mark['start_offset']}"
    return f"{mark['number']}, {since}: {mark['reason']}"


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


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _colour() -> bool:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


if __name__ == "__main__":
    sys.exit(main())
