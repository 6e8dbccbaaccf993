"""`ray-ckpt`: look at the checkpoints of a run and prove them, from nothing but its folder.

Works on a storage path, or the address of an object store, without Ray and (but for `export` and `drill`) without
torch, so it answers at once, on any machine that sees the storage, also while the run goes on. The commands here
change nothing in a run; those that pin and delete are in :mod:`ray_ckpt.commands.retention`, and `drill` writes its
outcome beside the manifest. `plan` is about no run at all.
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
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.drilled import Drilled
from ray_ckpt.checkpoint.listing import NO_MANIFEST, Listed, usable
from ray_ckpt.checkpoint.names import MANIFEST_NAME, parse_checkpoint_name
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.commands import completion as completion_command
from ray_ckpt.commands import dashboard as dashboard_command
from ray_ckpt.commands import drill as drill_command
from ray_ckpt.commands import export as export_command
from ray_ckpt.commands import goodput as goodput_command
from ray_ckpt.commands import interruptions as interruptions_command
from ray_ckpt.commands import plan as plan_command
from ray_ckpt.commands import report as report_command
from ray_ckpt.commands import simulate as simulate_command
from ray_ckpt.commands import steer as steer_command
from ray_ckpt.commands import verify_nodes
from ray_ckpt.commands.parser import Parser
from ray_ckpt.commands.retention import add_retention_commands
from ray_ckpt.errors import ConfigError, RayCkptError
from ray_ckpt.view.human import ago, human_bytes, human_count, human_duration
from ray_ckpt.view.keeping import Keeping
from ray_ckpt.view.place import FolderRun, RemoteRun, open_run
from ray_ckpt.view.runs import pick
from ray_ckpt.view.tables import (
    Column,
    Style,
    paint,
    printable,
    render_fields,
    render_table,
    wants_colour,
)
from ray_ckpt.view.told import Facts

STORAGE_VARIABLE = "RAY_CKPT_STORAGE"
DEFAULT_STORAGE = "~/ray_ckpt/runs"
TIER = "durable"  # the one tier whose copies lie in the run's folder
_ON_NODES = "committed on the nodes alone"

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 1, 2, 130, 141

_EXIT_CODES = """exit codes:
  0    done; for verify: every committed checkpoint is as it was written
  1    a fault, named with its file; storage that cannot be read; or a wait that took too long
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
    parser = Parser(
        prog="ray-ckpt",
        description="Look at the checkpoints of a run, prove them, pin them, delete the old ones; see where time went.",
        **layout,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    step_help = "a step, such as 1200 (newest generation), or 1200-g3"

    def add(
        name: str, function: Any, text: str, *, folder_only: bool = False
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, **layout)
        command.set_defaults(command=function)
        address = "" if folder_only else "its address on an object store, "
        command.add_argument(
            "run",
            metavar="RUN",
            help=f"a run's folder, {address}or the name of a run below --storage",
        )
        command.add_argument(
            "--storage",
            default=os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE,
            help=f"folder of runs{'' if folder_only else ', or an address'} "
            f"(default: ${STORAGE_VARIABLE} or {DEFAULT_STORAGE})",
        )
        command.add_argument("--json", action="store_true", help="print JSON for scripts")
        return command

    add("ls", command_ls, "List checkpoints, newest first, usable or not.")
    show = add("show", command_show, "Show all that one checkpoint's manifest says.")
    show.add_argument("step", metavar="STEP", help=step_help)
    verify = add("verify", command_verify, "Read every byte again and compare checksums.")
    verify.add_argument("step", metavar="STEP", nargs="?", help=f"{step_help}; default: all")
    verify.add_argument(
        "--nodes",
        action="store_true",
        help="of a run that trains: also the copies in memory and on the disks of its nodes, all of them",
    )
    steer_command.add_arguments(verify)
    export = add(
        "export",
        export_command.command_export,
        "Write the weights of a checkpoint as safetensors.",
        folder_only=True,
    )
    export_command.add_arguments(export, step_help)
    drill = add(
        "drill",
        drill_command.command_drill,
        "Restore a checkpoint as a restart would, on one CPU, and compare its loss.",
        folder_only=True,
    )
    drill_command.add_arguments(drill, step_help)
    save = add(
        "save",
        steer_command.command_save,
        "Have a run that trains save now, and wait.",
        folder_only=True,
    )
    stop = add(
        "stop",
        steer_command.command_stop,
        "Have a run save, and end its job.",
        folder_only=True,
    )
    for command in (save, stop):
        steer_command.add_arguments(command)
    goodput_command.add_command(add)
    interruptions_command.add_command(add)
    plan_command.add_command(commands, layout)
    simulate_command.add_command(commands, layout)
    add_retention_commands(add, step_help)
    report = add(
        "report",
        report_command.command_report,
        "Write what the dashboard shows of a run into one HTML file.",
    )
    report_command.add_arguments(report)
    dashboard_command.add_dashboard_command(commands, layout)
    completion_command.add_completion_command(commands, layout, parser)
    return parser


def command_ls(args: argparse.Namespace) -> int:
    """`ls RUN`: one line per checkpoint folder."""
    run = open_run(args.run, args.storage)
    entries = run.entries()
    verified_at, keeping = run.verified_times(), run.keeping(entries)
    if args.json:
        _print_json([_listing(entry, verified_at, keeping) for entry in _all(entries, keeping)])
        return 0
    durable, entries = entries, _all(entries, keeping)
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
    drills = {e.folder.name: drill for e in entries if (drill := keeping.drill(e.folder.name))}
    if drills:
        columns.insert(-1, Column("DRILLED"))
    if keeping.has_tiers:
        columns.insert(-1, Column("TIERS"))
    rows, styles = [], []
    for entry in entries:
        state, style = _state(entry)
        if not entry.committed and _tiers(entry, keeping):
            state = _ON_NODES
        state += keeping.pinned(entry.folder.name)
        facts = keeping.facts(entry)
        checked_s = _verified(entry, verified_at, facts)
        verified = "-" if checked_s is None else ago(checked_s, now_s)
        known = facts.cells(now_s)
        row = [str(entry.step), str(entry.generation), *known, verified, state]
        if drills:
            row.insert(-1, _drilled(drills.get(entry.folder.name), now_s))
        if keeping.has_tiers:
            row.insert(-1, " ".join(_tiers(entry, keeping)) or "-")
        rows.append(row)
        styles.append(style)
    print(render_table(columns, rows, styles=styles, colour=wants_colour()))
    good = usable(durable)
    newest = f"newest step {good[0].step}" if good else "nothing to restore from"
    total = human_bytes(sum(e.manifest.total_bytes for e in durable if e.manifest is not None))
    print(f"{len(good)} of {len(durable)} usable, {newest}, {total} in {printable(str(run))}")
    return 0


def command_show(args: argparse.Namespace) -> int:
    """`show RUN STEP`: one manifest, in full."""
    run = open_run(args.run, args.storage)
    entries = run.entries()
    keeping = run.keeping(entries)
    entry = pick(_all(entries, keeping), args.step)
    if not entry.committed and entry.quarantined is None and _tiers(entry, keeping):
        return _show_told(entry, keeping, as_json=args.json)
    if entry.manifest is None and entry.quarantined is not None and not args.json:
        _show_note(entry, run.note(entry))
        return EXIT_FAULT
    if entry.manifest is None:
        print(f"ray-ckpt: {entry.folder / MANIFEST_NAME}: {entry.fault}", file=sys.stderr)
        return EXIT_FAULT
    document = entry.manifest.to_json()
    if args.json:
        more: dict[str, Any] = {
            "quarantined": entry.quarantined,
            "drilled": _drill_json(entry, keeping),
        }
        more["tiers"] = _tiers(entry, keeping)
        facts = keeping.facts(entry)
        more |= {"stall_s": facts.stall_s, "upload_s": facts.upload_s, "read_back": facts.read_back}
        _print_json({**document, **more, **keeping.of(entry.folder.name)})
        return 0
    files = document.pop("files")
    committed_at = document["committed_at"]
    when = datetime.fromtimestamp(committed_at).astimezone().isoformat(" ", "seconds")
    document["committed_at"] = f"{when} ({ago(committed_at, time.time())})"
    for name in ("sample_offset", "tokens"):
        document[name] = f"{document[name]} ({human_count(document[name])})"
    document["segment"] = _segment(document["segment"])
    pairs = [("state", _state(entry)[0]), *keeping.fields(entry)]
    if drill := keeping.drill(entry.folder.name):
        pairs.append(("drilled", f"{drill.day} {drill.words}"))
    pairs += [("folder", str(entry.folder)), *_flat(document), *keeping.facts(entry).times()]
    pairs.append(("files", f"{len(files)}, {human_bytes(entry.manifest.total_bytes)}"))
    print(render_fields(pairs), end="\n\n")
    columns = [Column("FILE"), Column("SIZE", "right"), Column(entry.manifest.checksum_algorithm)]
    rows = [[file["path"], human_bytes(file["bytes"]), file["checksum"]] for file in files]
    print(render_table(columns, rows))
    return 0


def _show_told(entry: Listed, keeping: Keeping, *, as_json: bool) -> int:
    """What the journal tells of a checkpoint that only nodes have; its manifest is there."""
    if as_json:
        _print_json(_listing(entry, {}, keeping))
        return 0
    facts = keeping.facts(entry)
    pairs = [("state", _ON_NODES), *keeping.fields(entry), *facts.fields(time.time())]
    print(render_fields(pairs))
    _note("from the run's journal: the manifest and the list of files are on the nodes")
    return 0


def _show_note(entry: Listed, note: dict[str, Any]) -> None:
    """What is known of a checkpoint that was set aside before it had a manifest."""
    findings = note.pop("findings", [])
    pairs = [("state", _state(entry)[0]), ("folder", str(entry.folder)), *_flat(note)]
    print(render_fields(pairs))
    if findings:
        rows = [[str(f.get("kind", "")), str(f.get("text", ""))] for f in findings]
        print("\n" + render_table([Column("FINDING"), Column("WHAT")], rows))


def command_verify(args: argparse.Namespace) -> int:
    """`verify RUN [STEP]`: reads every byte of one or of all committed checkpoints."""
    run = open_run(args.run, args.storage)
    entries = run.entries()
    if args.step is not None:
        entries = [pick(entries, args.step)]
    results = []
    for entry in entries:
        if not entry.committed and args.step is None:
            why = f"quarantined ({entry.quarantined}), " if entry.quarantined else ""
            _note(f"{entry.folder.name}: {why}not committed, nothing to verify")
            continue
        started_s = time.monotonic()
        faults = _faults(run, entry)
        if faults and entry.manifest and not run.is_there(entry):
            # Retention takes the manifest away first: what is missing now is no fault.
            _note(f"{entry.folder.name}: deleted by the run meanwhile")
            continue
        results.append(_verdict(entry, faults))
        if not args.json:
            _print_verdict(entry, faults, time.monotonic() - started_s)
    if args.nodes:
        results += verify_nodes.copies(args)
    if args.json:
        _print_json(results)
    num_bad = sum(not result["ok"] for result in results)
    if not results:
        _note(f"{run}: no committed checkpoint to verify")
    elif num_bad:
        what = "checkpoints and copies" if args.nodes else "checkpoints"
        _note(f"{num_bad} of {len(results)} {what} damaged")
    return EXIT_FAULT if num_bad else 0


def _all(entries: list[Listed], keeping: Keeping) -> list[Listed]:
    """The listing, with the checkpoints that only nodes have, newest first."""
    root = entries[0].folder.parent if entries else Path()
    found = list(entries)
    for name in keeping.on_nodes_alone([entry.folder.name for entry in entries]):
        key = parse_checkpoint_name(name)
        if key is not None:
            found.append(Listed(root / name, *key, None, NO_MANIFEST))
    return sorted(found, key=lambda entry: (entry.step, entry.generation), reverse=True)


def _tiers(entry: Listed, keeping: Keeping) -> list[str]:
    return list(keeping.tiers(entry.folder.name, durable=entry.manifest is not None))


def _listing(entry: Listed, verified_at: dict[str, float], keeping: Keeping) -> dict[str, Any]:
    facts = keeping.facts(entry)
    return {
        "step": entry.step,
        "generation": entry.generation,
        **facts.to_json(),
        "tiers": _tiers(entry, keeping),
        "verified_at": _verified(entry, verified_at, facts),
        "fault": None if entry.fault == NO_MANIFEST and _tiers(entry, keeping) else entry.fault,
        "quarantined": entry.quarantined,
        "drilled": _drill_json(entry, keeping),
        **keeping.of(entry.folder.name),
    }


def _verified(entry: Listed, verified_at: dict[str, float], facts: Facts) -> float | None:
    """When a checkpoint was last read back: in the durable tier, or on the nodes where only those have it."""
    if entry.committed:
        return verified_at.get(entry.folder.name)
    return max(facts.read_back.values(), default=None)


def _drill_json(entry: Listed, keeping: Keeping) -> dict[str, Any] | None:
    drill = keeping.drill(entry.folder.name)
    return None if drill is None else drill.to_json()


def _drilled(drill: Drilled | None, now_s: float) -> str:
    if drill is None:
        return "-"
    return f"{f'ok in {drill.restore_s:.1f} s' if drill.ok else 'FAILED'}, {ago(drill.time, now_s)}"


def _verdict(entry: Listed, faults: list[Fault]) -> dict[str, Any]:
    return {
        "step": entry.step,
        "generation": entry.generation,
        "tier": TIER,
        "ok": not faults,
        "faults": [{"path": fault.path, "fault": fault.fault} for fault in faults],
        "quarantined": entry.quarantined,
    }


def _faults(run: FolderRun | RemoteRun, entry: Listed) -> list[Fault]:
    if entry.manifest is None:
        return [Fault(MANIFEST_NAME, str(entry.fault))]
    return run.faults(entry)


def _print_verdict(entry: Listed, faults: list[Fault], took_s: float) -> None:
    size = human_bytes(entry.manifest.total_bytes) if entry.manifest is not None else "-"
    style: Style = "bad" if faults else "good"
    word = paint("FAULT" if faults else "ok", style, colour=wants_colour())
    kept = f", quarantined: {printable(entry.quarantined)}" if entry.quarantined else ""
    print(f"{entry.folder.name}  {word}  {size} in {human_duration(took_s)}{kept}")
    for fault in faults:
        print(f"  {printable(str(entry.folder / fault.path))}: {printable(fault.fault)}")
    sys.stdout.flush()  # one checkpoint can take minutes


def _state(entry: Listed) -> tuple[str, Style]:
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


if __name__ == "__main__":
    sys.exit(main())
