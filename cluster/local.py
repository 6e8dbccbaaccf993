"""A real many-node Ray cluster on one machine, for trying out and testing what happens when nodes die.

    python cluster/local.py up --nodes 3 --cpus 2     # prints the variables that make a shell its client
    eval "$(python cluster/local.py env)"
    ray job submit --working-dir . -- python train.py
    python cluster/local.py kill node1                # a machine burns: its processes and its files
    python cluster/local.py drain node2 --deadline-s 30 --then-kill    # a spot machine is reclaimed
    python cluster/local.py add
    python cluster/local.py status
    python cluster/local.py down
    python cluster/local.py demo                      # the whole story by itself, in two to three minutes

Each node is a `ray start` of its own: raylet, agents, workers, logs, object store, an address (one
of 127.0.0.0/8), a label `ray_ckpt.io/node=<name>`, and a folder that stands for the machine's local
disk, which its workers find in `RAY_CKPT_NODE_DIR` (`RAY_CKPT_NODE_SHM_DIR`: one in shared memory).
What a node has is lost with it. `node0` is the head: it runs the drivers of jobs, and the cluster
cannot live without it.

Several clusters live side by side (`--name`), each with its own ports and folders. Only processes
that a cluster has started are ever touched. In tests, use `LocalCluster` as a context manager.

Limits: Linux only. All nodes share this machine's cores, memory and disk, so speeds mean little, and
its network, so that none can be cut (as a library, `Settings.in_front` starts each node inside a
network of its own: `tests/cluster/networks.py`). Ray's ports are open to the network that this machine is in:
with `--auth disabled`, the default, whoever reaches them can run code here, so use `--auth token`
where that matters. An idle head takes about 0.6 GB of memory, each further node about 0.2 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package around this file importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster import _demo
from cluster._cluster import LocalCluster
from cluster._head import NodeStatus
from cluster._launch import Settings, free_port
from cluster._state import ClusterError, HealthCheck, UsageError, all_names
from ray_ckpt import ray_dashboard

__all__ = [
    "ClusterError",
    "HealthCheck",
    "LocalCluster",
    "NodeStatus",
    "Settings",
    "UsageError",
    "main",
]

_DEFAULT_NAME = "main"
_DEFAULT_PORT = 8265


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: its line of help, its options and what it does."""

    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def _up_options(parser: argparse.ArgumentParser) -> None:
    health = HealthCheck()
    add = parser.add_argument
    add("--nodes", type=int, default=3, metavar="N", help="number of nodes, the head among them")
    add("--cpus", type=int, default=2, metavar="C", help="CPUs that each node offers")
    add(
        "--dashboard-port",
        type=_port,
        default="auto",
        metavar="P|auto",
        help=f"port of dashboard and job server; auto: {_DEFAULT_PORT}, or a free one if taken",
    )
    add("--auth", choices=["disabled", "token"], default="disabled", help="who may use it")
    add(
        "--object-store-mb",
        type=int,
        default=256,
        metavar="MB",
        help="object store of each node, in MB",
    )
    add(
        "--health-period-s",
        type=float,
        default=health.period_s,
        metavar="S",
        help="seconds between the head's checks of a node",
    )
    add(
        "--health-timeout-s",
        type=float,
        default=health.timeout_s,
        metavar="S",
        help="seconds that a node may take to answer",
    )
    add(
        "--health-failures",
        type=int,
        default=health.failures,
        metavar="K",
        help="failed checks in a row until a node counts as dead",
    )
    add(
        "--no-page",
        action="store_true",
        help="leave this Python's Ray as it is: no page of checkpoints is put into its dashboard",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="environment variable for all nodes; may be given several times",
    )


def _up(options: argparse.Namespace) -> None:
    settings = Settings(
        auth=options.auth,
        object_store_bytes=options.object_store_mb * 1024**2,
        health=HealthCheck(
            period_s=options.health_period_s,
            timeout_s=options.health_timeout_s,
            failures=options.health_failures,
        ),
        extra_env=dict(_assignment(text) for text in options.env),
        page=not options.no_page,
    )
    port = options.dashboard_port
    cluster = LocalCluster(
        options.nodes,
        options.cpus,
        name=options.name,
        dashboard_port=free_port(_DEFAULT_PORT) if port == "auto" else port,
        settings=settings,
    )
    cluster.up(keep=True)
    _print_status(cluster)
    if settings.page and ray_dashboard.status().enabled:
        asks = settings.auth == "token"
        path = ray_dashboard.SIGN_IN_PATH if asks else ray_dashboard.PAGE_PATH
        print(f"checkpoints of its runs: {cluster.dashboard_url}{path}")
    print("\nTo use it from this shell:\n")
    print(_exports(cluster))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpus", type=int, metavar="C", help="CPUs that it offers (default: as many as the head)"
    )
    parser.add_argument(
        "--node", metavar="NODE", help="a dead node to bring back, empty (default: a new node)"
    )


