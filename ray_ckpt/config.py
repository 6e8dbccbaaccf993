"""Every option of a run, with its unit and its rule.

Options are frozen dataclasses. A wrong value or combination is refused when it is built, with the name of
the option as it is written on the command line, the rule, and the way out.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from tyro.conf import UseAppendAction

from ray_ckpt.checkpoint.guard import FEW_SAVES, GuardRule, OnNonfinite
from ray_ckpt.data.catalog import DataSource, parse_sources
from ray_ckpt.data.plan import check_batch
from ray_ckpt.data.reader import OnCorrupt
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.belief import FAILURES_PER_1000_WORKER_DAYS, ScalePrior
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.policy.hang import HangRule
from ray_ckpt.policy.loops import LoopRule, OnCrashLoop, parse_budgets
from ray_ckpt.tiers.retention import Mode
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stack import Stack, TierName

DEFAULT_HOME = "~/ray_ckpt"

FeedKind = Literal["ray", "local"]
GpuUse = Literal["auto", "yes", "no"]
Parallel = Literal["ddp", "fsdp"]
StagingMode = Literal["blocking", "overlapped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingConfig:
    """How the data is read."""

    window_groups: int = 4
    """Row groups of a stream that are shuffled together; more shuffles better and takes more memory."""
    feed: FeedKind = "ray"
    """Who reads: Ray Data ahead of training, or the training process when it needs the next batch."""
    rows_per_task: int = 16384
    """Rows that one read task of Ray Data reads, about; fewer where they have more than 32 MiB."""
    read_tasks: int = 2
    """Read tasks that run at a time for each worker."""
    prefetch_batches: int = 2
    """Blocks kept ready in each worker."""
    on_corrupt: OnCorrupt = "fatal"
    """A damaged row group: stop and name it, or put other rows in its place and write that down."""

    def __post_init__(self) -> None:
        for name in ("window_groups", "rows_per_task", "read_tasks"):
            _at_least(1, f"--reading.{_flag(name)}", getattr(self, name))
        _at_least(0, "--reading.prefetch-batches", self.prefetch_batches)
        _one_of(FeedKind, "--reading.feed", self.feed)
        _one_of(OnCorrupt, "--reading.on-corrupt", self.on_corrupt)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """When to save."""

    interval_steps: int = 0
    """Save every so many steps; 0 computes the interval from what the run measures."""
    min_interval_s: float = 1.0
    """Least time between saves, seconds."""
    max_interval_s: float = 1800.0
    """Most time between saves, seconds."""
    first_save_steps: int = 10
    """Steps before the first save, while nothing is measured yet."""
    prior_mtbf_s: float = 86400.0
    """Mean time between failures that come with the job, whatever its size; seconds, believed until some are seen."""
    prior_per_1000_worker_days: float = FAILURES_PER_1000_WORKER_DAYS
    """Failures that come with the workers, in 1,000 days of one; believed until some are seen."""
    prior_weight: float = 1.0
    """How many seen failures each of the two beliefs is worth."""
    history: str = ""
    """File of failures seen before this run, on any cluster like this one; `ray-ckpt interruptions import` makes it."""

    def __post_init__(self) -> None:
        try:
            self.limits()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("prior_mtbf_s", "prior_weight"):
            _more_than_0(f"--policy.{_flag(name)}", getattr(self, name))
        try:
            ScalePrior(
                job_mtbf_s=self.prior_mtbf_s,
                per_1000_worker_days=self.prior_per_1000_worker_days,
                weight=self.prior_weight,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def limits(self) -> IntervalLimits:
        """The bounds of the interval."""
        return IntervalLimits(
            fixed_steps=self.interval_steps,
            min_s=self.min_interval_s,
            max_s=self.max_interval_s,
            first_steps=self.first_save_steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingConfig:
    """How saves are made."""

    timeout_s: float = 600.0
    """Longest wait for a save in flight when the run ends, and for a worker that does not answer, seconds."""
    final_tries: int = 3
    """Times the last save of a run is tried before the run is called failed."""
    staging: StagingMode = "blocking"
    """Training stands still for the copy, or only the optimizer's next step waits for it (overlapped)."""
    report_to_ray: bool = True
    """Tell Ray Train of each commit, so that Result.checkpoint and get_checkpoint() know it."""
    allow_missing: UseAppendAction[tuple[str, ...]] = ()
    """Item (ema) or first parts of tensor names (model.head) that only the run or the checkpoint has; repeatable."""

    def __post_init__(self) -> None:
        _more_than_0("--saving.timeout-s", self.timeout_s, " s")
        _at_least(1, "--saving.final-tries", self.final_tries)
        _one_of(StagingMode, "--saving.staging", self.staging)
        for name in self.allow_missing:
            if not name.strip("."):
                raise ConfigError(
                    f"--saving.allow-missing {name!r}: an empty name would allow nothing; give the name of an item "
                    "or tensor, as the error that asked for it has it"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What a checkpoint must be to be committed, and what a run does that is no longer finite."""

    on_nonfinite: OnNonfinite = "stop"
    """A loss, gradient norm or state that is not finite: stop the run and say so (nothing is lost, and nobody decides
    for you); go back to a checkpoint from before and try again; go back and leave out the global batches that led
    there; or train on, without commits until the state is finite. With a gradient scaler only the state counts."""
    max_rollbacks: int = 2
    """Rollbacks in a row; then the run stops. Each goes one checkpoint further back than the one before."""
    band_factor: float = 4.0
    """Refuse a checkpoint whose parameter norm is so many times more or less than at the last saves; 0 for any."""
    band_saves: int = 8
    """Saves that make up the band."""
    ignore: UseAppendAction[tuple[str, ...]] = ()
    """First parts of names of tensors that may hold anything, such as model.mask; repeatable."""

    def __post_init__(self) -> None:
        _one_of(OnNonfinite, "--guard.on-nonfinite", self.on_nonfinite)
        _at_least(1, "--guard.max-rollbacks", self.max_rollbacks)
        _at_least(FEW_SAVES, "--guard.band-saves", self.band_saves)
        if self.band_factor != 0 and not 1 < self.band_factor < math.inf:
            raise ConfigError(
                f"--guard.band-factor {self.band_factor}: must be more than 1, and finite; 0 turns the band off"
            )
        for name in self.ignore:
            if not name.strip("."):
                raise ConfigError(
                    f"--guard.ignore {name!r}: an empty name would ignore nothing; give the name of a tensor, as "
                    "the finding has it, or the first parts of it"
                )

    def rule(self) -> GuardRule:
        """What the tracker goes by."""
        return GuardRule(
            band_factor=self.band_factor,
            band_saves=self.band_saves,
            on_nonfinite=self.on_nonfinite,
            max_rollbacks=self.max_rollbacks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """How the worker group follows the cluster."""

    cpus_per_worker: float = 1.0
    """CPUs that each worker reserves."""
    gpu: GpuUse = "auto"
    """One GPU for each worker; auto uses GPUs when the cluster has any."""
    resize_check_s: float = 20.0
    """Time between looks for more (or fewer) resources while training runs, seconds."""
    start_timeout_s: float = 20.0
    """Longest wait for a worker group to start before another size is tried, seconds."""
    node_loss_wait_s: float = 60.0
    """Longest wait for the cluster to notice that a node is dead, after workers failed, seconds."""
    max_fruitless_attempts: int = 3
    """Attempts in a row that may end before a new step or checkpoint; then the run stops and says why."""
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

    def __post_init__(self) -> None:
        self._check_hangs()
        self._check_loops()
        for name in ("cpus_per_worker", "resize_check_s", "start_timeout_s", "node_loss_wait_s"):
            _more_than_0(f"--elastic.{_flag(name)}", getattr(self, name))
        _one_of(GpuUse, "--elastic.gpu", self.gpu)
        _at_least(1, "--elastic.max-fruitless-attempts", self.max_fruitless_attempts)

    def _check_hangs(self) -> None:
        if self.hang_factor != 0 and not 1 < self.hang_factor < math.inf:
            raise ConfigError(
                f"--elastic.hang-factor {self.hang_factor}: must be more than 1, and finite; 0 looks for no hangs"
            )
        for name in ("hang_min_s", "hang_long_s"):
            _more_than_0(f"--elastic.{_flag(name)}", getattr(self, name), " s")

    def _check_loops(self) -> None:
        _at_least(1, "--elastic.same-failure-tries", self.same_failure_tries)
        _one_of(OnCrashLoop, "--elastic.on-crash-loop", self.on_crash_loop)
        _more_than_0("--elastic.failure-window-s", self.failure_window_s, " s")
        if not 0 <= self.backoff_s < math.inf:
            raise ConfigError(
                f"--elastic.backoff-s {self.backoff_s}: must be 0 or more, and finite; 0 never waits"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig:
    """Which checkpoints are kept: those that any rule keeps. The newest verified one and pinned ones always stay."""

    keep_newest: int = 5
    """So many of the newest; 0 keeps every checkpoint of the run."""
    keep_every_steps: int = 0
    """Also the first at or after each multiple of so many steps; 0 is off."""
    keep_every_s: float = 3600.0
    """Also one per so many seconds of wall time; 0 is off."""
    keep_best: int = 0
    """Also so many with the best value of a metric; 0 is off."""
    metric: str = "loss"
    """Which metric."""
    mode: Mode = "min"
    """Whether its lowest or its highest value is best."""
    keep_steps: UseAppendAction[tuple[int, ...]] = ()
    """Also the checkpoints of this step; repeatable."""
    quarantined: int = 3
    """How many checkpoints that were found bad stay as evidence, at least 1."""
    grace_s: float = 3600.0
    """How long files that an attempt never committed stay after the last of them was written, seconds."""

    def __post_init__(self) -> None:
        try:
            self.rules()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def rules(self) -> Rules:
        """What the tracker and `ray-ckpt gc` go by."""
        return Rules(**{field.name: getattr(self, field.name) for field in fields(self)})


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
            _at_least(1, f"--tiers.{_flag(name)}", getattr(self, name))
        for name in ("replicas", "local_every_steps", "durable_every_steps"):
            _at_least(0, f"--tiers.{_flag(name)}", getattr(self, name))
        if not 0 <= self.scrub_s < math.inf:
            raise ConfigError(f"--tiers.scrub-s {self.scrub_s}: must be 0 or more, and finite")
        for name in ("retry_pause_s", "linger_s"):
            _more_than_0(f"--tiers.{_flag(name)}", getattr(self, name))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A training run."""

    run: str = "pretrain"
    """Name of the run; the same name goes on where the run was left."""
    storage: str = f"{DEFAULT_HOME}/runs"
    """Folder that every node sees and that keeps the runs; an absolute path."""
    data: UseAppendAction[tuple[str, ...]] = ()
    """Folder of Parquet rows of token ids; several NAME=PATH:WEIGHT are mixed; none uses text of every machine."""
    init_from: str = ""
    """File or folder of safetensors with the weights a new run begins with; ignored once there are checkpoints."""
    steps: int = 300
    """Optimizer steps of the whole run."""
    workers: str = "1:2"
    """Fewest and most training workers, MIN:MAX; one number is a fixed size."""
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
        object.__setattr__(self, "data", _paths(self.data, "--data"))
        parse_sources(self.data)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.run):
            raise ConfigError(
                f"--run {self.run!r}: a run's name is a folder's name, of letters, digits, '.', '_' and '-' "
                "(100 at most, the first a letter or digit)"
            )
        _at_least(1, "--steps", self.steps)
        _at_least(2, "--seq-len", self.seq_len)
        _at_least(1, "--log-every", self.log_every)
        _one_of(Parallel, "--parallel", self.parallel)
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


