"""Finds a hang, writes down what every worker is doing, and ends the suspect, so that Ray Train starts a new group.

A thread in the controller's process asks the tracker now and then how far the run is: the workers tell it anyway. Only
when nothing came for too long (:mod:`ray_ckpt.policy.hang`) are they asked where they are. A program that evaluates, or
compiles, gets the long allowance; who is to blame says :mod:`ray_ckpt.policy.suspects`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayError

from ray_ckpt.elastic.causes import Cause
from ray_ckpt.elastic.crew import RayCrew
from ray_ckpt.elastic.dumps import folder_of, text_of_look, text_of_silence, write_dumps
from ray_ckpt.elastic.whereabouts import Look
from ray_ckpt.errors import RayCkptError
from ray_ckpt.policy.hang import HangRule, Pulse
from ray_ckpt.policy.suspects import needs_long, suspects
from ray_ckpt.ray_private import WorkerGroupCallback
from ray_ckpt.tracker.client import RayTracker

logger = logging.getLogger(__name__)

END_S = 30.0  # that Ray Train has to notice that a worker has ended; then all are ended


class Crew(Protocol):
    """The workers of a group (:class:`ray_ckpt.elastic.crew.RayCrew`)."""

    @property
    def ranks(self) -> range: ...

    def node_id(self, rank: int) -> str: ...

    def names(self) -> dict[int, str]: ...

    def pid(self, rank: int) -> int: ...

    def ask(self) -> dict[int, Look | None]: ...

    def outside(
        self, ranks: Iterable[int], *, look: bool = False, end: bool = False
    ) -> dict[int, str]: ...

    def end(self, ranks: Iterable[int], silent: Iterable[int] = ()) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A hang that was found.

    Attributes:
        generation: of the attempt.
        step: the last that was told.
        quiet_s: how long nothing had come when it was found, seconds.
        usual_s: time of a step, None while it is not known.
        option: that said how long nothing may come, with its value.
        suspects: ranks.
        nodes: Ray's names of their nodes, in the same order.
        names: the same for people.
        why: who is to blame and why, in words.
        where: rank to where it is, in words.
        dumps: folder of what each rank was doing, relative to the run's; empty when it could not be written.
    """

    generation: int
    step: int
    quiet_s: float
    usual_s: float | None
    option: str
    suspects: tuple[int, ...]
    nodes: tuple[str, ...]
    names: tuple[str, ...]
    why: str
    where: dict[int, str]
    dumps: str

    @property
    def text(self) -> str:
        """In one sentence."""
        usual = "" if self.usual_s is None else f"usually {self.usual_s:.3g} s; "
        on = f", on node {', '.join(dict.fromkeys(self.names))}" if self.names else ""
        limit = f"({usual}{self.option})"
        return f"no step for {self.quiet_s:.0f} s after step {self.step} {limit}: {self.why}{on}"

    @property
    def places(self) -> dict[str, list[int]]:
        """Ranks by where they are: of a thousand most are at the same place."""
        found: dict[str, list[int]] = {}
        for rank, where in self.where.items():
            found.setdefault(where, []).append(rank)
        return found

    def cause(self, found: Cause) -> Cause:
        """Why the group ended, that failed as ``found`` once the suspect was ended."""
        if found.kind == "node_loss":
            return found  # the hang was the first that was seen of it
        more = {
            "suspect_ranks": list(self.suspects),
            "suspect_nodes": list(dict.fromkeys(self.nodes)),
            "suspect_names": list(dict.fromkeys(self.names)),
            "dumps": self.dumps,
        }
        return Cause(kind="hang", text=self.text, hopeless=found.hopeless, more=more)


