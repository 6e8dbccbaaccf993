"""Options of where copies are: ``--tiers``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_ckpt.config.checks import at_least, flag, more_than_0
from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.stack import Stack, TierName


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig:
    """Where copies of a checkpoint are. With durable alone, workers write there and nothing else is needed."""

    use: tuple[TierName, ...] = ("durable",)
    """Fastest first: memory (of the nodes, and of other nodes), local (a disk of each node), durable (the last)."""
    memory_folder: str = ""
    """Where a node's memory is a folder; empty is its /dev/shm. May name variables of the node, as $NAME."""
    memory_keep: int = 2
    """Newest checkpoints that stay in memory."""
    replicas: int = 1
    """Copies of each file in the memory of so many other nodes."""
    failure_domain: str = ""
    """Label of nodes, such as ray.io/availability-zone: replicas go to nodes with another value, if there are any."""
    local_folder: str = ""
    """Folder on a disk of each node, for the local tier; may name variables of the node."""
    local_keep: int = 2
    """Newest checkpoints that stay on the nodes' disks."""
    local_every_steps: int = 0
    """Copy to the nodes' disks every so many steps; 0 decides by what is measured."""
    durable_every_steps: int = 0
    """Copy to the durable tier every so many steps; 0 decides by what is measured."""
    remote: str = ""
    """Object store (s3://bucket/folder, gs://, abfs://) as the durable tier; --storage keeps the run's records."""
    max_mib_per_second: float = 0.0
    """Most that a node copies to slower tiers, MiB per second; 0 is no limit."""
    tries: int = 5
    """Times a copy to a slower tier is tried before it is left to the next checkpoint that is due."""
    retry_pause_s: float = 1.0
    """Wait after the first failed try, seconds; doubled after each further one."""
    linger_s: float = 1800.0
    """How long memory is kept for a job that was killed, seconds: the same command finds it again."""
    scrub_s: float = 86400.0
    """Read each kept checkpoint back, in every tier, at least so often, seconds; 0 is off."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "use", tuple(self.use))
        for name in ("memory_keep", "local_keep", "tries"):
            at_least(1, f"--tiers.{flag(name)}", getattr(self, name))
        for name in ("replicas", "local_every_steps", "durable_every_steps"):
            at_least(0, f"--tiers.{flag(name)}", getattr(self, name))
        if not 0 <= self.scrub_s < math.inf:
            raise ConfigError(f"--tiers.scrub-s {self.scrub_s}: must be 0 or more, and finite")
        for name in ("retry_pause_s", "linger_s"):
            more_than_0(f"--tiers.{flag(name)}", getattr(self, name))
        if not 0 <= self.max_mib_per_second < math.inf:
            raise ConfigError(
                f"--tiers.max-mib-per-second {self.max_mib_per_second}: must be 0 or more, and finite"
            )
        self.stack()

    def stack(self) -> Stack:
        """What trackers, holders and workers go by."""
        return Stack(
            use=self.use,
            memory_folder=self.memory_folder,
            local_folder=self.local_folder,
            remote=self.remote,
            replicas=self.replicas,
            failure_domain=self.failure_domain,
            memory_keep=self.memory_keep,
            local_keep=self.local_keep,
            bytes_per_s=self.max_mib_per_second * (1 << 20),
            tries=self.tries,
            pause_s=self.retry_pause_s,
            linger_s=self.linger_s,
            scrub_s=self.scrub_s,
        )
