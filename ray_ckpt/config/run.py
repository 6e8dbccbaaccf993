"""Options of a run as a whole; the groups have modules of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import UseAppendAction

from ray_ckpt.config.checks import at_least, one_of
from ray_ckpt.config.elastic import ElasticConfig
from ray_ckpt.config.folders import paths
from ray_ckpt.config.guard import GuardConfig
from ray_ckpt.config.policy import PolicyConfig
from ray_ckpt.config.reading import ReadingConfig
from ray_ckpt.config.retention import RetentionConfig
from ray_ckpt.config.saving import SavingConfig
from ray_ckpt.config.tiers import TiersConfig
from ray_ckpt.data.catalog import DataSource, parse_sources
from ray_ckpt.data.plan import check_batch
from ray_ckpt.errors import ConfigError

DEFAULT_HOME = "~/ray_ckpt"

Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A training run."""

    run: str = "pretrain"
    """Name of the run; the same name goes on where the run was left."""
    storage: str = f"{DEFAULT_HOME}/runs"
    """Folder that every node sees and that keeps the runs; an absolute path."""
    data: UseAppendAction[tuple[str, ...]] = ()
    """Folder of Parquet rows of token ids; several NAME=PATH:WEIGHT are mixed; none uses text of every machine."""
    samples: int = 0
    """Samples of a dataset that the training function brings itself, in place of --data; 0 reads --data."""
    init_from: str = ""
    """File or folder of safetensors with the weights a new run begins with; ignored once there are checkpoints."""
    steps: int = 300
    """Optimizer steps of the whole run."""
    workers: str = "1:2"
    """Fewest and most training workers, MIN:MAX; one number is a fixed size."""
    worker_sizes: str = ""
    """Numbers of workers that are preferred, such as 8,16,32: the largest that fits; where none does, any number."""
    global_batch: int = 24
    """Samples per optimizer step, whatever the number of workers."""
    micro_batch: int = 2
    """Samples per forward and backward pass; must divide the global batch."""
    seq_len: int = 128
    """Tokens in a row of data."""
    seed: int = 0
    """Decides initial weights, order of samples and random numbers."""
    parallel: Parallel = "ddp"
    """How the model is spread over workers: whole copies (DDP) or shards (FSDP2)."""
    exact: bool = False
    """Sum gradients so that losses and weights are the same bits for any number of workers; slower."""
    change_at_resume: str = ""
    """Why, in words, this resume has other data, weights, batch sizes, row length or window: starts a segment."""
    log_every: int = 10
    """Steps between progress lines."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", paths(self.data, "--data"))
        parse_sources(self.data)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.run):
            raise ConfigError(
                f"--run {self.run!r}: a run's name is a folder's name, of letters, digits, '.', '_' and '-' "
                "(100 at most, the first a letter or digit)"
            )
        at_least(0, "--samples", self.samples)
        if self.samples and self.data:
            raise ConfigError(
                f"--samples {self.samples} with --data {self.data[0]}: samples are those of a dataset that the "
                "training function brings itself, data is read for it. Give one of the two."
            )
        at_least(1, "--steps", self.steps)
        at_least(2, "--seq-len", self.seq_len)
        at_least(1, "--log-every", self.log_every)
        one_of(Parallel, "--parallel", self.parallel)
        check_batch(self.global_batch, self.micro_batch)
        if self.change_at_resume and not self.change_at_resume.strip():
            raise ConfigError(
                f"--change-at-resume {self.change_at_resume!r}: give the reason in words; it stays on record with "
                "the run"
            )
        low, high = self.worker_range
        most = self.global_batch // self.micro_batch
        if not 1 <= low <= high:
            raise ConfigError(f"--workers {self.workers}: need 1 <= MIN <= MAX")
        if high > most:
            raise ConfigError(
                f"--workers {self.workers}: at most {most} workers can share a global batch of "
                f"{self.global_batch} in micro-batches of {self.micro_batch}. Lower MAX, make --micro-batch "
                "smaller or --global-batch larger."
            )
        if outside := [size for size in self.preferred_sizes if not low <= size <= high]:
            raise ConfigError(
                f"--worker-sizes {self.worker_sizes}: {outside[0]} is not within --workers {self.workers}"
            )

    @property
    def preferred_sizes(self) -> tuple[int, ...]:
        """Preferred numbers of workers, growing."""
        words = [word.strip() for word in self.worker_sizes.split(",")] if self.worker_sizes else []
        if not all(re.fullmatch(r"\d+", word) for word in words):
            raise ConfigError(
                f"--worker-sizes {self.worker_sizes!r}: write numbers with commas between them, such as 8,16,32"
            )
        return tuple(sorted({int(word) for word in words}))

    @property
    def worker_range(self) -> tuple[int, int]:
        """Fewest and most workers."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.workers.strip())
        if match is None:
            raise ConfigError(
                f"--workers {self.workers!r}: write MIN:MAX, such as 1:8, or one number"
            )
        low = int(match[1])
        return low, int(match[2]) if match[2] else low

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The folders of ``data``, with their names and weights."""
        return parse_sources(self.data)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.storage) / self.run
