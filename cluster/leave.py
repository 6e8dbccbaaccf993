"""What a node does before it goes: it has every run saved, then takes itself out of the cluster.

    python cluster/leave.py --within-s 90                        # on the node that goes: `preStop` of a pod
    python cluster/leave.py --on-spot-notice --within-s 90       # waits for the notice of AWS, then the same
    python cluster/leave.py --node node1                         # somewhere else, for another node

A pod that is deleted, a machine that is drained and a spot machine with a notice have a while left. Without this, the
steps since the last save are lost, although there was time for one. So:

1. Each run that has workers on the node is asked for a checkpoint at the end of its present step, and to hold there: a
   step that is made after the save would be lost with the node. Training stands still from then on.
2. The checkpoint is waited for until it is in the durable tier, which outlives any node, or until the time is up.
3. `ray drain-node` announces the end of the node, so that nothing new comes to it and its workers count as preempted.
   The head cannot be drained: all runs are saved, they end with it, and the same command goes on elsewhere.

The workers on it leave when they see that, and start on the others. The node must then end within `--drain-s`: a run of
a fixed size waits for a place, and what else runs in the cluster may count on the node until it has ended. In a pod
that is so, since SIGTERM comes when this command is done; after a notice of AWS, `ray stop` is called here.

Nothing here is needed for a run to survive. Whatever goes wrong is said, and the node leaves without it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

if __package__ in (None, ""):  # run as a script: make the package around this file importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster._spot import wait_for_notice
from ray_ckpt.errors import ConfigError, RayCkptError
from ray_ckpt.options import run_main

REASON = "DRAIN_NODE_REASON_PREEMPTION"
_POLL_S = 0.2
_DRAIN_TIMEOUT_S = 15.0


class Tracker(Protocol):
    """What is asked of a run."""

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method of its tracker and returns the answer."""
        ...


