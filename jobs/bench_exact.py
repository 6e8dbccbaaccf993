"""What exact mode costs: time of a step, and bytes that each worker sends, against the default.

    python jobs/bench_exact.py [--quick] [--json FILE]

Two processes, the main job's model and batch, DDP. Steps of both modes alternate in one run, so that whatever else
the machine does meets both. Exit code 0 only if the target holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from bench_report import conclude, target_of
from bench_worlds import run_world
from model import ModelConfig, Transformer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ray_ckpt.elastic.parallel import Reducer, spread
from ray_ckpt.options import parse, run_main

WORLD, MICRO_BATCHES, MICRO_BATCH, SEQ_LEN = 2, 12, 2, 128
LIMIT = 1.3


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What exact mode costs."""

    rounds: int = 40
    """Steps of each mode, after three to warm up."""
    quick: bool = False
    """Only ten steps of each mode."""
    json: str = ""
    """File for the figures as JSON."""


class _Mode:
    """One mode: its model, its optimizer, and what it sends."""

    def __init__(self, exact: bool) -> None:
        net = Transformer(ModelConfig(max_seq_len=SEQ_LEN))
        net.init_weights(0)
        example = torch.zeros(1, SEQ_LEN - 1, dtype=torch.int64)
        self.model: torch.nn.Module
        self.reducer: Reducer
        self.model, self.reducer = spread(
            net,
            example,
            parallel="ddp",
            exact=exact,
            device=torch.device("cpu"),
            addends=MICRO_BATCHES,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, micro_batches: list[torch.Tensor]) -> None:
        while True:
            for i, tokens in enumerate(micro_batches):
                with self.reducer.one_pass(i == len(micro_batches) - 1):
                    logits = self.model(tokens[:, :-1])
                    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                    (loss * self.reducer.scale).backward()  # type: ignore[no-untyped-call]
            if self.reducer.finish():
                break
        self.reducer.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def counted(mode: _Mode) -> Iterator[list[int]]:
    """Counts the payload of the all-reduces of a block, bytes: DDP's by a hook, others at the call."""
    sizes: list[int] = []
    if isinstance(mode.model, DistributedDataParallel):
        # Without annotations: DDP compares them as objects, and here they are text.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            tensor = bucket.buffer()
            sizes.append(tensor.numel() * tensor.element_size())
            work = dist.all_reduce(tensor.div_(WORLD), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        mode.model.register_comm_hook(None, hook)
        yield sizes
        return
    all_reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = all_reduce


def worker(rank: int, rounds: int) -> dict[str, Any]:
    """Measures on one rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (MICRO_BATCHES // WORLD, MICRO_BATCH, SEQ_LEN)
    micro_batches = list(torch.randint(0, 257, shape, generator=generator))
    modes = {"default": _Mode(False), "exact": _Mode(True)}
    for _ in range(3):
        for mode in modes.values():
            mode.step(micro_batches)
    times: dict[str, list[float]] = {name: [] for name in modes}
    for i in range(rounds):
        for name in list(modes)[:: 1 if i % 2 else -1]:
            dist.barrier()
            started = time.perf_counter()
            modes[name].step(micro_batches)
            times[name].append(time.perf_counter() - started)
    sent = {}
    for name, mode in modes.items():
        with counted(mode) as sizes:
            mode.step(micro_batches)
        sent[name] = sum(sizes)
    return {"times": times, "bytes": sent}


def main() -> int:
    """Measures, prints a table, and holds the ratio against its limit."""
    config = parse(BenchConfig)
    rounds = 10 if config.quick else config.rounds
    found = run_world(worker, WORLD, rounds, timeout_s=60 + 10 * rounds)
    medians = {name: statistics.median(times) for name, times in found["times"].items()}
    pairs = zip(found["times"]["exact"], found["times"]["default"], strict=True)
    ratio = statistics.median(exact / default for exact, default in pairs)
    rows = [
        {"mode": name, "step_s": medians[name], "bytes_sent": found["bytes"][name], "steps": rounds}
        for name in medians
    ]
    print(f"{'mode':<10}{'step, median':>14}{'all-reduced':>14}")
    for row in rows:
        print(
            f"{row['mode']:<10}{1000 * row['step_s']:>11.1f} ms{row['bytes_sent'] / 2**20:>10.2f} MiB"
        )
    target = target_of("exact_step_over_default", ratio, LIMIT)
    return conclude([target], rows, config.json)


if __name__ == "__main__":
    run_main(main)
