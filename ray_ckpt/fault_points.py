"""Named places where a fault can be put in, to see what comes of it: a kill, a full disk, a worker that freezes.

::

    RAY_CKPT_FAULT='commit.renamed@3=kill' python jobs/pretrain.py ...
    RAY_CKPT_FAULT='save.file@2+=enospc,journal.line@9=eio' ...

Each process counts for itself how often it comes by. ``NAME=ACTION`` strikes the first time, ``NAME@3=ACTION`` the
third time, ``NAME@3+=ACTION`` the third time and ever after. Actions:

- ``kill``: SIGKILL to this process, ``kill-parent`` to the one that started it;
- ``stop``: SIGSTOP to this process, which goes on with a SIGCONT (``kill -CONT PID``);
- ``eio``, ``enospc``: the error that a failing, or a full, disk gives, at the points of :data:`WITH_ERRORS`;
- ``sleep:SECONDS``;
- ``slow:FILE``: as many seconds as that file says at that moment, none while it is not there. So a disk becomes slow,
  and well again, while the processes live: ``save.file@1+=slow:/tmp/slow``.

Without the variable a point costs one call and one comparison, tens of nanoseconds.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, get_ident

from ray_ckpt.errors import ConfigError

FAULT_VARIABLE = "RAY_CKPT_FAULT"

POINTS: dict[str, str] = {
    "attempt.begin": "the tracker is about to put a new attempt on record",
    "attempt.begun": "a new attempt is on record, and its workers do not know of it",
    "segment.start": "a segment is about to be put on record",
    "segment.recorded": "a segment is in the journal, and not in run.json",
    "restore.verify": "a worker is about to read its share of a checkpoint",
    "restore.verified": "a checkpoint is as it was written, and nothing of it is loaded",
    "restore.loading": "the tensors are read, and the rest of the state is the old one",
    "restore.loaded": "all is loaded, and the tracker does not know",
    "save.stage": "a save begins; nothing is copied",
    "save.staged": "the state is copied, and nothing is written",
    "save.write": "a worker is about to write its file",
    "save.file": "in the middle of what is written at once into a file of a checkpoint",
    "save.written": "a worker's file is on the disk, and the others do not know of it",
    "save.report": "all files are on the disk, and the tracker does not know",
    "commit.check": "the tracker is about to look whether all files are there",
    "commit.temporary": "in the middle of a manifest, under its temporary name",
    "commit.rename": "a manifest is whole, under its temporary name",
    "commit.renamed": "a manifest has its name, which a power cut may still take away",
    "commit.placed": "a manifest is there for good, and the journal does not know",
    "commit.told": "a commit is in the journal, and the workers do not know",
    "record.temporary": "in the middle of a small file (pins, quarantine, run.json), under its temporary name",
    "record.rename": "a small file is whole, under its temporary name",
    "record.renamed": "a small file has its name, which a power cut may still take away",
    "journal.line": "in the middle of a line of the journal",
    "journal.sync": "a line is in the journal, and a power cut may still take it away",
    "steps.line": "in the middle of a line of steps.jsonl",
    "pins.write": "a checkpoint is about to be pinned",
    "pins.written": "a pin is there, and whether its checkpoint still is was not looked at",
    "quarantine.write": "a checkpoint is about to be marked as bad",
    "quarantine.written": "a checkpoint is marked as bad, and the journal does not know",
    "collect.end": "the manifest of a checkpoint is about to be taken away",
    "collect.ended": "it is taken away, and pins were not looked for once more",
    "collect.file": "a file of a checkpoint that has ended is about to go",
    "collect.emptied": "all its files are gone, but the mark that it is on its way out",
    "collect.unmarked": "the mark is gone too, and the empty folder is there",
    "collect.removed": "the folder is gone, and the journal does not know",
    "desk.commit": "the nodes are about to be asked to commit what their workers wrote",
    "desk.committed": "all nodes have committed, and the journal does not know",
    "desk.arrived": "all files are in another tier, and the journal does not know",
    "desk.drop": "a checkpoint is about to be dropped from a tier on the nodes",
    "holder.commit": "a node is about to commit what its workers wrote",
    "holder.committed": "a node has committed, and the tracker does not know",
    "holder.copied": "copies of files have come to a node, and are not committed there",
    "holder.provided": "files are there for a worker, and it does not know",
    "depot.piece": "in the middle of a piece of a copy, under its temporary name",
    "depot.name": "a copy is whole, under its temporary name",
    "depot.named": "a copy has its name, which a power cut may still take away",
    "depot.drop": "the manifest of a checkpoint on a node is about to be taken away",
    "depot.dropped": "it is taken away, and its files are there",
    "wire.send": "a node is about to send a piece of a file to another one",
    "wire.receive": "a node is about to receive a piece of a file from another one",
    "durable.put": "a file is about to be copied to the durable tier",
    "durable.seal": "all files are in the durable tier, and its manifest is about to be written",
    "durable.sealed": "its manifest is there, and the journal does not know",
}
"""Every point there is, and where the process stands when it comes by."""

WITH_ERRORS = frozenset(
    {
        *("save.stage", "save.staged", "save.file", "save.written"),
        *("commit.check", "commit.temporary", "commit.rename", "commit.renamed"),
        *("record.temporary", "record.rename", "record.renamed"),
        *("journal.line", "journal.sync", "steps.line"),
        *("collect.end", "collect.ended", "collect.file"),
        *("depot.piece", "depot.name", "depot.named", "depot.drop", "depot.dropped"),
        *("wire.send", "wire.receive", "durable.put", "durable.seal"),
    }
)
"""Points from which an error can come in life too. An error from elsewhere would show nothing but itself."""

ACTIONS = ("kill", "kill-parent", "stop", "eio", "enospc", "sleep:SECONDS", "slow:FILE")

_ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC}
_SPEC = re.compile(r"(?P<name>[^@=]+)(@(?P<nth>\d+)(?P<ever>\+)?)?=(?P<action>.+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at one point, and when."""

    action: str
    nth: int
    ever: bool

    @property
    def goes_on(self) -> bool:
        """Whether all of what comes next is done after it, sooner or later."""
        return self.action == "stop" or self.action.startswith(("sleep", "slow"))

    def strikes(self, count: int) -> bool:
        return count == self.nth or (self.ever and count > self.nth)


