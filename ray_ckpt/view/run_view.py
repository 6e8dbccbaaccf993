"""One run as the page shows it: followed, never read twice, and put into plain values.

Every look goes on where the one before ended, and takes only the time it is given: of a journal of weeks the first
answers say how much is still to be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tiers.address import shown
from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME
from ray_ckpt.tracker.lock import holder_host, is_held
from ray_ckpt.tracker.recall import read_ledger
from ray_ckpt.view import run_story
from ray_ckpt.view.chronicle import Chronicle
from ray_ckpt.view.health import READING, Health, Signs, judge
from ray_ckpt.view.incidents import incidents
from ray_ckpt.view.shelf_look import ShelfLook
from ray_ckpt.view.shelf_rows import TROUBLE, ShelfRows
from ray_ckpt.view.tail import Tail
from ray_ckpt.view.track import Track

SCHEMA = 1
# A sign of life this young means that somebody drives the run, whatever the lock says: not every file system passes
# locks on to other machines, and a tracker that is started again has none for a moment.
_FRESH_S = {"elsewhere": 60.0, "here": 15.0}
# The ledger reads all of a run's records again: of long runs only a report does, and others not all the time.
_ACCOUNT_BYTES = 4 << 20
_ACCOUNT_S, _ACCOUNT_SHARE = 5.0, 20.0


class RunView:
    """A run in a folder.

    Args:
        folder: that has its journal.
        name: of the run.
        remote: where its durable tier is, when it is an object store.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "",
        remote: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.name, self._remote = folder, name or folder.name, remote
        self.id = run_id(self.name, str(folder))
        self._clock = clock
        self._journal, self._lines = Tail(folder / JOURNAL_NAME), Tail(folder / STEPS_NAME)
        self.chronicle, self.track = Chronicle(), Track()
        self._look = ShelfLook(folder)
        self._problems: tuple[str, ...] = ()
        self._driven = False
        self._looked, self._lock_host, self._state = False, "", ""
        self._health: Health | None = None
        self._behind = 0
        self._rows: tuple[tuple[int, int], ShelfRows] | None = None
        self._account: dict[str, Any] | None = None
        self._account_after = 0.0  # monotonic seconds
        self.version = 0

    @property
    def remote(self) -> str:
        """Address of its durable tier without what may be secret; empty for a folder."""
        stack = self.chronicle.memory.stack or {}
        remote = str(stack.get("remote") or self._remote)
        return shown(remote) if remote else ""

    def update(self, budget_s: float | None = None) -> None:
        """Reads what is new, for about so many seconds; everything without a limit."""
        deadline = None if budget_s is None else time.monotonic() + budget_s

        def go_on() -> bool:
            return deadline is None or time.monotonic() < deadline

        problems: list[str] = []
        self._looked = True
        try:
            if self._journal.look():
                self.chronicle, self._rows = Chronicle(), None
                self._changed()
            while self._journal.behind_bytes and go_on():
                for event in self._journal.read():
                    self.chronicle.apply(event)
                self._changed()
            if self._lines.look():
                self.track = Track()
                self._changed()
            while self._lines.behind_bytes and go_on():
                for line in self._lines.read():
                    self.track.add(line)
                self._changed()
            # Millions of steps take their time, and where the run stands is told at once.
            self.track.ahead = self._lines.newest() if self._lines.behind_bytes else None
            if not self.remote:
                self._look_at_shelf(go_on, now=budget_s is None)
        except (ConfigError, StorageError) as error:
            problems.append(str(error))
        if self._look.problem:
            problems.append(self._look.problem)
        try:
            driven, self._lock_host = is_held(self.folder), holder_host(self.folder)
        except StorageError as error:
            driven = False
            problems.append(str(error))
        self._settle(driven, tuple(problems))
        if not self._behind:
            self._make_account(whole=budget_s is None)

    def _make_account(self, *, whole: bool) -> None:
        """Folds the run's ledger anew, where that does not take long, and not all the time."""
        began = time.monotonic()
        if not whole and (began < self._account_after or self._record_bytes() > _ACCOUNT_BYTES):
            return
        try:
            ledger = read_ledger(self.folder)
        except StorageError:
            return  # its records were read a moment ago: the next look will say what is wrong
        now = time.monotonic()
        self._account_after = now + _ACCOUNT_SHARE * (now - began) + _ACCOUNT_S
        account = None if ledger is None else run_story.accounted(ledger)
        if account != self._account:
            self._account = account
            self._changed()

    def _record_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return sum((self.folder / name).stat().st_size for name in (JOURNAL_NAME, STEPS_NAME))
        return 0

    def _look_at_shelf(self, go_on: Callable[[], bool], *, now: bool) -> None:
        before = self._look.version
        # Of a journal that is half read nobody can say what should be there.
        expected = set() if self._journal.behind_bytes else set(self.chronicle.checkpoints)
        try:
            self._look.refresh(expected, go_on, now=now)
        finally:
            self.version += self._look.version != before

    def _changed(self) -> None:
        self.version += 1

    def _settle(self, driven: bool, problems: tuple[str, ...]) -> None:
        """What changes without a new line: who holds the lock, and what is late by now."""
        behind = self.behind_bytes
        if (driven, problems, bool(behind)) != (self._driven, self._problems, bool(self._behind)):
            self._changed()
        self._driven, self._problems, self._behind = driven, problems, behind
        if (state := self.state()) != self._state:
            self._state = state
            self._changed()
        health = READING if self._journal.behind_bytes else judge(self._signs())
        if health != self._health:
            self._health = health
            self._changed()

    @property
    def behind_bytes(self) -> int:
        """Bytes of the run's records that are not read yet."""
        return self._journal.behind_bytes + self._lines.behind_bytes

    @property
    def in_doubt(self) -> bool:
        """Whether a checkpoint of the journal was not in the last listing; one more will tell."""
        return not self.remote and self._look.in_doubt

    @property
    def is_there(self) -> bool:
        """Whether there is anything of the run."""
        read = self.chronicle.events or self.track.lines or self._look.entries
        return bool(read or self.behind_bytes or not self._looked)

    @property
    def rows(self) -> ShelfRows:
        """The table of checkpoints, as of the last look; empty until all of the journal is read."""
        if self._journal.behind_bytes:
            return ShelfRows(Chronicle(), None)
        # Lines of steps come most often, and change no row of the table.
        now = (self.chronicle.events, self._look.version)
        if self._rows is None or self._rows[0] != now:
            self._rows = (now, ShelfRows(self.chronicle, None if self.remote else self._look))
        return self._rows[1]

    def state(self) -> str:
        """In one word: reading, new, training, restarting, finished, stopped or lost."""
        memory = self.chronicle.memory
        if self._journal.behind_bytes or not self._looked:
            return "reading"
        if memory.finished_step is not None:
            return "finished"
        last_s = max(self.chronicle.last_time, float(self.track.newest.get("time") or 0.0))
        fresh_s = _FRESH_S["here" if self._lock_host == platform.node() else "elsewhere"]
        driven = self._driven or 0 <= self._clock() - last_s < fresh_s
        if not self.chronicle.attempts:
            return "new" if driven else "stopped"
        if memory.attempt_open:
            attempt = self.chronicle.attempts[-1]
            if not driven:
                return "lost"
            if self.track.has_steps_of(attempt.generation):
                return "training"
            return "new" if len(self.chronicle.attempts) == 1 else "restarting"
        last = self.chronicle.interruptions[-1] if self.chronicle.interruptions else None
        asked = last is not None and last.kind == "user_stop"
        return "restarting" if driven and not asked else "stopped"

    def _signs(self) -> Signs:
        memory, now_s, present = self.chronicle.memory, self._clock(), self._present()
        durable, step_s = self.rows.newest_durable(), present["step_time_s"]
        since_s = None if durable is None else self.rows.saved_at(durable)
        last_step_s, first_s = present["last_step_at"], memory.first_time
        counts = self.rows.counts()["states"]
        trouble = memory.trouble or {}
        last_drill = self.chronicle.drills[-1] if self.chronicle.drills else None
        failed_drill = run_story.told(last_drill) if last_drill and not last_drill.get("ok") else ""
        marks = self.chronicle.interruptions
        failure = self.chronicle.last_failure or {}
        loop = memory.loop or {}
        return Signs(
            state=self.state(),
            planned_end=bool(marks) and marks[-1].kind == "user_stop",
            step=present["step"],
            step_s=step_s,
            silent_s=None if last_step_s is None else now_s - last_step_s,
            running_s=0.0 if first_s is None else now_s - first_s,
            durable_age_s=now_s - since_s if since_s else None,
            durable_every_s=run_story.durable_every_s(self.chronicle, step_s),
            failed_in_a_row=memory.failed_in_a_row,
            save_error=str(failure.get("error", "")),
            trouble=str(trouble.get("reason", "")),
            trouble_stops=trouble.get("action") == "stop",
            refusals=len(memory.refusals),
            fruitless=memory.fruitless,
            loop=str(loop["reason"]).partition("\n")[0] if loop.get("action") == "stop" else "",
            slow_nodes=tuple(map(self.chronicle.incidents.name, memory.stragglers)),
            excluded_nodes=tuple(map(self.chronicle.incidents.name, memory.excluded)),
            failed_drill=failed_drill,
            missing=counts.get("missing", 0),
            damaged=counts.get("damaged", 0) + counts.get("unreadable", 0),
            problems=self._problems,
        )

    def _present(self) -> dict[str, Any]:
        return run_story.present(self.chronicle, self.track)

    def summary(self) -> dict[str, Any]:
        """One line of the list of runs, as plain values."""
        health = self._health or READING
        present, marks = self._present(), self.chronicle.interruptions
        last = None
        if marks:
            last = run_story.interruption(self.chronicle, marks[-1], self.track)
        return {
            "id": self.id,
            "name": self.name,
            "folder": str(self.folder),
            "remote": self.remote,
            "state": self.state(),
            "health": health.level,
            "reasons": list(health.reasons),
            "behind_bytes": self.behind_bytes,
            "present": present,
            "newest_durable": self._newest_durable(present["step"]),
            "last_interruption": last,
            "goodput": self._account or run_story.goodput(self.chronicle, self.track),
            "counts": run_story.counts(self.chronicle),
        }

    def _newest_durable(self, step: int) -> dict[str, Any] | None:
        entry = self.rows.newest_durable()
        if entry is None:
            return None
        return {
            "name": entry.name,
            "step": entry.key[0],
            "at": self.rows.saved_at(entry),
            "durable_at": self.rows.tiers(entry).get("durable") or None,
            "steps_since": max(0, step - entry.key[0]),
            "verified_at": entry.line and entry.line.verified_at,
        }

    def detail(
        self, *, offset: int = 0, limit: int | None = 50, show: str = "all"
    ) -> dict[str, Any]:
        """Everything of the run, as plain values.

        Args:
            offset: first row of the table, counted from the newest.
            limit: how many rows; all of them without.
            show: which rows (see :data:`ray_ckpt.view.shelf_rows.SHOWS`).
        """
        chronicle, track, rows = self.chronicle, self.track, self.rows
        chosen = rows.select(show)
        page = chosen[offset:] if limit is None else chosen[offset : offset + limit]
        summary = self.summary()
        return {
            "schema": SCHEMA,
            "run": summary,
            "interval": run_story.interval(chronicle, summary["present"]["step_time_s"]),
            "attempts": run_story.attempts(chronicle),
            "interruptions": run_story.marks(chronicle),
            "curve": {"stride": track.curve.stride, "points": track.curve.points()},
            "restarts": run_story.restarts(chronicle),
            "checkpoints": {
                **rows.counts(),
                "show": show,
                "matching": len(chosen),
                "trouble": sum(entry.state in TROUBLE for entry in rows.entries),
                "offset": offset,
                "behind": 0 if self.remote else self._look.behind,
                "rows": [rows.row(entry) for entry in page],
            },
            "drills": run_story.drills(chronicle),
            "incidents": incidents(chronicle.incidents, chronicle.memory, str(self.folder)),
            "alerts": run_story.lines(chronicle.alerts),
            "story": run_story.lines(chronicle.story),
        }


def run_id(name: str, place: str) -> str:
    """What names a run in an address: its name, and a digest of where it is, as two runs may have one name."""
    plain = "".join(
        char if char.isascii() and (char.isalnum() or char in "-_.") else "_" for char in name
    )
    return f"{plain[:80]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
