"""Whether one tracker is enough for a very large run: commits of many ranks, long journals, many steps.

    python jobs/bench_tracker.py [--quick] [--json FILE] [--folder DIR]

A tracker in this process, without Ray: what is measured is its own work. A commit of 16,384 ranks is the look at as
many files, one manifest with as many names, and its way to the disk. A journal of a million events is that of years;
opening it is what a restarted tracker, or the head of a new cluster, does first. Metrics are told again each second,
beside the tracker and in its process, whatever the length of the journal.

What 100,000 workers on 12,500 nodes have to say. What rides with the sum at the end of a step, rank 0 alone tells: four
bundles of steps a second at most, whatever the number of workers, so their rate is that of the steps. A save is one
report of all ranks. When no step ends for long, one worker of each node asks whether the attempt is still the present
one (``ray_ckpt/elastic/word.py``): 12,500 calls within the 45 s after which the next ones are due. Those are made here
to the tracker's actor in a private Ray, by as few processes as there are cores, each call as a worker makes it.

Exit code 0 only when all targets hold.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import xxhash
from bench_report import conclude, target_of

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.config import ElasticConfig
from ray_ckpt.elastic.leash import FIRST_ASKS
from ray_ckpt.local_ray import cluster as private_ray
from ray_ckpt.options import parse, run_main
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tracker.actor import start_tracker
from ray_ckpt.tracker.client import RayTracker
from ray_ckpt.tracker.core import RunFacts, TrackerCore, TrackerOptions
from ray_ckpt.tracker.journal import JOURNAL_NAME
from ray_ckpt.view.metrics import Metrics

LIMITS = {
    "commit_s": 1.0,
    "open_s_per_million_events": 30.0,
    "steps_s_per_thousand": 1.0,
    "metrics_s_per_tick": 0.05,
    "report_of_all_workers_s": 10.0,
    "asked_by_every_node_s": FIRST_ASKS * ElasticConfig().leash_s,
}
NODES_SHARE = 8  # workers of a node


OPTIONS = TrackerOptions(limits=IntervalLimits(), prior_mtbf_s=86400.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """Whether one tracker is enough for a very large run."""

    quick: bool = False
    """A tenth of the journal, and fewer rounds."""
    json: str = ""
    """File for the figures as JSON."""
    folder: str = ""
    """Folder for the files; the system's temporary one if empty."""
    ranks: int = 16384
    """Ranks of a commit, one file each."""
    events: int = 1_000_000
    """Events of the journal."""
    rounds: int = 5
    """Commits that are timed."""
    workers: int = 100_000
    """Workers that report."""


def tracker_of(run_dir: Path) -> TrackerCore:
    """A tracker that has only what is on the disk."""
    return TrackerCore(facts_of(run_dir), OPTIONS)


def facts_of(run_dir: Path) -> RunFacts:
    """What is known of a run."""
    return RunFacts(
        run="bench",
        run_dir=str(run_dir),
        config_fingerprint="",
        data_fingerprint="",
        parallel="fsdp",
        versions={},
    )


def timed(call: Callable[[], Any]) -> float:
    """How long a call takes, seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def written(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """A file for each rank, and what the ranks tell of them."""
    folder.mkdir(parents=True)
    digest = xxhash.xxh3_128_hexdigest(b"x")
    names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))]
    for name in names:
        (folder / name).write_bytes(b"x")
    return [{"path": name, "bytes": 1, "checksum": digest} for name in names]


def commits(base: Path, ranks: int, rounds: int) -> list[float]:
    """Times of commits of so many ranks, seconds."""
    tracker = tracker_of(base)
    nodes = [f"node-{rank // NODES_SHARE}" for rank in range(ranks)]
    generation = tracker.begin_attempt(ranks, nodes).generation
    times = []
    for number in range(1, rounds + 1):
        files = written(base / CHECKPOINTS_DIR / checkpoint_name(number, generation), ranks)
        save = {
            "step": number,
            "samples": number,
            "tokens": number,
            "world_size": ranks,
            "files": files,
            "paces": [(node, 0.1) for node in nodes],
            "stall_s": 1.0,
            "upload_s": 1.0,
            "metrics": {},
            "guard": {},
            "error": None,
            "bitwise_comparable": True,
        }
        times.append(timed(lambda save=save: tracker.commit(generation, save)))  # type: ignore[misc]
    return times


def long_journal(path: Path, events: int) -> None:
    """The journal of a run that commits, decides and fails, over and over."""
    kinds: list[dict[str, Any]] = [
        {
            "event": "commit",
            "bytes": 1 << 40,
            "files": 16385,
            "world_size": 16384,
            "sample_offset": 1,
        }
        | {"stall_s": 1.0, "upload_s": 30.0, "exposure_s": 1.0},
        {"event": "verified", "seconds": 1.0},
        {"event": "delete", "reason": "older than the newest 5"},
        {
            "event": "decision",
            "every_steps": 100,
            "reason": "exact",
            "interval_s": 1.0,
            "formula": "x",
        },
    ]
    with path.open("w") as file:
        file.write('{"time": 1.0, "generation": 1, "event": "attempt_started", "world_size": 8}\n')
        for number in range(events):
            step = number // len(kinds)
            line: dict[str, Any] = {
                "time": float(number),
                "generation": 1,
                **kinds[number % len(kinds)],
            }
            name = checkpoint_name(max(0, step - 5 * (line["event"] == "delete")), 1)
            file.write(json.dumps({**line, "step": step, "name": name}) + "\n")


def thousand_steps(base: Path) -> list[float]:
    """Times of a thousand steps, told in bundles of ten, seconds."""
    tracker = tracker_of(base)
    generation = tracker.begin_attempt(8, []).generation
    times = []
    for first in range(1, 10_001, 1000):
        bundles = [
            [{"step": step, "loss": 1.0, "step_time_s": 1.0} for step in range(at, at + 10)]
            for at in range(first, first + 1000, 10)
        ]
        times.append(timed(lambda b=bundles: [tracker.steps(generation, each) for each in b]))  # type: ignore[misc]
    return times


class Nowhere:
    """Metrics that nobody reads: what Ray does with them is not the tracker's work."""

    def set(self, name: str, value: str, number: float) -> None:
        pass

    def observe(self, name: str, value: str, number: float) -> None:
        pass

    def count(self, name: str, value: str) -> None:
        pass


