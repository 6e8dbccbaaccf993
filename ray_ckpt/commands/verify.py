"""`ray-ckpt verify`: reads every byte of a run's checkpoints again."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.commands import verify_nodes
from ray_ckpt.commands.output import EXIT_FAULT, note, print_json
from ray_ckpt.view.human import human_bytes, human_duration
from ray_ckpt.view.place import FolderRun, RemoteRun, open_run
from ray_ckpt.view.runs import pick
from ray_ckpt.view.tables import Style, paint, printable, wants_colour

TIER = "durable"  # the one tier whose copies lie in the run's folder


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
            note(f"{entry.folder.name}: {why}not committed, nothing to verify")
            continue
        started_s = time.monotonic()
        faults = _faults(run, entry)
        if faults and entry.manifest and not run.is_there(entry):
            # Retention takes the manifest away first: what is missing now is no fault.
            note(f"{entry.folder.name}: deleted by the run meanwhile")
            continue
        results.append(_verdict(entry, faults))
        if not args.json:
            _print_verdict(entry, faults, time.monotonic() - started_s)
    if args.nodes:
        results += verify_nodes.copies(args)
    if args.json:
        print_json(results)
    num_bad = sum(not result["ok"] for result in results)
    if not results:
        note(f"{run}: no committed checkpoint to verify")
    elif num_bad:
        what = "checkpoints and copies" if args.nodes else "checkpoints"
        note(f"{num_bad} of {len(results)} {what} damaged")
    return EXIT_FAULT if num_bad else 0


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
