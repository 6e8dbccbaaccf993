"""Runs a function in W gloo processes on this machine, and a small training function for them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

JOBS = Path(__file__).resolve().parent.parent.parent / "jobs"
HERE = Path(__file__).resolve().parent

# What a worker imports sooner or later; imported once, it costs a world tenths of a second instead of seconds.
PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "pandas",
    "ray_ckpt.session",
    "ray_ckpt.resume",
]


def run_world(
    target: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Calls ``target(rank, world_size, *args)`` in every process; returns what each returned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_main, args=(folder, target, rank, world_size, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode not in (None, 0) for p in processes):
                break  # its peers would wait for it
            time.sleep(0.02)
        late = [p for p in processes if p.is_alive()]
        for process in late:
            process.kill()
        for process in processes:
            process.join()
        results, errors = [], []
        for rank in range(world_size):
            path = Path(folder) / f"result-{rank}"
            kind, value = (
                pickle.loads(path.read_bytes()) if path.exists() else ("gone", "no result")
            )
            results.append(value)
            if kind != "ok":
                errors.append(f"rank {rank} ({kind}): {value}")
    if errors:
        raise AssertionError("\n".join(errors))
    return results


def _main(folder: str, target: Callable[..., Any], rank: int, world: int, args: Any) -> None:
    sys.path[:0] = [str(JOBS), str(HERE)]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        result = ("ok", target(rank, world, *args))
    except BaseException:  # noqa: BLE001 - told to the test
        result = ("error", traceback.format_exc())
    path = Path(folder) / f"result-{rank}"
    path.with_suffix(".tmp").write_bytes(pickle.dumps(result))
    path.with_suffix(".tmp").rename(path)
    # A world that was left in the middle has threads that wait for each other: do not join them.
    os._exit(0 if result[0] == "ok" else 1)


def make_data(folder: Path, row_groups: list[int], seq_len: int = 9, vocab: int = 31) -> None:
    """Writes one Parquet file of random token rows with row groups of the given sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    schema = pa.schema([("tokens", pa.list_(pa.uint16(), seq_len))])
    with pq.ParquetWriter(folder / "part-00000.parquet", schema) as writer:
        for rows in row_groups:
            flat = pa.array(generator.integers(0, vocab, rows * seq_len).astype(np.uint16))
            table = pa.table([pa.FixedSizeListArray.from_arrays(flat, seq_len)], schema=schema)
            writer.write_table(table, row_group_size=max(rows, 1))


def make_config(folder: Path, **changes: Any) -> Any:
    """A configuration for :func:`train` below ``folder``."""
    from ray_ckpt.config import Config, PolicyConfig, ReadingConfig, SavingConfig

    base = Config(
        run="run",
        storage=str(folder),
        data=str(folder / "data"),
        steps=12,
        workers="1:5",
        global_batch=10,
        micro_batch=2,
        seq_len=9,
        reading=ReadingConfig(feed="local", window_groups=2),
        policy=PolicyConfig(interval_steps=3),
        saving=SavingConfig(timeout_s=60.0, report_to_ray=False),
    )
    return replace(base, **changes)


def make_core(config: Any) -> Any:
    """A tracker for a configuration, in this process."""
    from ray_ckpt.facts import check_run, tracker_options
    from ray_ckpt.tracker.core import TrackerCore

    return TrackerCore(check_run(config, {}), tracker_options(config))


def open_session(rank: int, config: Any, *, dropout: float = 0.1, seed: int = 3) -> Any:
    """A session and a small model for one rank: ``(session, state, model)``; nothing restored yet."""
    import torch
    from model import ModelConfig, Transformer

    from ray_ckpt.session import Session
    from ray_ckpt.state.schedule import warmup_cosine
    from ray_ckpt.state.train_state import TrainState
    from ray_ckpt.tracker.client import LocalTracker

    tracker = LocalTracker(make_core(config)) if rank == 0 else None
    device = torch.device("cpu")
    session = Session(config, tracker=tracker, device=device)
    net = Transformer(
        ModelConfig(
            vocab_size=31, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, dropout=dropout
        )
    )
    net.init_weights(seed)
    example = torch.zeros(1, config.seq_len - 1, dtype=torch.int64)
    model = session.spread(net, example)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
    )
    scheduler = warmup_cosine(optimizer, 3, config.steps, 0.1)
    return session, TrainState(model=model, optimizer=optimizer, scheduler=scheduler), model


def train(
    rank: int,
    world: int,
    config: Any,
    stop_after: int | None = None,
    kill: bool = False,
    on_step: Callable[[Any, int], None] | None = None,
    overlap: bool = False,
) -> dict[str, Any]:
    """Trains to the end, or leaves abruptly after a step (as a killed worker does)."""
    from torch.nn.functional import cross_entropy

    from ray_ckpt.checkpoint.digest import state_digest

    session, state, model = open_session(rank, config)
    session.restore(state)
    started = state.progress.step
    at_start = state_digest(state)
    for batch in session.batches():
        for micro in batch:
            logits = model(micro.tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), micro.tokens[:, 1:].flatten())
            batch.backward(micro, loss)
        session.clip_grad_norm(1.0)
        lr = session._state.optimizer.param_groups[0]["lr"]
        state.optimizer.step()
        state._parts["scheduler"].step()
        state.optimizer.zero_grad()
        if session.step_end(lr=lr).save and not overlap:
            session._saving.wait(60)  # so that the next save never waits, and its step is known
        if on_step is not None:
            on_step(session, state.progress.step)
        if state.progress.step == stop_after:
            session._saving.wait(60)  # the save before this step is not what is under test
            session._steward.exchange(flush=True)
            if kill and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"started": started, "at_start": at_start, "at_end": state_digest(state)}
    session.close()
    return {"started": started, "at_start": at_start, "at_end": state_digest(state)}


def history(config: Any) -> dict[int, dict[str, Any]]:
    """The surviving history of a run."""
    from ray_ckpt.view.summary import surviving_steps

    return surviving_steps(config.run_dir)


def events(config: Any, kind: str | None = None) -> list[dict[str, Any]]:
    """Events of a run's journal, of one kind or all."""
    from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines

    lines = list(read_lines(config.run_dir / JOURNAL_NAME))
    return [line for line in lines if kind in (None, line["event"])]
