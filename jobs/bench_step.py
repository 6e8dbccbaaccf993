"""What all of ray_ckpt's accounting costs a step, against the same training loop without it.

    python jobs/bench_step.py [--quick] [--json FILE]

Two processes, a small decoder under DDP, the same rows from memory. The bare loop makes the passes, clips, steps the
optimizer and all-reduces its loss, as any loop does that knows its loss. The other one is what README.md shows:
``session.batches()``, ``batch.backward()``, ``session.clip_grad_norm()``, ``session.step_end()``, with a tracker in a
process of its own, and no save. Blocks of steps of both alternate, so that whatever else the machine does meets both;
figures are medians of the blocks and of their pairs, the latter with their standard error. Collectives are counted at
the calls of ``torch.distributed``, those of DDP's gradients aside: there must be no more of them than in the bare loop.

The step is kept short, tens of milliseconds: what the accounting costs does not grow with the model. Beside it the same
is measured with a model of next to nothing. On a busy machine look at the calm steps, the quickest twentieth: they
leave out the bundles for the tracker, a few microseconds a step.

Exit code 0 only if all targets hold.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_report import conclude, target_of
from bench_session import FromMemory, MemorySession, PipeTracker, make_rows
from bench_worlds import run_world
from model import ModelConfig, Transformer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ray_ckpt.config import Config, PolicyConfig, ReadingConfig, SavingConfig
from ray_ckpt.data.feed import MicroBatch
from ray_ckpt.elastic.parallel import spread
from ray_ckpt.options import parse, run_main
from ray_ckpt.state.train_state import TrainState

WORLD, MICRO_BATCHES, MICRO_BATCH, SEQ_LEN, VOCAB = 2, 4, 4, 129, 257
# Decoders with steps of tens of milliseconds, and of next to nothing.
SHAPES = {
    "decoder": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "tiny": {"dim": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1},
}
RATIO_LIMIT, ADDED_MS_LIMIT = 1.01, 0.2
# So many of the steps are quicker than the one that is called calm: nothing else had the machine meanwhile.
CALM = 0.05
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What all of ray_ckpt's accounting costs a step."""

    rounds: int = 200
    """Blocks of each loop."""
    block: int = 10
    """Steps of a block; a bundle of steps goes to the tracker every quarter of a second, so about once a block."""
    quick: bool = False
    """Only 60 blocks of each loop."""
    json: str = ""
    """File for the figures as JSON."""


