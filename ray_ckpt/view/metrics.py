"""Metrics of a run, through ``ray.util.metrics``: see :mod:`ray_ckpt.view.metric_names` for what they are.

A gauge that is set once vanishes after two of Ray's reports, about 20 s (ray#56405). So a thread of its own sets all of
them again and again, with what the tracker last said: a tracker that waits for its storage is slow, and not gone.
Nothing here waits for a disk, or reads one, in the tracker's turn.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ray_ckpt.errors import StorageError
from ray_ckpt.tracker.buckets import RESTART
from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.records import RunFacts, TrackerOptions
from ray_ckpt.view.account import Account, Accountant
from ray_ckpt.view.metric_names import METRICS, RUN_TAG, SECONDS, Key
from ray_ckpt.view.metric_values import Look, gauges, ledger_gauges, observed
from ray_ckpt.view.run_totals import RunTotals

logger = logging.getLogger(__name__)

TICK_S = 1.0
# An old journal is read beside the tracker's work: so many lines at a time, and a pause for it after them. And beside
# what is told without it: for so long in each tick.
SLICE_LINES, PAUSE_S, RECALL_S = 200, 0.004, 0.5


class Instruments(Protocol):
    """Where values go."""

    def set(self, name: str, value: str, number: float) -> None:
        """Sets a gauge, with a value of its label."""
        ...

    def observe(self, name: str, value: str, number: float) -> None:
        """Puts a number into a histogram, with a value of its label."""
        ...

    def count(self, name: str, value: str) -> None:
        """Adds 1 to a counter, with a value of its label."""
        ...


class RayInstruments:
    """The metrics of one run in this process.

    Args:
        run: its name.
    """

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        self._run = run
        self._gauges, self._histograms, self._counters = {}, {}, {}
        for name, metric in METRICS.items():
            keys = (RUN_TAG, metric.label) if metric.label else (RUN_TAG,)
            if metric.kind == "histogram":
                self._histograms[name] = Histogram(name, metric.text, [*SECONDS], keys)
            elif metric.kind == "counter":
                self._counters[name] = Counter(name, metric.text, keys)
            else:
                self._gauges[name] = Gauge(name, metric.text, keys)

    def set(self, name: str, value: str, number: float) -> None:
        self._gauges[name].set(number, self._tags(name, value))

    def observe(self, name: str, value: str, number: float) -> None:
        self._histograms[name].observe(number, self._tags(name, value))

    def count(self, name: str, value: str) -> None:
        self._counters[name].inc(1, self._tags(name, value))

    def _tags(self, name: str, value: str) -> dict[str, str]:
        label = METRICS[name].label
        return {RUN_TAG: self._run, label: value} if label else {RUN_TAG: self._run}


class Metrics:
    """The metrics of a run, of which a tracker tells.

    Args:
        facts: of the run.
        options: of its tracker.
        instruments: where values go; by default to Ray.
        accountant: who makes the ledger; by default a process.
        clock: seconds since the epoch.
        monotonic: seconds of a clock that nobody sets.
    """

    def __init__(
        self,
        facts: RunFacts,
        options: TrackerOptions,
        *,
        instruments: Instruments | None = None,
        accountant: Accountant | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._clock, self._monotonic = options, clock, monotonic
        self._to: Instruments = instruments or RayInstruments(facts.run)
        self._journal = Path(facts.run_dir) / JOURNAL_NAME
        self._accountant = accountant or Accountant(Path(facts.run_dir))
        self._live: deque[Mapping[str, Any]] = deque()
        self._totals: RunTotals | None = None
        self._old: tuple[RunTotals, Iterator[tuple[int, dict[str, Any]]]] | None = None
        self._look: Look | None = None
        self._account: tuple[Account, float] | None = None
        self._first_attempt = 0  # of this tracker: the restarts before it were observed by others
        self._problem = ""
        self._started_at = clock()

    def start(self) -> None:
        """Begins to tell, for as long as the process lives."""
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    # ---- in the tracker's turn ------------------------------------------------------------------

    def count(self, event: Mapping[str, Any]) -> None:
        """Takes a new event of the journal."""
        self._live.append(event)
        for (name, value), number in observed(event).items():
            self._to.observe(name, value, number)

    def look(self, status: Mapping[str, Any], memory: RunMemory) -> None:
        """Takes where the run stands.

        Args:
            status: of the tracker.
            memory: of the run.
        """
        before = self._look
        if before is None or status["last"] != before.status["last"]:
            stepped_s = self._monotonic()
        else:
            stepped_s = before.stepped_s
        if before is None:
            self._first_attempt = memory.generation + 1
        self._look = Look(
            status=status,
            seen=tuple(memory.seen()),
            fruitless=memory.fruitless,
            stepped_s=stepped_s,
        )

    def ended(self, how: str) -> None:
        """The job is about to end; Ray passes on what was told last when it ends the process.

        Args:
            how: one of :data:`ray_ckpt.view.metric_names.ENDS`.
        """
        self._to.count("ckpt_ended_total", how)

    def fall_silent(self) -> None:
        """Tells no more of a run that another tracker has taken over."""
        self._look = None

    # ---- beside it ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self.tick()
            except Exception:
                logger.exception("metrics were not told; they are at the next tick")
            pause.wait(TICK_S)

    def tick(self) -> None:
        """Tells everything that is known, once."""
        look = self._look
        if look is None:
            return
        values = gauges(
            look,
            self._up_to_date(),
            self._options,
            time_s=self._clock(),
            monotonic_s=self._monotonic(),
        )
        values["ckpt_started_seconds", ""] = self._started_at
        for (name, value), number in {**values, **self._ledger()}.items():
            self._to.set(name, value, number)

    @property
    def caught_up(self) -> bool:
        """Whether all of the old journal is read; totals are told from then on."""
        return self._totals is not None

    def _up_to_date(self) -> RunTotals | None:
        """The totals with all that was told; None while the old journal is not read yet, or cannot be."""
        if self._totals is None:
            try:
                self._totals = self._recalled()
            except StorageError as error:
                self._old = None
                if str(error) != self._problem:
                    logger.warning("totals of the run are not told: %s", error)
                    self._problem = str(error)
            if self._totals is None:
                return None
        while self._live:
            self._totals.apply(self._live.popleft())
        return self._totals

    def _recalled(self) -> RunTotals | None:
        """The totals of what was on record when this tracker began; None while there is more to read."""
        if self._old is None:
            began = next((e for e in [*self._live] if e["event"] == "tracker_started"), None)
            if began is None:
                return None
            lines = itertools.islice(read_lines(self._journal), int(began["events_read"]))
            self._old = RunTotals(), enumerate(lines, 1)
        totals, numbered = self._old
        deadline = self._monotonic() + RECALL_S
        for number, event in numbered:
            totals.apply(event)
            if not number % SLICE_LINES:
                time.sleep(PAUSE_S)
                if self._monotonic() > deadline:
                    return None
        return totals

    def _ledger(self) -> dict[Key, float]:
        now_s = self._monotonic()
        account = self._accountant.look(now_s, self._first_attempt)
        if account is not None:
            for attempt, phases in account.restarts.items():
                if attempt >= self._first_attempt:
                    self._observe_restart(phases)
            self._first_attempt = max((self._first_attempt - 1, *account.restarts)) + 1
            self._account = account, now_s
        if self._account is None:
            return {}
        known, since_s = self._account
        return ledger_gauges(known, now_s - since_s)

    def _observe_restart(self, phases: Mapping[str, float]) -> None:
        for name, seconds in phases.items():
            self._to.observe("ckpt_restart_seconds", name.removeprefix(RESTART), seconds)
