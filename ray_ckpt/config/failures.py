"""Options of what a run does about hangs and about failures that come again; they are part of ``--elastic``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_ckpt.config.checks import at_least, flag, more_than_0, one_of
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.hang import HangRule
from ray_ckpt.policy.loops import LoopRule, OnCrashLoop, parse_budgets
from ray_ckpt.policy.stragglers import StragglerRule


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureOptions:
    """Part of :class:`ray_ckpt.config.elastic.ElasticConfig`."""

    same_failure_tries: int = 3
    """Times that the same failure may come in a row at the same step, or while the same checkpoint is restored."""
    on_crash_loop: OnCrashLoop = "stop"
    """What is done then: stop and tell the story, go one checkpoint further back, or leave out the global batches since
    the newest one. After --guard.max-rollbacks times back in a row the run stops."""
    max_failures: str = "worker_error=20,hang=20"
    """KIND=NUMBER,...: the run stops at so many failures of a kind within the window; 0, or no word, for any number."""
    failure_window_s: float = 3600.0
    """The window: training time over which failures are counted, seconds."""
    backoff_s: float = 1.0
    """Wait after the second fast failure in a row, doubled with each further one up to 30 s; seconds, 0 never waits."""
    hang_factor: float = 20.0
    """A step that takes so many times its usual time is a hang: the workers are started again; 0 is off."""
    hang_min_s: float = 300.0
    """Least time of a step that is called a hang, seconds."""
    hang_long_s: float = 1800.0
    """The same for what is no usual step: starting, restoring, the first step of an attempt, evaluations; seconds."""

    exclude_after: int = 3
    """Hangs of which a node is suspected before it gets no more workers, if the fewest still fit; 0 for any number."""
    leash_s: float = 60.0
    """A worker asks whether its attempt is over when no step ended for so long, and ends if so; seconds, 0 is off."""
    straggler_factor: float = 1.5
    """A node is a straggler whose workers take so many times as long for a forward pass as the others; 0 is off."""
    straggler_saves: int = 3
    """Saves in a row at which that must be so, and not be so any more."""

    def check_failures(self) -> None:
        """Refuses what cannot be.

        Raises:
            ConfigError: a wrong value.
        """
        at_least(1, "--elastic.same-failure-tries", self.same_failure_tries)
        one_of(OnCrashLoop, "--elastic.on-crash-loop", self.on_crash_loop)
        for name in ("failure_window_s", "hang_min_s", "hang_long_s"):
            more_than_0(f"--elastic.{flag(name)}", getattr(self, name), " s")
        for name, off in (("backoff_s", "0 never waits"), ("leash_s", "0 never asks")):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"--elastic.{flag(name)} {getattr(self, name)}: must be 0 or more, and finite; {off}"
                )
        if self.hang_factor != 0 and not 1 < self.hang_factor < math.inf:
            raise ConfigError(
                f"--elastic.hang-factor {self.hang_factor}: must be more than 1, and finite; 0 looks for no hangs"
            )
        at_least(0, "--elastic.exclude-after", self.exclude_after)
        at_least(1, "--elastic.straggler-saves", self.straggler_saves)
        if self.straggler_factor != 0 and not 1 < self.straggler_factor < math.inf:
            raise ConfigError(
                f"--elastic.straggler-factor {self.straggler_factor}: must be more than 1, and finite; 0 looks for none"
            )
        try:
            parse_budgets(self.max_failures)
        except ValueError as error:
            raise ConfigError(f"--elastic.max-failures {self.max_failures!r}: {error}") from error

    def loop_rule(self) -> LoopRule:
        """When the run does not simply go on after a failure."""
        return LoopRule(
            tries=self.same_failure_tries,
            on_loop=self.on_crash_loop,
            budgets=parse_budgets(self.max_failures),
            window_s=self.failure_window_s,
            backoff_s=self.backoff_s,
        )

    def hang_rule(self) -> HangRule:
        """When a step that does not end is a hang."""
        return HangRule(factor=self.hang_factor, min_s=self.hang_min_s, long_s=self.hang_long_s)

    def straggler_rule(self) -> StragglerRule:
        """When a node is a straggler."""
        return StragglerRule(factor=self.straggler_factor, saves=self.straggler_saves)