class Watcher:
    """Watches one worker group.

    Args:
        rule: when a hang is one.
        run_dir: the run's folder.
        call: calls the tracker.
        crew: the workers.
        clock: seconds of a steady clock.
        time_s: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        rule: HangRule,
        run_dir: Path,
        call: Callable[..., Any],
        crew: Crew,
        clock: Callable[[], float] = time.monotonic,
        time_s: Callable[[], float] = time.time,
    ) -> None:
        self._rule, self._run_dir, self._call, self._crew = rule, run_dir, call, crew
        self._clock, self._time_s = clock, time_s
        self._pulse = Pulse(generation=-1, step=-1, stepped=False, since_s=clock())
        self._not_before_s = 0.0

    def look(self) -> Hang | None:
        """Looks once; a hang that it returns is on record, and its files are written."""
        status = self._beat()
        if status is None or status["finished_step"] is not None:
            return None
        pulse, usual_s = self._pulse, status["step_time_s"]
        now_s = self._clock()
        limit_s = self._rule.limit_s(usual_s, long=not pulse.stepped)
        if now_s - pulse.since_s < limit_s or now_s < self._not_before_s:
            return None
        looks = self._crew.ask()
        found = {rank: None if look is None else look.where for rank, look in looks.items()}
        long = not pulse.stepped or needs_long(found)
        ages_s = [look.step_age_s for look in looks.values() if look is not None]
        # Steps that end and are not told: the tracker was away, and is not the one to go by.
        goes_on = min(ages_s, default=math.inf) < limit_s / 2
        if goes_on or now_s - pulse.since_s < self._rule.limit_s(usual_s, long=long):
            self._not_before_s = now_s + limit_s / 4  # asking costs each worker a little
            return None
        if self._beat() is None or self._pulse is not pulse:
            return None  # it goes on
        return self._found(looks, usual_s, long)

    def end(self, hang: Hang, is_over: Callable[[float], bool]) -> None:
        """Ends the suspects, and all when that does not end the group.

        Args:
            hang: that was found.
            is_over: whether the group has ended, waiting so many seconds for it.
        """
        ranks = hang.suspects or tuple(self._crew.ranks)
        silent = [rank for rank, where in hang.where.items() if where == _SILENT]
        self._crew.end(ranks, silent)
        if not is_over(END_S):
            self._crew.end(self._crew.ranks, self._crew.ranks)

    def _beat(self) -> dict[str, Any] | None:
        """Takes the pulse of the run; None when the tracker does not answer, who may be starting."""
        try:
            status: dict[str, Any] = self._call("status")
        except (RayCkptError, RayError) as error:
            logger.warning("how far the run is cannot be told now: %s", error)
            return None
        generation = int(status["generation"])
        stepped = bool(status["attempt_open"]) and status["last"].get("generation") == generation
        # A commit and a restore are no steps; an attempt that begins is a sign of life.
        open_ = generation if status["attempt_open"] else -1
        self._pulse = self._pulse.seen(open_, int(status["step"]), stepped, self._clock())
        return status

    def _found(self, looks: dict[int, Look | None], usual_s: float | None, long: bool) -> Hang:
        crew, quiet_s = self._crew, self._clock() - self._pulse.since_s
        names = crew.names()
        silent = [rank for rank, look in looks.items() if look is None]
        outside = crew.outside(silent, look=True)
        texts = {
            rank: text_of_silence(rank, names[rank], crew.pid(rank), outside.get(rank, ""))
            if look is None
            else text_of_look(rank, names[rank], look)
            for rank, look in looks.items()
        }
        generation = max(0, self._pulse.generation)
        folder = folder_of(self._run_dir, self._time_s(), generation)
        problem = write_dumps(folder, texts)
        named = suspects({r: None if look is None else look.where for r, look in looks.items()})
        hang = Hang(
            generation=generation,
            step=self._pulse.step,
            quiet_s=quiet_s,
            usual_s=usual_s,
            option=self._rule.option(usual_s, long=long),
            suspects=named.ranks,
            nodes=tuple(crew.node_id(rank) for rank in named.ranks),
            names=tuple(names[rank] for rank in named.ranks),
            why=named.why,
            where={rank: _in_words(look) for rank, look in looks.items()},
            dumps="" if problem else str(folder.relative_to(self._run_dir)),
        )
        self._tell(hang)
        return hang

    def _tell(self, hang: Hang) -> None:
        try:
            self._call(
                "hang",
                step=hang.step,
                quiet_s=hang.quiet_s,
                usual_s=hang.usual_s,
                suspects=list(hang.suspects),
                nodes=list(hang.nodes),
                names=list(hang.names),
                reason=hang.text,
                where=hang.places,
                dumps=hang.dumps,
            )
        except (RayCkptError, RayError) as error:
            # The interruption will tell it.
            logger.warning("a hang is not on record yet: %s", error)


_SILENT = "no answer"


def _in_words(look: Look | None) -> str:
    if look is None:
        return _SILENT
    return f"{look.where.phase} of step {look.where.step}"


class HangWatch(WorkerGroupCallback):
    """Watches each worker group of a run, in the controller's process.

    Args:
        group: whose ``hang`` says why it ends; told before a worker is ended.
        rule: when a hang is one.
        run_dir: the run's folder.
    """

    def __init__(self, group: Any, rule: HangRule, run_dir: Path) -> None:
        self._group, self._rule, self._run_dir = group, rule, run_dir
        self._stop: threading.Event | None = None  # made where the controller is

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._end_watch()
        stop = self._stop = threading.Event()
        crew = RayCrew(worker_group.get_workers())
        threading.Thread(target=self._watch, args=(crew, stop), name="hangs", daemon=True).start()

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._end_watch()

    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        self._end_watch()

    def _end_watch(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _watch(self, crew: RayCrew, stop: threading.Event) -> None:
        try:
            watcher = Watcher(
                rule=self._rule,
                run_dir=self._run_dir,
                call=lambda method, **kwargs: RayTracker(self._group.run).call(method, **kwargs),
                crew=crew,
            )
            while not stop.wait(self._rule.tick_s):
                hang = watcher.look()
                if hang is not None and not stop.is_set():
                    self._group.hang = hang
                    watcher.end(hang, stop.wait)
                    return
        except Exception:
            # Training does not depend on it.
            logger.exception("hangs are no longer watched for in this attempt")
