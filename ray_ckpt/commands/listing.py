"""`ray-ckpt ls` and `show`: the checkpoints of a run, and all that is known of one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.drilled import Drilled
from ray_ckpt.checkpoint.listing import NO_MANIFEST, Listed, usable
from ray_ckpt.checkpoint.names import MANIFEST_NAME, parse_checkpoint_name
from ray_ckpt.commands.output import EXIT_FAULT, note, print_json
from ray_ckpt.view.human import ago, human_bytes, human_count
from ray_ckpt.view.keeping import Keeping
from ray_ckpt.view.place import open_run
from ray_ckpt.view.runs import pick
from ray_ckpt.view.tables import (
    Column,
    Style,
    printable,
    render_fields,
    render_table,
    wants_colour,
)
from ray_ckpt.view.told import Facts

_ON_NODES = "committed on the nodes alone"


def command_ls(args: argparse.Namespace) -> int:
    """`ls RUN`: one line per checkpoint folder."""
    run = open_run(args.run, args.storage)
    entries = run.entries()
    verified_at, keeping = run.verified_times(), run.keeping(entries)
    if args.json:
        print_json([_listing(entry, verified_at, keeping) for entry in _all(entries, keeping)])
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
        print_json({**document, **more, **keeping.of(entry.folder.name)})
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
        print_json(_listing(entry, {}, keeping))
        return 0
    facts = keeping.facts(entry)
    pairs = [("state", _ON_NODES), *keeping.fields(entry), *facts.fields(time.time())]
    print(render_fields(pairs))
    note("from the run's journal: the manifest and the list of files are on the nodes")
    return 0


def _show_note(entry: Listed, known: dict[str, Any]) -> None:
    """What is known of a checkpoint that was set aside before it had a manifest."""
    findings = known.pop("findings", [])
    pairs = [("state", _state(entry)[0]), ("folder", str(entry.folder)), *_flat(known)]
    print(render_fields(pairs))
    if findings:
        rows = [[str(f.get("kind", "")), str(f.get("text", ""))] for f in findings]
        print("\n" + render_table([Column("FINDING"), Column("WHAT")], rows))


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
