"""Which tiers a run has, and where each of them is on a node.

The fastest comes first. Workers write into the first; a slower tier gets its copies from a faster one
(:mod:`ray_ckpt.tiers.holder`), with intervals of its own. The durable tier is always there, and the last: it is the
only one that survives the loss of the cluster.

A folder on a node may name variables of that node's environment (``$SLURM_JOB_ID``). In it each run has a folder of
its own, named after the run and a digest of where it is stored: two runs of one name do not meet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.address import is_uri

NodeTier = Literal["memory", "local"]
TierName = Literal["memory", "local", "durable"]

TIER_NAMES: tuple[TierName, ...] = ("memory", "local", "durable")
"""Fastest first."""

# Simulated nodes of one machine share its /dev/shm: theirs is below this (cluster/local.py).
_SHM_VARIABLE = "RAY_CKPT_NODE_SHM_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The tiers of a run.

    Attributes:
        use: names, fastest first; ``durable`` is the last.
        memory_folder: where memory is a folder; empty for the node's ``/dev/shm``.
        local_folder: on a disk of the node.
        remote: URI of the object store that is the durable tier; empty when it is the run's own folder.
        replicas: copies in memory on other nodes.
        failure_domain: label of nodes that fail together; empty when each node fails alone.
        memory_keep: newest checkpoints that stay in memory.
        local_keep: newest checkpoints that stay on the nodes' disks.
        bytes_per_s: limit of promotion, for each node; 0 is none.
        tries: of a promotion, before it is given up until the next one is due.
        pause_s: after the first failed try, seconds; doubled after each further one.
        linger_s: how long memory is kept when the job is gone, seconds.
        scrub_s: how long a copy may go without being read back, seconds; 0 is for ever.
    """

    use: tuple[TierName, ...] = ("durable",)
    memory_folder: str = ""
    local_folder: str = ""
    remote: str = ""
    replicas: int = 1
    failure_domain: str = ""
    memory_keep: int = 2
    local_keep: int = 2
    bytes_per_s: float = 0.0
    tries: int = 5
    pause_s: float = 1.0
    linger_s: float = 1800.0
    scrub_s: float = 0.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.use if name not in TIER_NAMES]
        if unknown:
            raise ConfigError(
                f"--tiers.use {unknown[0]!r}: a tier is one of {', '.join(TIER_NAMES)}"
            )
        if list(self.use) != [name for name in TIER_NAMES if name in self.use]:
            raise ConfigError(
                f"--tiers.use {' '.join(self.use)}: name each tier once, the fastest first "
                f"({' '.join(TIER_NAMES)})"
            )
        if "durable" not in self.use:
            raise ConfigError(
                f"--tiers.use {' '.join(self.use)}: the last must be durable. The others do not survive the loss of "
                "the cluster, and a run that has only them is one accident away from step 0."
            )
        if "local" in self.use and not self.local_folder:
            raise ConfigError(
                "--tiers.use local needs --tiers.local-folder: a folder on a disk of each node"
            )
        if self.local_folder and "local" not in self.use:
            raise ConfigError(
                f"--tiers.local-folder {self.local_folder}: there is no local tier in --tiers.use "
                f"{' '.join(self.use)}; add it"
            )
        if self.remote and not is_uri(self.remote):
            raise ConfigError(
                f"--tiers.remote {self.remote}: must be the address of an object store, such as "
                "s3://bucket/folder. For a folder that every node sees use --storage."
            )
        for option, folder in (
            ("--tiers.memory-folder", self.memory_folder),
            ("--tiers.local-folder", self.local_folder),
        ):
            # What begins with a variable is known on the node.
            if folder and folder[0] not in "/~$":
                raise ConfigError(
                    f"{option} {folder}: must be an absolute path, the same on every node; it may begin with a "
                    "variable of the node, such as $NAME"
                )
        if self.remote and len(self.use) == 1:
            raise ConfigError(
                "--tiers.remote: an object store gets its copies from a tier on the nodes. Add memory or local to "
                "--tiers.use, such as --tiers.use memory durable"
            )

    @property
    def node_tiers(self) -> tuple[NodeTier, ...]:
        """The tiers that are on the nodes, fastest first; none when workers write to the durable tier."""
        return tuple(name for name in self.use if name != "durable")

    def base(self, tier: NodeTier) -> Path:
        """The folder of a tier on this node, for all runs.

        Raises:
            ConfigError: it names a variable that this node does not have, or is not absolute.
        """
        if tier == "memory" and not self.memory_folder:
            shared = os.environ.get(_SHM_VARIABLE)
            return Path(shared) / "ray_ckpt" if shared else Path(f"/dev/shm/ray_ckpt-{os.getuid()}")
        option = f"--tiers.{tier}-folder"
        text = self.memory_folder if tier == "memory" else self.local_folder
        path = Path(os.path.expandvars(text)).expanduser()
        if "$" in str(path):
            raise ConfigError(
                f"{option} {text}: it names a variable that the environment of this node does not have"
            )
        if not path.is_absolute():
            raise ConfigError(f"{option} {text}: must be an absolute path")
        return path

    def root(self, tier: NodeTier, run_dir: Path) -> Path:
        """The folder of a run in a tier on this node."""
        return self.base(tier) / run_key(run_dir)


def run_key(run_dir: Path) -> str:
    """A name for a run that no other run has, whatever they are called."""
    digest = xxhash.xxh3_64_hexdigest(str(run_dir).encode())
    return f"{run_dir.name}-{digest[:12]}"


def tier_rates(rates: Mapping[str, float], stack: Stack) -> dict[str, float]:
    """How often each tier is needed: a failure needs the fastest one that outlives it.

    Args:
        rates: kind of failure to how often it comes, per second. Kinds that are not known here may need the durable
            tier.
        stack: the tiers.
    """
    first = stack.use[0]
    outlived: dict[str, str] = dict.fromkeys(("worker_error", "hang", "nonfinite"), first)
    if first == "memory" and stack.replicas:
        outlived["node_loss"] = first
    if "local" in stack.use:
        outlived["lost"] = "local"  # the job and its cluster; a reboot leaves the disks
    needs = dict.fromkeys(stack.use, 0.0)
    for kind, rate in rates.items():
        needs[outlived.get(kind, "durable")] += rate  # type: ignore[index]
    return {str(name): rate for name, rate in needs.items()}