def save_all(
    trackers: Mapping[str, Tracker],
    node_id: str | None,
    within_s: float,
    say: Callable[[str], None],
    errors: tuple[type[Exception], ...],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Has runs saved, all at the same time; they hold at that step until the time is up.

    Args:
        trackers: name of a run to its tracker.
        node_id: only runs that have workers on this node, since the others would hold for nothing; None for all.
        within_s: longest wait for all of them together, seconds.
        say: told what becomes of each.
        errors: a run that ends meanwhile raises one of these, and is left alone.
        clock: in seconds.
        sleep: waits.

    Returns:
        The runs that train and whose state did not get to the durable tier.
    """
    deadline = clock() + within_s
    why = f"node {node_id[:12]} is about to leave" if node_id else "the cluster is about to end"
    waiting: dict[str, int] = {}
    unsaved: list[str] = []
    for run, tracker in trackers.items():
        try:
            status = tracker.call("status")
            if not status["attempt_open"] or (node_id and node_id not in status["nodes"]):
                say(f"run {run!r} does not train here just now")
                continue
            waiting[run] = tracker.call("request_save", reason=why, hold_s=within_s)
        except errors as error:
            unsaved.append(run)
            say(f"run {run!r} cannot be asked for a save: {error}")
    while waiting and clock() < deadline:
        for run in list(waiting):
            try:
                step = _durable_step(trackers[run], waiting[run])
            except errors as error:
                del waiting[run]
                unsaved.append(run)
                say(f"run {run!r} was not saved: {error}")
                continue
            if step is not None:
                del waiting[run]
                say(f"run {run!r}: step {step} is in the durable tier")
        if waiting:
            sleep(_POLL_S)
    for run in waiting:
        say(f"run {run!r} has no new checkpoint in the durable tier after {within_s:g} s")
    return [*unsaved, *waiting]


def _durable_step(tracker: Tracker, number: int) -> int | None:
    """The step that was saved for a request, once it is durable; a save that was under way before is none for it."""
    status = tracker.call("status")
    if status["settled_request"] < number or status["last_commit_step"] is None:
        return None
    at = {"generation": status["generation"], "step": status["last_commit_step"]}
    return None if tracker.call("durable", **at) else int(at["step"])


def drain_arguments(address: str, node_id: str, message: str, drain_s: float) -> list[str]:
    """The arguments of `ray drain-node`; it takes whole seconds."""
    return [
        *("drain-node", "--address", address, "--node-id", node_id),
        *("--reason", REASON, "--reason-message", message),
        *("--deadline-remaining-seconds", str(max(1, round(drain_s)))),
    ]


def drain(address: str, node_id: str, message: str, drain_s: float) -> str:
    """Announces the end of a node; returns what went wrong, in words."""
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
    try:
        done = subprocess.run(
            [*ray, *drain_arguments(address, node_id, message, drain_s)],
            capture_output=True,
            text=True,
            timeout=_DRAIN_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"Ray has not answered for {_DRAIN_TIMEOUT_S:g} s"
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


def stop_ray() -> None:
    """Ends the Ray of this machine."""
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
    subprocess.run([*ray, "stop", "--grace-period", "5"], timeout=60.0, check=False)


def trackers_here() -> dict[str, Tracker]:
    """The trackers of all runs of the Ray that this process has joined."""
    import ray.util

    from ray_ckpt.tracker.client import NAMESPACE, RayTracker, actor_name

    prefix = actor_name("")
    found: dict[str, Tracker] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            run = actor["name"].removeprefix(prefix)
            try:
                found[run] = RayTracker(run)
            except RayCkptError as error:
                print(f"run {run!r} has just ended: {error}", flush=True)
    return found


def find_node(nodes: Sequence[Mapping[str, Any]], wanted: str) -> Mapping[str, Any]:
    """A living node of `ray.nodes()`, by its id or its name.

    Raises:
        ConfigError: there is none, or more than one of that name.
    """
    alive = [node for node in nodes if node["Alive"]]
    found = [node for node in alive if wanted in (node["NodeID"], node["NodeName"])]
    if len(found) != 1:
        known = ", ".join(f"{node['NodeName']} ({node['NodeID']})" for node in alive)
        raise ConfigError(
            f"--node {wanted}: {len(found)} living nodes have this name or id; there are: {known}"
        )
    return found[0]


def is_head(node: Mapping[str, Any]) -> bool:
    """Whether a node is the head."""
    return "node:__internal_head__" in node["Resources"]


def leave(options: argparse.Namespace) -> int:
    """Saves, then drains; the exit code is 0 when all that was there to do is done."""
    import ray
    from ray.exceptions import RayError

    def say(text: str) -> None:
        print(text, flush=True)

    if options.on_spot_notice:
        say(wait_for_notice(say))
    ray.init(address=options.address, log_to_driver=False, logging_level="error")
    context = ray.get_runtime_context()
    node = find_node(ray.nodes(), options.node or context.get_node_id())
    node_id, head = str(node["NodeID"]), is_head(node)
    errors = (RayCkptError, RayError)
    unsaved = save_all(trackers_here(), None if head else node_id, options.within_s, say, errors)
    problem = ""
    if head:
        say("this is the head, which cannot be drained: its jobs end with it")
    else:
        message = "the node is about to end"
        problem = drain(context.gcs_address, node_id, message, options.drain_s)
        say(f"not drained: {problem}" if problem else f"drained, {options.drain_s:g} s are left")
    if options.on_spot_notice:
        ray.shutdown()
        stop_ray()
    return 1 if problem or unsaved else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--within-s",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait for the saves, seconds (default: 60)",
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds until the node must have ended, whole ones (default: 5)",
    )
    parser.add_argument(
        "--on-spot-notice",
        action="store_true",
        help="wait until AWS announces the end of this machine; end Ray here when all is done",
    )
    parser.add_argument("--node", default="", metavar="NAME|ID", help="another node than this one")
    parser.add_argument(
        "--address", default="auto", help="of the Ray cluster (default: that of this machine)"
    )
    options = parser.parse_args()
    if options.on_spot_notice and options.node:
        parser.error("--on-spot-notice is about this machine, and --node about another")
    if options.within_s <= 0 or options.drain_s <= 0:
        parser.error("--within-s and --drain-s take seconds, above 0")
    return leave(options)


if __name__ == "__main__":
    run_main(main)
