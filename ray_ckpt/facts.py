"""What is known of a run before it starts: its order, its identity, and whether its folder can be used."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.trust import key_problem
from ray_ckpt.config import Config
from ray_ckpt.data.catalog import Index, MixedIndex, load_data
from ray_ckpt.data.feed import MicroBatch
from ray_ckpt.data.mixture import Order, mixed_order
from ray_ckpt.data.order import GlobalOrder
from ray_ckpt.data.own import OwnIndex, dataset_order
from ray_ckpt.data.permute import mix
from ray_ckpt.elastic.control import digest_samples
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.initial import INIT_FROM, initial_weights
from ray_ckpt.policy.belief import Seen
from ray_ckpt.policy.history import history_from_json
from ray_ckpt.policy.resize import ResizeRules
from ray_ckpt.segment import FIRST, Segment
from ray_ckpt.tracker.core import RunFacts, TrackerOptions
from ray_ckpt.tracker.identity import check_identity, fingerprint
from ray_ckpt.tracker.recall import recall
from ray_ckpt.tracker.rollback import passed_over
from ray_ckpt.tracker.shelf import newest_usable
from ray_ckpt.view.summary import snapshot_problem

_SEGMENT = 7  # the purpose of a draw, as those in order.py, reader.py and mixture.py


def index_of(config: Config) -> Index | OwnIndex:
    """What the data of a run is.

    Raises:
        ConfigError: no source is named.
        DataError: a folder that is no data, or sources that do not fit together.
    """
    return OwnIndex(num_rows=config.samples) if config.samples else load_data(config.sources)


def global_order(config: Config, segment: Segment = FIRST) -> Order:
    """The global order of samples that a configuration names."""
    return order_of(index_of(config), config, segment)


def order_of(index: Index | OwnIndex, config: Config, segment: Segment = FIRST) -> Order:
    """The global order of some data, in a segment of a run.

    Segment 0 draws from the run's seed. A later one has its own: a run whose batch changed would see again
    the rows that it began with, first.
    """
    number = segment.number
    seed = mix(config.seed, number, _SEGMENT) if number else config.seed
    if isinstance(index, OwnIndex):
        return dataset_order(
            index.num_rows,
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            seed=seed,
        )
    if isinstance(index, MixedIndex):
        return mixed_order(
            [part.row_group_sizes for part in index.parts],
            names=[source.name for source in index.sources],
            weights=[source.weight for source in index.sources],
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            seed=seed,
            window_groups=config.reading.window_groups,
        )
    return GlobalOrder(
        row_group_sizes=index.row_group_sizes,
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        seed=seed,
        window_groups=config.reading.window_groups,
    )


def check_run(config: Config, identity: Mapping[str, Any]) -> RunFacts:
    """Refuses what cannot work; the first start of a run writes down what must stay the same.

    A change that ``--change-at-resume`` declares is let pass: the tracker makes a segment of it.

    Raises:
        ConfigError: the options contradict the data, or what the run began with.
        StorageError: the run's folder cannot be used.
        RestoreError: the run has checkpoints, and none can be used.
    """
    if problem := key_problem(config.run_dir):
        raise ConfigError(problem)
    index = index_of(config)
    if not isinstance(index, OwnIndex) and index.seq_len != config.seq_len:
        folders = " and ".join(source.path for source in config.sources)
        raise ConfigError(
            f"--seq-len {config.seq_len}: the rows in {folders} have {index.seq_len} tokens. Use "
            f"--seq-len {index.seq_len}, or prepare the data again with jobs/prepare.py."
        )
    order_of(index, config)  # refuses data that is less than a global batch
    _history(config.policy.history)
    names = {
        "--global-batch": config.global_batch,
        "--micro-batch": config.micro_batch,
        "--seq-len": config.seq_len,
        "--seed": config.seed,
        "--exact": config.exact,
        "--reading.window-groups": config.reading.window_groups,
        "--data (fingerprint of its content)": _data_identity(index),
        INIT_FROM: initial_weights(config),
        **identity,
    }
    notice = check_identity(config.run_dir, names, config.change_at_resume)
    if notice:
        print(notice, flush=True)
    probe(config.run_dir)
    _check_checkpoints(config)
    return RunFacts(
        run=config.run,
        run_dir=str(config.run_dir),
        config_fingerprint=fingerprint(names),
        data_fingerprint=index.fingerprint,
        parallel=config.parallel,
        versions=versions(),
        identity=names,
        change_reason=config.change_at_resume,
    )


def _check_checkpoints(config: Config) -> None:
    """Refuses what the tracker would refuse; it alone sets a damaged checkpoint aside.

    What the nodes of a cluster hold only the tracker can ask.
    """
    if config.tiers.stack().node_tiers:
        return
    memory, entries = recall(config.run_dir), list_checkpoints(config.run_dir)
    gone = passed_over(entries, memory.left)
    newest_usable(config.run, config.run_dir, entries, commits=memory.durable_commits, passed=gone)


def _data_identity(index: Index | OwnIndex) -> str:
    """What stays the same: paths may change, content, names, weights and their order may not."""
    if isinstance(index, OwnIndex):
        return f"{index.num_rows} samples of the training function's own"
    if not isinstance(index, MixedIndex):
        return index.fingerprint
    pairs = zip(index.sources, index.parts, strict=True)
    return " ".join(f"{source.name}={part.fingerprint}:{source.weight}" for source, part in pairs)


def tracker_options(config: Config) -> TrackerOptions:
    """How the tracker decides, from the options of the run."""
    return TrackerOptions(
        limits=config.policy.limits(),
        prior_mtbf_s=config.policy.prior_mtbf_s,
        prior_per_1000_worker_days=config.policy.prior_per_1000_worker_days,
        prior_weight=config.policy.prior_weight,
        history=_history(config.policy.history),
        max_fruitless=config.elastic.max_fruitless_attempts,
        loops=config.elastic.loop_rule(),
        stragglers=config.elastic.straggler_rule(),
        retention=config.retention.rules(),
        guard=config.guard.rule(),
        stack=config.tiers.stack(),
        tier_steps={
            "local": config.tiers.local_every_steps,
            "durable": config.tiers.durable_every_steps,
        },
        drain_margin_s=config.elastic.drain_margin_s,
        resize=ResizeRules(
            micro_batches=config.global_batch // config.micro_batch,
            total_steps=config.steps,
            sizes=config.preferred_sizes,
            min_gain=config.elastic.min_gain,
            cooldown_s=config.elastic.cooldown_s,
            settle_s=config.elastic.settle_s,
        ),
    )


def _history(path: str) -> tuple[Seen, ...]:
    if not path:
        return ()
    try:
        return history_from_json(json.loads(Path(path).expanduser().read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--policy.history {path}: {error}. Make it with: ray-ckpt interruptions import FILE.csv"
        ) from error


def expected_digest(order: Order, step: int, *, global_batch: int, micro_batch: int) -> str:
    """Digest that ``steps.jsonl`` must have of the samples of a step, from the order alone.

    Args:
        order: of the run, or of the segment that the step is in.
        step: steps of the order before it: 0 is its first.
        global_batch: samples of a step.
        micro_batch: samples of one pass.
    """
    rows = order.rows_at(np.arange(step * global_batch, (step + 1) * global_batch))
    none = np.empty((0, 0), np.int64)
    micros = (
        MicroBatch(index=j, tokens=none, rows=each, positions=each)
        for j, each in enumerate(rows.reshape(-1, micro_batch))
    )
    return f"{digest_samples(micros):016x}"


def versions() -> dict[str, str]:
    """Versions of what decides the bits of a result."""
    from importlib.metadata import version

    names = ("torch", "ray", "numpy", "pyarrow", "ray-ckpt")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def probe(run_dir: Path) -> None:
    """Writes, syncs and removes a file in the run's folder, and looks at Ray's record of it."""
    path = run_dir / f".probe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(b"\0" * (1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"{run_dir} cannot be written ({error.strerror}). --storage must be a folder with room, "
            "which this user may write to."
        ) from error
    finally:
        path.unlink(missing_ok=True)
    problem = snapshot_problem(run_dir)
    if problem:
        print(problem, flush=True)
