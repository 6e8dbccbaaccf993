"""Has the workers of a group notice SIGTERM.

The training function is not in their main thread, and signals can be caught only there: the actor's own thread does it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ray_ckpt.elastic import sigterm

logger = logging.getLogger(__name__)

_ANSWER_S = 30.0


def hear_sigterm(workers: Sequence[Any]) -> None:
    """Tells them to; raises nothing.

    Args:
        workers: Ray Train's ``Worker`` objects.
    """
    try:
        calls = [worker.execute_async(sigterm.listen) for worker in workers]
        heard = ray.get(calls, timeout=_ANSWER_S)
    except RayError as error:
        heard = [error]
    if not all(each is True for each in heard):
        logger.warning("SIGTERM of a worker's process will end it at once: %s", heard)