def _add(options: argparse.Namespace) -> None:
    node = LocalCluster.attach(options.name).add(options.node, cpus=options.cpus)
    print(f"{node} has joined")


def _kill_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="its name in `status`, for instance node1")
    parser.add_argument(
        "--force", action="store_true", help="also the head, which ends the cluster"
    )


def _kill(options: argparse.Namespace) -> None:
    LocalCluster.attach(options.name).kill(options.node, force=options.force)
    print(f"{options.node} is gone, with its files")


def _drain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="its name in `status`, for instance node1")
    parser.add_argument(
        "--deadline-s",
        type=float,
        required=True,
        metavar="S",
        help="seconds until the announced end of the node",
    )
    parser.add_argument(
        "--then-kill",
        action="store_true",
        help="wait for the deadline, then kill it as a cloud does; Ray leaves a busy node alone",
    )


def _drain(options: argparse.Namespace) -> None:
    cluster = LocalCluster.attach(options.name)
    cluster.drain(options.node, deadline_s=options.deadline_s, kill_at_deadline=options.then_kill)
    end = "is gone, with its files" if options.then_kill else f"ends in {options.deadline_s:g} s"
    print(f"{options.node} was told to drain and {end}")


def _status_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a list of nodes as JSON")


def _status(options: argparse.Namespace) -> None:
    cluster = LocalCluster.attach(options.name)
    if options.json:
        rows = [dataclasses.asdict(node) for node in cluster.nodes()]
        print(json.dumps(rows, indent=1, default=str))
    else:
        _print_status(cluster)


def _print_status(cluster: LocalCluster) -> None:
    nodes = cluster.nodes()
    print(f"cluster {cluster.name}: {cluster.address}, dashboard {cluster.dashboard_url}")
    print(f"{'node':<8}{'state':<10}{'cpus':>4}  {'address':<16}{'raylet':>8}  its folder")
    for node in nodes:
        state = node.state
        if node.deadline_s is not None:
            state = f"drain {node.deadline_s:.0f}s"
        folder = node.data_dir if node.data_dir.exists() else "-"
        pid = node.raylet_pid if node.alive else "-"
        print(f"{node.name:<8}{state:<10}{node.cpus:>4}  {node.ip:<16}{pid:>8}  {folder}")


def _env(options: argparse.Namespace) -> None:
    print(_exports(LocalCluster.attach(options.name)))


def _exports(cluster: LocalCluster) -> str:
    lines = [f"export {key}={shlex.quote(value)}" for key, value in cluster.env().items()]
    # A token in the environment would win over the cluster's own.
    return "\n".join(["unset RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH", *lines])


def _down_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="all clusters of this user, not one")


def _down(options: argparse.Namespace) -> None:
    names = all_names() if options.all else [options.name]
    for name in names:
        LocalCluster.attach(name).down()
        print(f"cluster {name} is down; nothing is left of it")


def _demo_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--storage", default="~/ray_ckpt/demo-runs", metavar="FOLDER", help="folder for its run")
    add("--steps", type=int, default=500, metavar="N", help="optimizer steps of its run")
    add("more", nargs="*", metavar="OPTION", help="options for jobs/pretrain.py, behind --")


def _run_demo(options: argparse.Namespace) -> None:
    storage = Path(options.storage).expanduser().absolute()
    _demo.tell(storage, options.steps, options.more)


def _no_options(parser: argparse.ArgumentParser) -> None:
    del parser


_COMMANDS: dict[str, Command] = {
    "up": Command("start a cluster", _up_options, _up),
    "add": Command("add a node", _add_options, _add),
    "kill": Command("kill a node and delete its files", _kill_options, _kill),
    "drain": Command("announce the loss of a node", _drain_options, _drain),
    "status": Command("show the nodes", _status_options, _status),
    "env": Command("print the variables of a client, for eval", _no_options, _env),
    "demo": Command("the story of a run that loses a node", _demo_options, _run_demo),
    "down": Command("end a cluster and delete all its files", _down_options, _down),
}


def _port(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdigit() or not 1024 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give 1024 to 65535, or auto")
    return int(text)


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--env {text!r}: write KEY=VALUE")
    return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster/local.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        sub = subparsers.add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False
        )
        sub.add_argument("--name", default=_DEFAULT_NAME, help="which cluster")
        command.options(sub)
        for action in sub._actions:
            if action.default not in (None, False, [], argparse.SUPPRESS) and action.help:
                action.help += " (default: %(default)s)"
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns 0, 1 when it failed, 2 when it was asked wrongly."""
    if not sys.platform.startswith("linux"):
        print("error: cluster/local.py reads /proc and needs Linux", file=sys.stderr)
        return 1
    options = _parser().parse_args(arguments)
    try:
        _COMMANDS[options.command].run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ClusterError, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