def make_model(shape: str) -> torch.nn.Module:
    """A decoder of one of the shapes."""
    net = Transformer(ModelConfig(**SHAPES[shape], max_seq_len=SEQ_LEN))  # type: ignore[arg-type]
    net.init_weights(0)
    return net


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of a pass."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Bare:
    """The loop without ray_ckpt."""

    def __init__(self, shape: str, micro_batches: list[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        example = torch.zeros(1, SEQ_LEN - 1, dtype=torch.int64)
        # The same wrapping: only the accounting differs.
        self._model, _ = spread(
            make_model(shape),
            example,
            parallel="ddp",
            exact=False,
            device=torch.device("cpu"),
            addends=MICRO_BATCHES,
        )
        assert isinstance(self._model, DistributedDataParallel)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def step(self) -> float:
        """One step; its loss."""
        model = self._model
        assert isinstance(model, DistributedDataParallel)
        total = torch.zeros(())
        for number, micro in enumerate(self._micro_batches):
            last = number == len(self._micro_batches) - 1
            with nullcontext() if last else model.no_sync():
                loss = loss_of(model, torch.from_numpy(micro.tokens))
                (loss * (WORLD / MICRO_BATCHES)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / MICRO_BATCHES


class Accounted:
    """The loop with ray_ckpt."""

    def __init__(
        self, shape: str, micro_batches: list[MicroBatch], config: Config, rank: int
    ) -> None:
        self._session = MemorySession(
            config, tracker=PipeTracker(config) if rank == 0 else None, device=torch.device("cpu")
        )
        self._session.rows = FromMemory(micro_batches)
        example = torch.zeros(1, SEQ_LEN - 1, dtype=torch.int64)
        self._model = self._session.spread(make_model(shape), example)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._session.restore(TrainState(model=self._model, optimizer=self._optimizer))
        self._batches = self._session.batches()

    def step(self) -> float:
        """One step; its loss."""
        batch = next(self._batches)
        for micro in batch:
            batch.backward(micro, loss_of(self._model, micro.tokens))
        norm = self._session.clip_grad_norm(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        agreement = self._session.step_end(lr=1e-3, grad_norm=norm)
        assert not agreement.save, "a save is inside the window"
        return agreement.loss


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of collectives by name."""
    calls: Counter[str] = Counter()
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        @wraps(real[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real[name](*args, **kwargs)

        return call

    try:
        for name in COLLECTIVES:
            setattr(dist, name, counting(name))
        yield calls
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def worker(rank: int, shape: str, folder: str, rounds: int, block: int) -> dict[str, Any]:
    """Measures on one rank: seconds of a step by loop and block, and of the process's own time; collectives."""
    generator = np.random.default_rng(rank)
    share = range(rank * MICRO_BATCHES // WORLD, (rank + 1) * MICRO_BATCHES // WORLD)
    micro_batches = [
        MicroBatch(
            index=index,
            tokens=generator.integers(0, VOCAB, (MICRO_BATCH, SEQ_LEN)),
            rows=np.arange(MICRO_BATCH) + index * MICRO_BATCH,
            positions=np.arange(MICRO_BATCH) + index * MICRO_BATCH,
        )
        for index in share
    ]
    loops: dict[str, Bare | Accounted] = {
        "bare": Bare(shape, micro_batches),
        "ray_ckpt": Accounted(shape, micro_batches, config_of(Path(folder)), rank),
    }
    losses = {name: [loop.step() for _ in range(5)] for name, loop in loops.items()}
    if not np.allclose(losses["bare"], losses["ray_ckpt"], rtol=1e-4):
        raise RuntimeError(f"the two loops do not train the same: {losses}")
    times: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    steps: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in list(loops)[:: 1 if number % 2 else -1]:
            step = loops[name].step
            dist.barrier()
            started, spent = time.perf_counter(), time.process_time()
            for _ in range(block):
                began = time.perf_counter()
                step()
                steps[name].append(time.perf_counter() - began)
            times[name].append((time.perf_counter() - started) / block)
            cpu[name].append((time.process_time() - spent) / block)
    calls = {}
    for name, loop in loops.items():
        with counted() as found:
            for _ in range(10):
                loop.step()
        calls[name] = {kind: count / 10 for kind, count in found.items()}
    calm = {name: float(np.quantile(found, CALM)) for name, found in steps.items()}
    return {"times": times, "cpu": cpu, "calm": calm, "calls": calls}


def config_of(folder: Path) -> Config:
    """A run that never saves."""
    return Config(
        run="bench",
        storage=str(folder),
        data=(str(folder / "data"),),
        steps=10**7,
        workers=str(WORLD),
        global_batch=MICRO_BATCHES * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        seq_len=SEQ_LEN,
        reading=ReadingConfig(feed="local"),
        policy=PolicyConfig(interval_steps=10**6),
        saving=SavingConfig(report_to_ray=False),
    )


def measured(shape: str, rounds: int, block: int) -> list[dict[str, Any]]:
    """A row for each loop; that of ray_ckpt has what it adds to the bare one."""
    with tempfile.TemporaryDirectory() as folder:
        make_rows(Path(folder) / "data", SEQ_LEN)
        found = run_world(worker, WORLD, shape, folder, rounds, block)
    rows = [
        {
            "model": shape,
            "loop": name,
            "step_s": statistics.median(times),
            "calm_s": found["calm"][name],
            "cpu_s": statistics.median(found["cpu"][name]),
            "collectives_per_step": sum(found["calls"][name].values()),
            "collectives": found["calls"][name],
            "blocks": rounds,
            "block_steps": block,
        }
        for name, times in found["times"].items()
    ]
    ours, bare = found["times"]["ray_ckpt"], found["times"]["bare"]
    over = [a / b for a, b in zip(ours, bare, strict=True)]
    rows[1] |= {"over_bare": statistics.median(over), "over_bare_error": error_of(over)}
    for name, what in (("added", "times"), ("added_cpu", "cpu")):
        pairs = zip(found[what]["ray_ckpt"], found[what]["bare"], strict=True)
        more = [1000 * (a - b) for a, b in pairs]
        rows[1] |= {f"{name}_ms": statistics.median(more), f"{name}_ms_error": error_of(more)}
    return rows


def error_of(values: list[float]) -> float:
    """Standard error of a median, from the median deviation: few wild values do not move it."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / float(np.sqrt(len(values)))


def main() -> int:
    """Measures, prints a table, and holds the figures against their limits."""
    config = parse(BenchConfig)
    rounds = 60 if config.quick else config.rounds
    rows = [row for shape in SHAPES for row in measured(shape, rounds, config.block)]
    print(
        f"{'model':<10}{'loop':<10}{'step':>11}{'calm':>11}{'own time':>12}{'added':>22}{'collectives':>13}"
    )
    for row in rows:
        added = ""
        if "added_ms" in row:
            added = f"{row['added_ms']:.3f} +- {row['added_ms_error']:.3f} ms"
        print(
            f"{row['model']:<10}{row['loop']:<10}{1000 * row['step_s']:>8.2f} ms"
            f"{1000 * row['calm_s']:>8.2f} ms{1000 * row['cpu_s']:>9.2f} ms"
            f"{added:>22}{row['collectives_per_step']:>13.1f}"
        )
    bare, ours = rows[:2]
    extra = ours["collectives_per_step"] - bare["collectives_per_step"]
    targets = [
        target_of("step_over_bare", ours["over_bare"], RATIO_LIMIT),
        target_of("added_ms", ours["added_ms"], ADDED_MS_LIMIT),
        target_of("extra_collectives", extra, 0),
    ]
    return conclude(targets, rows, config.json)


if __name__ == "__main__":
    run_main(main)
