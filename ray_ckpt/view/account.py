"""The ledger of a run that trains, made in a process of its own: its tracker has no time for it.

A ledger is a fold over all records of the run, since a step turns out to be rework only when a later attempt begins
before it. So a process of the lowest priority makes it (``python -m ray_ckpt.view.account RUN_DIR 0``), and the next
one begins only after many times as long as the one before took.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ray_ckpt.errors import RayCkptError
from ray_ckpt.fault_points import FAULT_VARIABLE
from ray_ckpt.tracker.buckets import PHASES, Ledger
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME
from ray_ckpt.tracker.recall import read_ledger

logger = logging.getLogger(__name__)

FIRST_S, LEAST_S = 5.0, 60.0  # until the first one, and between two
SHARE = 50.0  # times as long as one took
TIMEOUT_S = 1800.0
MOST_BYTES = 2 << 30  # of records; more would not fit into the memory of a small head node


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What the gauges say of a ledger.

    Attributes:
        wall_s: from the first submit to the last sign of life.
        buckets: name to seconds.
        goodput: useful time over wall time; None while no time has passed.
        restarts: attempt to the seconds of each phase of the restart that ended with its first step.
    """

    wall_s: float
    buckets: Mapping[str, float]
    goodput: float | None
    restarts: Mapping[int, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Account:
        """Reads what :meth:`to_json` gave."""
        restarts = {int(number): found for number, found in values["restarts"].items()}
        return cls(**{**values, "restarts": restarts})


def account_of(ledger: Ledger, since: int = 0) -> Account:
    """The account of a ledger.

    Args:
        ledger: of the run.
        since: restarts into attempts before this one are left out.
    """
    restarts = {
        each.attempt: {name: each.buckets.get(name, 0.0) for name in PHASES}
        for each in ledger.restarts
        if each.complete and each.attempt >= since
    }
    return Account(
        wall_s=ledger.wall_s, buckets=ledger.buckets, goodput=ledger.goodput, restarts=restarts
    )


class Accountant:
    """Has accounts of one run made, one after the other.

    Args:
        run_dir: the run's folder.
        command: what makes one; a program and its arguments.
    """

    def __init__(self, run_dir: Path, command: Sequence[str] = ()) -> None:
        self._dir = run_dir
        self._command = [*command] or [sys.executable, "-m", __name__, str(run_dir)]
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._began_s, self._due_s = 0.0, FIRST_S
        self._zero_s: float | None = None
        self._told = ""

    def look(self, now_s: float, since: int) -> Account | None:
        """The account that was finished since the last look, None when there is none; never waits.

        Args:
            now_s: monotonic seconds.
            since: restarts into attempts before this one are left out of the next account.
        """
        if self._zero_s is None:
            self._zero_s = now_s
        now_s -= self._zero_s
        if self._process is None:
            if now_s >= self._due_s:
                self._begin(now_s, since)
            return None
        code, took_s = self._process.poll(), now_s - self._began_s
        if code is None:
            if took_s > TIMEOUT_S:
                self._process.kill()
            return None
        self._process = None
        self._due_s = now_s + max(LEAST_S, SHARE * took_s)
        return self._read(code)

    def close(self) -> None:
        """Ends the process that is at work."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _begin(self, now_s: float, since: int) -> None:
        self._began_s, self._due_s = now_s, now_s + LEAST_S
        size = 0
        for name in (JOURNAL_NAME, STEPS_NAME):
            with contextlib.suppress(OSError):
                size += (self._dir / name).stat().st_size
        if size > MOST_BYTES:
            self._tell(f"its records are {size >> 20} MiB, more than {MOST_BYTES >> 20}")
            return
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path}
        environment.pop(FAULT_VARIABLE, None)  # it is the tracker that is put to the test
        try:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is read
            self._process = subprocess.Popen(
                [*self._command, str(since)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except OSError as error:
            self._tell(str(error))

    def _read(self, code: int) -> Account | None:
        assert self._output is not None
        with self._output as output:
            output.seek(0)
            text = output.read().decode(errors="replace")
        try:
            if code:
                raise ValueError(text[-500:].strip() or f"it ended with {code}")
            document = json.loads(text.rpartition("\n")[2])  # Python may have had warnings before
            return None if document is None else Account.from_json(document)
        except (ValueError, KeyError, TypeError) as error:
            self._tell(str(error))
            return None

    def _tell(self, problem: str) -> None:
        """Says what is in the way, once."""
        if problem != self._told:
            logger.warning("goodput is not known to the metrics: %s", problem)
            self._told = problem


def main(argv: Sequence[str]) -> int:
    """Prints the account of a run: its folder, and the attempt with which its restarts begin."""
    try:
        ledger = read_ledger(Path(argv[0]))
    except RayCkptError as error:
        print(error)
        return 1
    account = None if ledger is None else account_of(ledger, int(argv[1]))
    print(json.dumps(account and account.to_json()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