def parse_faults(text: str) -> dict[str, list[Fault]]:
    """The faults of ``NAME[@NTH[+]]=ACTION``, comma-separated, by the name of their point.

    Raises:
        ConfigError: an unknown name or action, or another form.
    """
    faults: dict[str, list[Fault]] = {}
    for spec in filter(None, (part.strip() for part in text.split(","))):
        match = _SPEC.fullmatch(spec)
        if match is None or match["nth"] == "0":
            raise ConfigError(
                f"{FAULT_VARIABLE}: {spec!r} is not NAME[@NTH[+]]=ACTION, as in 'commit.renamed@3=kill'. Nth counts "
                "from 1."
            )
        name, action = match["name"], match["action"]
        if name not in POINTS:
            raise ConfigError(
                f"{FAULT_VARIABLE}: there is no fault point {name!r}. Those that there are: {', '.join(POINTS)}."
            )
        if not (action in ACTIONS[:-2] or _seconds(action) is not None):
            raise ConfigError(
                f"{FAULT_VARIABLE}: {action!r} in {spec!r} is no action. Those that there are: {', '.join(ACTIONS)}."
            )
        if action in _ERRORS and name not in WITH_ERRORS:
            raise ConfigError(
                f"{FAULT_VARIABLE}: no error can come from {name!r}, so none can be put in there. Points with errors: "
                f"{', '.join(p for p in POINTS if p in WITH_ERRORS)}."
            )
        faults.setdefault(name, []).append(
            Fault(action, int(match["nth"] or 1), match["ever"] is not None)
        )
    return faults


class Armed:
    """Faults of this process, and how often it came by each of their points."""

    def __init__(self, faults: dict[str, list[Fault]]) -> None:
        self._faults = faults
        self._counts = dict.fromkeys(POINTS, 0)
        self._lock = Lock()  # a save writes and commits in threads of its own

    def come_by(self, name: str, half: Callable[[], object] | None) -> None:
        with self._lock:
            self._counts[name] += 1
            count = self._counts[name]
        for fault in self._faults.get(name, ()):
            if fault.strikes(count):
                if half is not None and not fault.goes_on:
                    half()
                _do(fault.action, name)


def fault_point(name: str, half: Callable[[], object] | None = None) -> None:
    """A place where a fault may be put in; does nothing when none is.

    Args:
        name: one of :data:`POINTS`.
        half: does half of what comes next, for a fault in the middle of it; called only when one strikes after
            which the rest never comes.

    Raises:
        OSError: ``eio`` or ``enospc`` was put in here.
    """
    if _armed is not None:
        _armed.come_by(name, half)


def arm(text: str) -> None:
    """Puts faults in, in place of those of this process so far; an empty text takes them out.

    Raises:
        ConfigError: see :func:`parse_faults`.
    """
    global _armed
    faults = parse_faults(text)
    _armed = Armed(faults) if faults else None


def _do(action: str, name: str) -> None:
    if action in _ERRORS:
        number = _ERRORS[action]
        raise OSError(number, f"{os.strerror(number)} (put in at {name})")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "kill-parent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif action == "stop":
        # To this thread: sent to the process, another one may take it, and this one goes on for a while.
        signal.pthread_kill(get_ident(), signal.SIGSTOP)
    else:
        time.sleep(_seconds(action) or 0.0)


def _seconds(action: str) -> float | None:
    if (file := re.fullmatch(r"slow:(/.+)", action)) is not None:
        return _said(Path(file[1]))
    match = re.fullmatch(r"sleep:(\d+(\.\d+)?)", action)
    return None if match is None else float(match[1])


def _said(path: Path) -> float:
    try:
        return max(0.0, float(path.read_text()))
    except (OSError, ValueError):  # not there, or in the middle of being written
        return 0.0


_armed: Armed | None = None
# When the package is loaded, so that a mistake is told at the start and not in the middle of a run.
arm(os.environ.get(FAULT_VARIABLE, ""))
