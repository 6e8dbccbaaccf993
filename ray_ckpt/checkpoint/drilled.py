"""What drills found of a checkpoint: ``DRILLED.json`` in its folder, newest last.

A manifest is sealed and never changes; this is what was learnt since. It decides nothing: a file that is damaged or
missing means that no drill is known, and whoever believes a forged one has lost a report, not a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.names import DRILLS_NAME
from ray_ckpt.checkpoint.storing import read_bytes, without_nonfinite, write_atomically
from ray_ckpt.errors import ManifestError

KEPT = 10
"""So many of the newest drills stay on record."""

_SHOWN_FAULTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Drilled:
    """The outcome of one drill.

    Attributes:
        time: of its end, seconds since the epoch.
        ok: whether the checkpoint was restored to what it was.
        problems: what was not so, one sentence each; empty when it is ok.
        notes: what could not be looked at, one sentence each.
        faults: of its bytes, ``{path, fault}``.
        loss: measured after the restore; None when it was not.
        expected: the loss that was measured at the commit.
        difference: between the two.
        tolerance: the greatest difference that is let pass.
        same_bits: whether the two are equal to the last bit.
        digest: of the rows that the loss was measured on.
        verify_s: time in which every byte was read and compared, seconds.
        load_s: time in which the state was loaded, seconds.
        bytes: size of the checkpoint.
        host: where it was drilled.
        pid: of the process.
        device: kind of the device.
        versions: of the libraries.
    """

    time: float
    ok: bool
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    faults: tuple[Mapping[str, str], ...] = ()
    loss: float | None = None
    expected: float | None = None
    difference: float | None = None
    tolerance: float | None = None
    same_bits: bool | None = None
    digest: str = ""
    verify_s: float = 0.0
    load_s: float = 0.0
    bytes: int = 0
    host: str = ""
    pid: int = 0
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def restore_s(self) -> float:
        """Time of the whole restore, seconds."""
        return self.verify_s + self.load_s

    @property
    def bytes_per_s(self) -> float | None:
        """Speed of the whole restore; None when nothing was restored."""
        return self.bytes / self.restore_s if self.load_s else None

    @property
    def words(self) -> str:
        """The outcome in a line."""
        if not self.ok:
            more = f", and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
            return f"FAILED: {self.problems[0] if self.problems else 'no reason given'}{more}"
        if self.loss is None or self.expected is None:
            return f"ok, {self.restore_s:.1f} s, no loss compared"
        same = (
            "the same bits"
            if self.same_bits
            else f"{self.difference:.2g} from the {self.expected:.6g} of its commit"
        )
        return f"ok, {self.restore_s:.1f} s, loss {self.loss:.6g}, {same}"

    @property
    def day(self) -> str:
        """When it was, for people."""
        return datetime.fromtimestamp(self.time).astimezone().isoformat(" ", "seconds")

    def to_json(self) -> dict[str, Any]:
        """Plain values; faults are cut to a number that a person reads."""
        plain = {
            **asdict(self),
            "faults": [dict(fault) for fault in self.faults[:_SHOWN_FAULTS]],
            "loss_hex": None if self.loss is None else self.loss.hex(),
            "restore_s": self.restore_s,
            "bytes_per_s": self.bytes_per_s,
        }
        return dict(without_nonfinite(plain))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Drilled:
        """Reads what :meth:`to_json` gave; fields of later versions are left alone.

        Raises:
            ValueError: it is no such document.
        """
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in document.items() if name in known}
        for name in ("loss", "expected", "difference", "tolerance"):
            if values.get(name) is not None:
                values[name] = float(values[name])  # "nan" is one
        for name in ("problems", "notes"):
            values[name] = tuple(map(str, values.get(name, ())))
        values["faults"] = tuple(dict(fault) for fault in values.get("faults", ()))
        values["time"], values["ok"] = float(values["time"]), bool(values["ok"])
        return cls(**values)


def read_drills(folder: Path) -> tuple[Drilled, ...]:
    """The drills of a checkpoint, oldest first; none when the file cannot be understood.

    Raises:
        StorageError: storage failed.
    """
    try:
        data = read_bytes(folder / DRILLS_NAME)
        items = [] if data is None else json.loads(data)
        return tuple(Drilled.from_json(item) for item in items)
    except (ManifestError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def add_drill(folder: Path, drilled: Drilled) -> None:
    """Puts a drill on record; for one drill at a time, which the lock on drills sees to.

    Raises:
        StorageError: storage failed.
    """
    drills = [*read_drills(folder), drilled][-KEPT:]
    data = json.dumps([each.to_json() for each in drills], indent=1).encode() + b"\n"
    write_atomically(folder / DRILLS_NAME, data)


def journal_events(drilled: Drilled) -> list[dict[str, Any]]:
    """What the journal says of a drill: the drill, and an alert when it failed."""
    told = drilled.to_json()
    at = told.pop("time")  # a line of the journal has its own
    problem = f"a drill failed: {'; '.join(drilled.problems)}"
    alerts = [] if drilled.ok else [{"event": "alert", "problem": problem}]
    return [{"event": "drill", "drilled_at": at, "seconds": drilled.restore_s, **told}, *alerts]
