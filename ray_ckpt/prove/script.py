"""A script of events: how many workers train how many steps, and what happens in between.

``"4x10 kill 2x7 resize 3x5 stop 1x2"``: ten steps on four workers, then they are killed; seven on two; a planned
resize; five on three; the driver stops and is started again; two on one. ``"same"`` is short for a run that is killed
half-way and goes on with as many workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ray_ckpt.errors import ConfigError

EVENTS = ("kill", "resize", "stop")


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of a script.

    Attributes:
        world: workers.
        steps: steps they train.
        event: what ends the phase; empty for the last one.
    """

    world: int
    steps: int
    event: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Phases in order."""

    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        """Steps of the whole script."""
        return sum(phase.steps for phase in self.phases)

    @property
    def worlds(self) -> tuple[int, ...]:
        """Workers of each phase."""
        return tuple(phase.world for phase in self.phases)

    @property
    def ends(self) -> tuple[int, ...]:
        """Last step of each phase."""
        total, ends = 0, []
        for phase in self.phases:
            total += phase.steps
            ends.append(total)
        return tuple(ends)

    def __str__(self) -> str:
        return " ".join(f"{p.world}x{p.steps} {p.event}".strip() for p in self.phases)


def parse_script(text: str) -> Script:
    """Reads a script.

    Raises:
        ConfigError: with the word that is wrong and what is allowed.
    """
    if text.strip() == "same":
        text = "2x6 kill 2x6"
    words = text.split()
    phases: list[Phase] = []
    for i in range(0, len(words), 2):
        match = re.fullmatch(r"(\d+)x(\d+)", words[i])
        if match is None or not int(match[1]) or not int(match[2]):
            raise ConfigError(
                f"--script: {words[i]!r} should be WORKERSxSTEPS, such as 4x10 (phases and events alternate)"
            )
        event = words[i + 1] if i + 1 < len(words) else ""
        if event and event not in EVENTS:
            raise ConfigError(f"--script: {event!r} is no event; there are {', '.join(EVENTS)}")
        phases.append(Phase(world=int(match[1]), steps=int(match[2]), event=event))
    if len(phases) < 2 or phases[-1].event:
        raise ConfigError(
            f"--script {text!r}: needs at least two phases with an event between, and ends with a phase, such as "
            '"2x6 kill 1x6"'
        )
    return Script(phases=tuple(phases))
