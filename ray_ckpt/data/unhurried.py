"""Ray Data's scheduling loop, without the spinning.

A dataset's executor runs in a thread of the process that uses it: here beside the training. When its buffers are full,
or no task runs, its loop waits for nothing: it goes round and round and holds the interpreter for most of the time, and
the steps of training take several times as long (Ray 2.60, three workers on two cores: 0.5 to 1.2 s instead of 0.1 s).
Ray Data calls what it is given after each round. So after a round in which nothing was begun, ended or handed on, that
call takes a rest, and a longer one each time. Ray Data itself looks at running tasks every 0.1 s at the latest.
"""

from __future__ import annotations

import time
from typing import Any

from ray_ckpt.ray_private import counts_of

FIRST_S, LONGEST_S = 0.001, 0.032


def rest_s(rounds: int) -> float:
    """How long to rest after a round in which nothing happened, seconds.

    Args:
        rounds: of that kind just before it.
    """
    return min(LONGEST_S, FIRST_S * 2.0 ** min(rounds, 16))


class Unhurried:
    """An execution callback of Ray Data, for ``DataContext.custom_execution_callback_classes``."""

    def __init__(self) -> None:
        self._counts: tuple[int, ...] | None = None
        self._rounds = 0

    def on_execution_step(self, executor: Any) -> None:
        """Called after each round of an executor's loop."""
        before, self._counts = self._counts, counts_of(executor)
        if self._counts is None or self._counts != before:
            self._rounds = 0
            return
        time.sleep(rest_s(self._rounds))
        self._rounds += 1

    def before_execution_starts(self, executor: Any) -> None:
        """Nothing to do."""

    def after_execution_succeeds(self, executor: Any) -> None:
        """Nothing to do."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """Nothing to do."""
