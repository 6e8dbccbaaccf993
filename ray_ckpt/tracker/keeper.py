"""The tracker's housekeeping: after each commit a round aside, and in the journal what came of it.

A round lists the checkpoints, perhaps reads one back, and deletes: seconds to minutes, in which the tracker goes
on answering. So rounds run aside; what they found is taken on record with the next call of a worker. Nothing that
goes wrong here reaches training: it is logged, journalled where it says something of a checkpoint, and tried again
after the next save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ray_ckpt.checkpoint.drilled import journal_events
from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import ConfigError, ManifestError, StaleGenerationError, StorageError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.collect import Gate
from ray_ckpt.tiers.housekeeping import Findings
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.scrub import next_to_scrub
from ray_ckpt.tracker.aside import Aside, Inline
from ray_ckpt.tracker.house import House, Terms
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.rollback import passed

logger = logging.getLogger(__name__)

_POLL_S = 0.05
SCRUB_AGAIN_S = 3600.0  # after one that could not be read


class Scrubbed(NamedTuple):
    """What reading a checkpoint back found, which nobody had read for long."""

    name: str
    faults: tuple[Fault, ...]
    seconds: float


class _Recorder(Protocol):
    def __call__(self, event: str, **fields: Any) -> None: ...


class Keeper:
    """Keeps the checkpoints of one run by its rules.

    Args:
        house: where they are.
        rules: which checkpoints are kept.
        memory: of the run, as the tracker keeps it.
        record: writes an event to the journal and takes it into memory.
        clock: seconds since the epoch.
        aside: where rounds run.
        scrub_s: how long a checkpoint may go without being read back, seconds; 0 is for ever.
    """

    def __init__(
        self,
        *,
        house: House,
        rules: Rules,
        memory: RunMemory,
        record: _Recorder,
        clock: Callable[[], float],
        aside: Aside | None = None,
        scrub_s: float = 0.0,
    ) -> None:
        self._house, self._rules, self._memory = house, rules, memory
        self._record, self._clock = record, clock
        self._aside, self._scrub_s = aside or Inline(), scrub_s
        self._scrub_after_s = 0.0  # where storage would not be read, it is left alone for a while
        self._gate = Gate()  # of the round that runs
        self._in_use: dict[str, str] = {}
        self._due = False
        self._may_read = True

    def cancel(self) -> None:
        """Ends the round that runs: when this returns, no checkpoint ends by what was decided before."""
        self._gate.shut()

    def quarantine(self, name: str, reason: str, findings: list[dict[str, Any]]) -> None:
        """Labels a checkpoint as bad: nobody restores it any more."""
        self.cancel()  # what it was about to delete may be needed now
        fault_point("quarantine.write")
        self._house.quarantine(name, reason, time_s=self._clock(), findings=findings)
        fault_point("quarantine.written")
        self._record("quarantine", name=name, reason=reason, faults=findings)

    def restoring(self, name: str) -> None:
        """Protects the checkpoint that an attempt restores; an empty name is the end of that."""
        self._in_use = {name: "an attempt restores it"} if name else {}

    def begin(self) -> None:
        """Puts the rules on record, where ``ray-ckpt gc`` finds them."""
        rules = self._rules.to_json()
        if self._memory.retention != rules:
            self._record("retention", rules=rules)

    def after_save(self) -> None:
        """Asks for a round; it begins when the one before has ended."""
        self._due = self._may_read = True
        self.advance()

    def advance(self) -> None:
        """Takes on record what was done aside, and begins what is due; neither waits nor raises."""
        try:
            while True:
                result = self._aside.take()
                if result is not None:
                    self._note(result)
                if self._aside.busy:
                    return
                if self._due:
                    self._due = False
                    self._aside.start(self._job())
                    continue
                if scrub := self._scrub():
                    self._aside.start(scrub)
                return
        except Exception:
            logger.exception("housekeeping failed; it is tried again later")

    def settle(self, timeout_s: float) -> None:
        """Waits until nothing is due any more."""
        deadline = time.monotonic() + timeout_s
        while (self._due or self._aside.busy) and time.monotonic() < deadline:
            self._aside.wait(_POLL_S)
            self.advance()

    def pin(self, name: str, reason: str, author: str) -> None:
        """Pins a checkpoint (see :func:`ray_ckpt.tiers.pins.pin`)."""
        if self._house.pin(name, reason, author=author, time_s=self._clock()):
            self._tell("pin", name, reason=reason, author=author)

    def keep(self, name: str, reason: str) -> None:
        """Pins a checkpoint for the run itself; one that cannot be pinned is still a checkpoint: it is only told."""
        try:
            self.pin(name, reason, "ray_ckpt")
        except (ConfigError, ManifestError, StorageError):
            logger.exception("%s could not be pinned", name)

    def unpin(self, name: str, reason: str | None) -> None:
        """Takes pins of a checkpoint away (see :func:`ray_ckpt.tiers.pins.unpin`)."""
        for gone in self._house.unpin(name, reason):
            self._tell("unpin", name, reason=gone.reason, author=gone.author)

    def _scrub(self) -> Callable[[], Scrubbed] | None:
        """A checkpoint that nobody has read for too long, as a job."""
        now_s = self._clock()
        if not self._memory.attempt_open or now_s < self._scrub_after_s:
            return None
        known = self._memory.last_read_s
        name = next_to_scrub(known, now_s=now_s, every_s=self._scrub_s)
        if name is None:
            return None

        def read() -> Scrubbed:
            started = time.monotonic()
            faults = tuple(self._house.read_back(name))
            return Scrubbed(name, faults, time.monotonic() - started)

        return read

    def _note_scrubbed(self, found: Scrubbed) -> None:
        self._scrub_after_s = self._clock() + min(self._scrub_s, SCRUB_AGAIN_S)
        if not found.faults:
            self._scrub_after_s = 0.0
            self._tell("verified", found.name, verified=found.name, seconds=found.seconds)
        elif found.name not in self._memory.last_read_s:
            pass  # it was deleted meanwhile
        elif all(fault.unreadable for fault in found.faults):
            problem = f"{found.faults[0].path}: {found.faults[0].fault}"
            self._record("alert", name=found.name, problem=f"it could not be read back ({problem})")
        else:
            findings = [{"path": fault.path, "fault": fault.fault} for fault in found.faults]
            reason = f"{found.faults[0].path}: {found.faults[0].fault}"
            self.quarantine(found.name, reason, findings)
            self._record("alert", name=found.name, problem=f"it went bad on storage ({reason})")

    def _job(self) -> Callable[[], Findings]:
        self._gate = Gate()
        terms = Terms(
            rules=self._rules,
            generation=self._memory.generation,
            verified=frozenset(self._memory.verified),
            in_use=dict(self._in_use),
            may_read=self._may_read,
            gate=self._gate,
            passed=passed(self._memory.left),
        )
        now_s = self._clock()
        return lambda: self._house.keep(terms, now_s=now_s)

    def _note(self, result: Findings | Scrubbed | Exception) -> None:
        if isinstance(result, Scrubbed):
            self._note_scrubbed(result)
            return
        if isinstance(result, Exception):
            if not isinstance(result, ConfigError | StaleGenerationError | StorageError):
                raise result
            logger.warning("nothing was deleted: %s", result)
            return
        self._note_pins(result)
        self._note_drills(result)
        if result.faults is not None:
            self._note_reading(result)
        for outcome in result.outcomes:
            if not outcome.problem:
                self._tell("delete", outcome.name, reason=outcome.reason)
            elif outcome.kept:
                logger.info("%s stays: %s", outcome.name, outcome.problem)
            else:
                self._tell("delete_failed", outcome.name, error=outcome.problem)

    def _note_reading(self, found: Findings) -> None:
        """What reading a checkpoint back says, on record before anything older goes."""
        assert found.faults is not None
        name, faults = found.to_read, found.faults
        self._due = True  # whatever it was, the round is to be done again with it
        if not faults:
            self._tell("verified", name, verified=name, seconds=found.seconds)
        elif all(fault.unreadable for fault in faults):
            # Storage failed, which says nothing about the bytes.
            self._may_read = False
            problem = f"it could not be read back ({faults[0].path}: {faults[0].fault})"
            self._record(
                "alert", name=name, problem=f"{problem}, so no older one is deleted for it"
            )
        else:
            self._may_read = False  # unless the note can be written, it would be found bad for ever
            findings = [{"path": fault.path, "fault": fault.fault} for fault in faults]
            self.quarantine(name, f"{faults[0].path}: {faults[0].fault}", findings)
            self._may_read = True

    def _note_pins(self, found: Findings) -> None:
        """Pins that somebody else set or took away: the journal tells of them too."""
        for record in found.stock.records:
            if record.name not in found.stock.pins:
                continue
            now = {pin.words: pin for pin in found.stock.pins[record.name]}
            known = self._memory.pins.get(record.name, set())
            for words in now.keys() - known:
                pin = now[words]
                self._tell("pin", record.name, reason=pin.reason, author=pin.author)
            for words in known - now.keys():
                reason, _, author = words.removesuffix(")").rpartition(" (")
                self._tell("unpin", record.name, reason=reason, author=author)

    def _note_drills(self, found: Findings) -> None:
        """What drills wrote beside a checkpoint: they may not write the journal of a run that is driven."""
        for name, drills in found.stock.drills.items():
            for drilled in drills:
                if drilled.time > self._memory.drills.get(name, 0.0):
                    for event in journal_events(drilled):
                        self._tell(event.pop("event"), name, **event)

    def _tell(self, event: str, name: str, **fields: Any) -> None:
        key = parse_checkpoint_name(name)
        assert key is not None, name
        self._record(event, name=name, step=key[0], **fields)