def absolute_folder(value: str, option: str) -> str:
    """A folder option as an absolute path.

    A relative path means one below the folder of whoever starts the program. A submitted job has no such
    folder: its working directory is a temporary copy that is deleted, and a checkpoint in it is lost.

    Raises:
        ConfigError: an empty path, a relative one in a submitted job, or a URI that is not supported.
    """
    if not value.strip():
        raise ConfigError(
            f"{option} {value!r}: an empty path would mean the present folder; write . to mean that one, "
            "or leave the option out for its default."
        )
    if "://" in value:
        raise ConfigError(
            f"{option} {value}: only folders are supported so far, not object stores. Mount it, or use a "
            "shared folder."
        )
    path = Path(value).expanduser()
    if not path.is_absolute() and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        raise ConfigError(
            f"{option} {value}: a relative path in a submitted job would point into the job's working "
            "directory, a temporary copy that is deleted. Give an absolute path on a folder that every node "
            "sees."
        )
    # Not resolve(): links that lead to the shared folder are the user's, and stay as they are.
    return os.path.abspath(path)  # noqa: PTH100


def _paths(value: object, option: str) -> tuple[str, ...]:
    """A repeatable option as words: programs may give one path alone; an empty one is none."""
    values = value if isinstance(value, tuple | list) else (value,)
    for path in values:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"{option} {path!r}: must be a path, or NAME=PATH:WEIGHT")
    words = tuple(os.fspath(path) for path in values)
    return () if words == ("",) else words


def _at_least(least: int, option: str, value: int) -> None:
    if not value >= least:  # so that NaN, which is not less either, is refused
        raise ConfigError(f"{option} {value}: must be at least {least}")


def _more_than_0(option: str, value: float, unit: str = "") -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} {value}: must be more than 0{unit}, and finite")


def _one_of(kind: Any, option: str, value: object) -> None:
    # The command line knows the choices; a file or a program may bring any word.
    choices = get_args(kind)
    if value not in choices:
        raise ConfigError(f"{option} {value!r}: must be one of {', '.join(choices)}")


def _flag(name: str) -> str:
    return name.replace("_", "-")
