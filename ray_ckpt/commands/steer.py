"""`ray-ckpt save` and `stop`: ask a run that trains for a checkpoint now, or for its end. They reach it through Ray."""

from __future__ import annotations

import argparse
import getpass
import json
import time
from typing import Any

from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tracker.journal import JOURNAL_NAME
from ray_ckpt.tracker.recall import recall
from ray_ckpt.view.runs import find_run

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of both commands."""
    parser.add_argument(
        "--address",
        default="auto",
        help="of the Ray cluster, as ray.init() takes it (default: that of this machine)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="longest wait, seconds (default: 600); what was asked for stays asked for",
    )


def command_save(args: argparse.Namespace) -> int:
    """`save RUN`: a checkpoint at the end of the present step; waits until it is committed."""
    tracker, who = running_tracker(args)
    before = _status(tracker)
    if not before["attempt_open"]:
        raise ConfigError(
            f"run {before['run']!r} does not train just now (it restarts, or is complete): its newest checkpoint is of "
            f"step {before['last_commit_step']}. Try again when it trains."
        )
    number = tracker.call("request_save", reason=f"{who} asked for it")
    failed = before["failed_saves"]
    deadline = time.monotonic() + args.timeout_s
    while (status := _status(tracker))["settled_request"] < number:
        if status["failed_saves"] > failed:
            raise StorageError(
                f"the save failed, and is tried again by itself; {JOURNAL_NAME} of the run says why"
            )
        wait(deadline, args.timeout_s, "no checkpoint was committed")
    at = {"generation": status["generation"], "step": status["last_commit_step"]}
    while problem := tracker.call("durable", **at):  # who asks wants it to stay
        wait(
            deadline,
            args.timeout_s,
            f"step {at['step']} did not get to the durable tier ({problem})",
        )
    if args.json:
        print(json.dumps(at))
    else:
        print(f"step {at['step']} of run {status['run']!r} is in the durable tier")
    return 0


def command_stop(args: argparse.Namespace) -> int:
    """`stop RUN`: saves at the end of the present step and ends the job; the same command goes on later."""
    tracker, who = running_tracker(args)
    status = _status(tracker)
    tracker.call("request_stop", reason=f"ray-ckpt stop by {who}")
    deadline = time.monotonic() + args.timeout_s
    while True:
        try:
            status = _status(tracker)
        except StorageError:
            break  # the tracker ends with its job
        wait(deadline, args.timeout_s, "the job did not end")
    if args.json:
        print(json.dumps({"step": status["last_commit_step"], "generation": status["generation"]}))
    else:
        print(
            f"run {status['run']!r} stopped, its newest checkpoint is of step {status['last_commit_step']}"
        )
    return 0


def running_tracker(args: argparse.Namespace) -> tuple[Any, str]:
    """The tracker of a run that trains, and who asks.

    Raises:
        ConfigError: the run is complete, or there is no Ray where it is said to be.
        StorageError: nobody drives the run.
    """
    folder = find_run(args.run, args.storage)
    finished = recall(folder).finished_step
    if finished is not None:
        raise ConfigError(f"run {folder.name!r} is complete, at step {finished}: nobody trains it.")
    import ray

    from ray_ckpt.tracker.client import RayTracker

    try:
        ray.init(address=args.address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--address {args.address}: there is no Ray cluster ({error}). Say where the run trains."
        ) from error
    return RayTracker(folder.name), getpass.getuser()


def _status(tracker: Any) -> dict[str, Any]:
    from ray.exceptions import RayError

    try:
        found: dict[str, Any] = tracker.call("status")
    except RayError as error:
        raise StorageError(f"the run's tracker is gone ({type(error).__name__})") from error
    return found


def wait(deadline: float, timeout_s: float, what: str) -> None:
    """Waits a moment; raises StorageError when it has been long enough."""
    if time.monotonic() >= deadline:
        raise StorageError(
            f"{what} within {timeout_s:g} s; it is still asked for. See the log of the run's tracker actor."
        )
    time.sleep(_POLL_S)
