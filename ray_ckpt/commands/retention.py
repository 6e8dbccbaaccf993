"""`ray-ckpt pin`, `unpin` and `gc`: which checkpoints stay, and why.

`gc` goes by the rules that the run has on record, unless flags say otherwise, and tells the reason of every keep
and every delete. It needs the run's lock: while a driver holds it, the run deletes by itself after each save.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.commands.output import note, print_json
from ray_ckpt.commands.remote import remote_round
from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.collect import Gate
from ray_ckpt.tiers.housekeeping import Findings, Round, keep_house, read_back
from ray_ckpt.tiers.remote_house import RemoteRound, keep_remote_house
from ray_ckpt.tiers.retention import Verdict
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tracker.journal import JOURNAL_NAME, JsonLines, last_generation
from ray_ckpt.tracker.lock import RunLock, is_held
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.recall import recall
from ray_ckpt.tracker.rollback import passed
from ray_ckpt.view.human import ago
from ray_ckpt.view.keeping import recorded_rules
from ray_ckpt.view.place import FolderRun, RemoteRun, open_run
from ray_ckpt.view.runs import pick
from ray_ckpt.view.tables import Column, printable, render_table

AnyRound = TypeVar("AnyRound", Round, RemoteRound)

_HELP = {
    "keep_newest": "so many of the newest; 0 keeps every one",
    "keep_every_steps": "the first at or after each multiple of so many steps",
    "keep_every_s": "one per so many seconds of wall time",
    "keep_best": "so many with the best value of a metric",
    "metric": "which metric",
    "mode": "whether its lowest or highest value is best: min or max",
    "keep_steps": "those of this step; repeatable",
    "quarantined": "how many that were found bad stay as evidence",
    "grace_s": "how long files that were never committed stay, seconds",
}


def add_retention_commands(add: Callable[..., argparse.ArgumentParser], step_help: str) -> None:
    """Adds the commands of this module.

    Args:
        add: makes a command of a name, a function and a sentence.
        step_help: what a STEP may be.
    """
    command = add("pin", command_pin, "Keep a checkpoint whatever the rules say.")
    command.add_argument("step", metavar="STEP", help=step_help)
    command.add_argument("--reason", required=True, help="why, one sentence")
    command.add_argument("--author", default=None, help="who wants it (default: your login name)")
    command = add("unpin", command_unpin, "Take pins of a checkpoint away.")
    command.add_argument("step", metavar="STEP", help=step_help)
    command.add_argument("--reason", default=None, help="only the pins with this reason")
    command = add(
        "gc",
        command_gc,
        "Delete the checkpoints that no rule keeps, and say why each one stays or goes.",
    )
    command.add_argument("--dry-run", action="store_true", help="only say it")
    command.add_argument(
        "--no-driver",
        action="store_true",
        help="say that no process drives the run; needed on an object store, which has no lock to tell",
    )
    for field in fields(Rules):
        flag = f"--retention.{field.name.replace('_', '-')}"
        steps = field.name == "keep_steps"
        command.add_argument(
            flag,
            dest=field.name,
            type=int if steps else type(field.default),
            action="append" if steps else "store",
            default=None,
            choices=("min", "max") if field.name == "mode" else None,
            metavar=_metavar(field.name, field.default),
            help=f"{_HELP[field.name]} (default: what the run has on record)",
        )


def _metavar(name: str, default: Any) -> str | None:
    if name == "mode":
        return None  # its choices
    return "NAME" if isinstance(default, str) else "N"


def command_pin(args: argparse.Namespace) -> int:
    """`pin RUN STEP --reason TEXT`."""
    run = open_run(args.run, args.storage)
    name = _pick(run, args.step)
    author = _login() if args.author is None else args.author
    new = run.pin(name, args.reason, author=author, time_s=time.time())
    if new:
        _journal_alone(run, _event("pin", name, reason=args.reason, author=author))
    return _say_pins(
        args, run, name, "pinned" if new else "was pinned by you with this reason before"
    )


def command_unpin(args: argparse.Namespace) -> int:
    """`unpin RUN STEP [--reason TEXT]`."""
    run = open_run(args.run, args.storage)
    name = _pick(run, args.step)
    gone = run.unpin(name, args.reason)
    events = [_event("unpin", name, reason=p.reason, author=p.author) for p in gone]
    _journal_alone(run, *events)
    return _say_pins(args, run, name, f"taken away: {len(gone)}" if gone else "had no pin")


def command_gc(args: argparse.Namespace) -> int:
    """`gc RUN [--dry-run]`."""
    place = open_run(args.run, args.storage)
    if isinstance(place, RemoteRun):
        return _gc_remote(args, place)
    run = place.folder
    if args.dry_run:
        rules, said = _rules(args, recall(run))
        task = _round(run, rules, recall(run), driven=is_held(run), delete=False)
        return _report(args, run, rules, said, _would(task, keep_house), "")
    try:
        lock = RunLock(run, wait_s=0.0)
    except ConfigError as error:
        raise ConfigError(
            f"{error} Nothing was deleted: a run that is driven deletes by its own rules after each save. gc --dry-run "
            "says what the rules keep."
        ) from error
    with contextlib.closing(lock):
        memory = recall(run)
        rules, said = _rules(args, memory)
        with JsonLines(run / JOURNAL_NAME, sync=True) as journal:

            def tell(event: str, name: str, **more: Any) -> None:
                journal.append({**_event(event, name, **more), "generation": memory.generation})

            task = _round(run, rules, memory, driven=False, delete=True)
            found, bad = _collect(task, keep_house, tell)
    return _report(args, run, rules, said, found, bad)


def _gc_remote(args: argparse.Namespace, run: RemoteRun) -> int:
    rules, said = _rules(args, run.records[0].memory)
    task = remote_round(run, rules, no_driver=args.no_driver, delete=not args.dry_run)
    if args.dry_run:
        return _report(args, run, rules, said, _would(task, keep_remote_house), "")
    found, bad = _collect(task, keep_remote_house, lambda event, name, **more: None)
    return _report(args, run, rules, said, found, bad)


def _pick(run: FolderRun | RemoteRun, step: str) -> str:
    if problem := run.key_problem():
        raise ConfigError(problem)
    name: str = pick(run.entries(), step).folder.name
    return name


def _rules(args: argparse.Namespace, memory: RunMemory) -> tuple[Rules, str]:
    """The rules to go by, and where they come from."""
    flags = {
        field.name: getattr(args, field.name)
        for field in fields(Rules)
        if getattr(args, field.name) is not None
    }
    if "keep_steps" in flags:
        flags["keep_steps"] = tuple(flags["keep_steps"])
    recorded = recorded_rules(memory)
    said = "on the run's record"
    if memory.retention is None:
        said = "none on the run's record, so nothing is deleted unless --retention.keep-newest N says so"
    try:
        return replace(recorded, **flags), "changed by flags" if flags else said
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _round(run: Path, rules: Rules, memory: RunMemory, *, driven: bool, delete: bool) -> Round:
    keys = (parse_checkpoint_name(entry.folder.name) for entry in list_checkpoints(run))
    generation = max([memory.generation, *(key[1] for key in keys if key)])
    return Round(
        run_dir=run,
        rules=rules,
        generation=generation,
        newest_generation=lambda: last_generation(run / JOURNAL_NAME),
        # What nobody drives can have no save in flight: whatever was not committed never will be.
        present_generation=generation if driven else generation + 1,
        verified=set(memory.verified),
        in_use={},
        read_back=read_back if delete else None,
        gate=Gate(),
        passed=passed(memory.left),
        delete=delete,
    )


def _would(task: AnyRound, keep: Callable[..., Findings]) -> Findings:
    """What would be done, if the checkpoint that has to be read back first is whole."""
    found = keep(task, now_s=time.time())
    if not found.to_read:
        return found
    then = replace(task, verified={*task.verified, found.to_read})
    return replace(keep(then, now_s=time.time()), to_read=found.to_read)


def _collect(
    task: AnyRound, keep: Callable[..., Findings], tell: Callable[..., None]
) -> tuple[Findings, str]:
    """Deletes; returns what was found, and what is wrong with the checkpoint that was read back."""
    found = keep(task, now_s=time.time())
    bad = ""
    while found.faults is not None:
        if found.faults:
            fault = found.faults[0]
            bad = f"{found.to_read}/{fault.path}: {fault.fault}"
            task = replace(task, read_back=None, delete=False)
        else:
            tell("verified", found.to_read, verified=found.to_read, seconds=found.seconds)
            task = replace(task, verified={*task.verified, found.to_read})
        found = keep(task, now_s=time.time())
    for outcome in found.outcomes:
        if not outcome.problem:
            tell("delete", outcome.name, reason=outcome.reason)
        elif not outcome.kept:
            tell("delete_failed", outcome.name, error=outcome.problem)
    return found, bad


def _report(
    args: argparse.Namespace, run: object, rules: Rules, said: str, found: Findings, bad: str
) -> int:
    only_said = args.dry_run or bool(bad)
    verdicts = sorted((*found.verdicts, *found.orphans), key=_newest_first)
    outcomes = {outcome.name: outcome for outcome in found.outcomes}
    problems = {name: outcome.problem for name, outcome in outcomes.items() if outcome.problem}
    failed = [outcome for outcome in found.outcomes if outcome.problem and not outcome.kept]
    if args.json:
        items = [
            {
                **_named(verdict.name),
                "keep": verdict.keep,
                "reasons": list(verdict.reasons),
                "deleted": verdict.name in outcomes and verdict.name not in problems,
                "problem": problems.get(verdict.name),
            }
            for verdict in verdicts
        ]
        document = {
            "rules": rules.to_json(),
            "dry_run": args.dry_run,
            "to_read_back": found.to_read or None,
            "fault": bad or None,
            "checkpoints": items,
        }
        print_json(document)
    else:
        print(f"rules ({said}): {', '.join(policy.words for policy in rules.policies())}")
        rows = [[v.name, _done(v, only_said, problems), "; ".join(v.reasons)] for v in verdicts]
        print(render_table([Column("CHECKPOINT"), Column(""), Column("WHY")], rows))
        num_gone = sum(not verdict.keep for verdict in verdicts) - len(problems)
        word = "would be deleted" if only_said else "deleted"
        print(f"{num_gone} of {len(verdicts)} {word} in {printable(str(run))}")
        if args.dry_run and found.to_read:
            print(f"for that, {found.to_read} would be read back first, and has to be whole")
    if bad:
        note(
            f"{bad}: it was to be read back before older ones go. Start the run: it sets it aside."
        )
    for outcome in failed:
        note(f"{outcome.name}: not deleted, or not all of it: {outcome.problem}. gc again goes on.")
    return 1 if bad or failed else 0


def _done(verdict: Verdict, only_said: bool, problems: dict[str, str]) -> str:
    if verdict.keep:
        return "keep"
    if verdict.name in problems:
        return "STAYS"
    return "would delete" if only_said else "deleted"


def _say_pins(args: argparse.Namespace, run: FolderRun | RemoteRun, name: str, word: str) -> int:
    now = run.read_pins(name)
    if args.json:
        print_json({**_named(name), "pins": [asdict(pin) for pin in now]})
        return 0
    print(f"{name}: {word}")
    for pin in now:
        print(printable(f"  {pin.reason} ({pin.author}, {ago(pin.time, time.time())})"))
    return 0


def _journal_alone(place: FolderRun | RemoteRun, *events: dict[str, Any]) -> None:
    """Puts events into the journal of a run that nobody drives; a tracker finds pins by itself."""
    if isinstance(place, RemoteRun):
        return  # what is there is a copy of the run's journal
    run = place.folder
    try:
        lock = RunLock(run, wait_s=0.0)
    except ConfigError:
        return
    with contextlib.closing(lock):
        generation = last_generation(run / JOURNAL_NAME)
        with JsonLines(run / JOURNAL_NAME, sync=True) as journal:
            for event in events:
                journal.append({**event, "generation": generation})


def _event(event: str, name: str, **more: Any) -> dict[str, Any]:
    step = _named(name)["step"]
    return {"time": time.time(), "event": event, "name": name, "step": step, **more}


def _named(name: str) -> dict[str, Any]:
    key = parse_checkpoint_name(name)
    assert key is not None, name
    return {"name": name, "step": key[0], "generation": key[1]}


def _newest_first(verdict: Verdict) -> tuple[int, int]:
    named = _named(verdict.name)
    return -named["step"], -named["generation"]


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()}"