def asked(base: Path, nodes: int) -> float:
    """How long the tracker's actor takes to answer a worker of each node, seconds."""
    clients = os.cpu_count() or 1
    with private_ray(clients):
        actor = start_tracker(facts_of(base), OPTIONS)
        generation = ray.get(actor.begin_attempt.remote(nodes * NODES_SHARE, [])).generation

        ask = ray.remote(_ask)
        ray.get([ask.remote(10, generation) for _ in range(clients)])  # the processes are there
        share = nodes // clients
        return timed(lambda: ray.get([ask.remote(share, generation) for _ in range(clients)]))


def _ask(count: int, generation: int) -> None:
    for _ in range(count):
        RayTracker("bench").call("check", generation=generation)


def ticks(run_dir: Path, events: int, rounds: int) -> tuple[float, list[float]]:
    """How long its metrics take to have read the journal, and times of telling all of them; seconds."""
    tracker = tracker_of(run_dir)
    metrics = Metrics(facts_of(run_dir), OPTIONS, instruments=Nowhere())
    metrics.count({"event": "tracker_started", "events_read": events})

    def tick() -> None:
        metrics.look(tracker.status(), tracker.memory)
        metrics.tick()

    def catch_up() -> None:
        while not metrics.caught_up:
            tick()

    return timed(catch_up), [timed(tick) for _ in range(10 * rounds)]


def main() -> int:
    """Measures, prints a table, and holds it against the limits."""
    config = parse(BenchConfig)
    if config.quick:
        config = BenchConfig(
            quick=True,
            json=config.json,
            folder=config.folder,
            events=100_000,
            rounds=3,
            workers=10_000,
        )
    with tempfile.TemporaryDirectory(dir=config.folder or None) as folder:
        base = Path(folder)
        commit_times = commits(base / "commits", config.ranks, config.rounds)
        all_times = commits(base / "all", config.workers, 1)
        (base / "journal").mkdir()
        long_journal(base / "journal" / JOURNAL_NAME, config.events)
        open_s = timed(lambda: tracker_of(base / "journal"))
        first_s, tick_times = ticks(base / "journal", config.events + 1, config.rounds)
        step_times = thousand_steps(base / "steps")
        nodes = config.workers // NODES_SHARE
        asked_s = asked(base / "asked", nodes)
    values = {
        "commit_s": statistics.median(commit_times),
        "open_s_per_million_events": open_s * 1e6 / config.events,
        "steps_s_per_thousand": statistics.median(step_times),
        "metrics_s_per_tick": max(tick_times),
        "report_of_all_workers_s": all_times[0],
        "asked_by_every_node_s": asked_s,
    }
    targets = [target_of(name, value, LIMITS[name]) for name, value in values.items()]
    rows: list[dict[str, Any]] = [
        {"what": f"commit of {config.ranks} ranks", "seconds": commit_times},
        {"what": f"journal of {config.events} events opened", "seconds": [open_s]},
        {"what": "1000 steps told", "seconds": step_times},
        {"what": "its metrics have read it", "seconds": [first_s]},
        {"what": "its metrics told", "seconds": tick_times},
        {"what": f"a save of {config.workers} workers told", "seconds": all_times},
        {"what": f"asked by each of {nodes} nodes", "seconds": [asked_s], "per_s": nodes / asked_s},
    ]
    for row in rows:
        print(f"{row['what']:<40}{statistics.median(row['seconds']):>9.3f} s")
    return conclude(targets, rows, config.json)


if __name__ == "__main__":
    run_main(main)
