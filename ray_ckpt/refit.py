"""The run goes on in the same job when Ray Train's controller dies.

The controller is a process of its own, and no part of Ray starts it again. Its workers go with it, and the job's driver
and the run's tracker do not: so the driver makes another one, which begins a new attempt as after any other failure.
What the dead one had reserved stays reserved for as long as the job lives (Ray Train has a cleaner for that, which must
be able to ask the dashboard), and the next one would wait for it: so it is given back here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from ray_ckpt import ray_private
from ray_ckpt.errors import RayCkptError
from ray_ckpt.tracker.client import TrackerClient

CAUSE = "the process of Ray Train's controller died"
IDLE_TRIES = 3  # controllers in a row that die before an attempt begins


def fit_through_lost_controllers(
    make: Callable[[], Any],
    tracker: TrackerClient,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Trains to the end, with another controller for each that dies.

    Args:
        make: makes a trainer; called anew for each controller, since a trainer's callbacks remember a worker group.
        tracker: of the run.
        sleep: waits.

    Raises:
        RayCkptError: controllers die again and again, and the run gets nowhere.
    """
    idle = 0
    others = ray_private.placement_groups()
    while True:
        try:
            make().fit()
            return
        except RayActorError as error:
            # Errors of workers come as errors of Ray Train: an actor that is not there is the controller.
            ray_private.release(ray_private.placement_groups() - others)
            idle = 0 if tracker.call("status")["attempt_open"] else idle + 1
            if idle >= IDLE_TRIES:
                raise RayCkptError(
                    f"{CAUSE} {idle} times in a row before an attempt began. Its log is in the Logs tab of the "
                    "dashboard; the same command goes on from the newest checkpoint that is whole."
                ) from error
            print(f"{CAUSE}: the run goes on with another one", flush=True)
            if idle:
                continue  # the attempt before has its end on record
            verdict = tracker.call("interruption", kind="lost", cause=CAUSE)
            if not verdict.go_on:
                raise RayCkptError(f"the run stops: {verdict.reason}") from error
            sleep(verdict.wait_s)
