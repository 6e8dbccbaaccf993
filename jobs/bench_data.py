"""How fast the data comes, against what else one would use, on the same rows in one run.

    python jobs/bench_data.py --quick                 a minute and a half, without litdata and torchdata
    python jobs/bench_data.py --json data.json        five minutes; below 1 GB on disk

Rows per second of this project's feed, of plain Ray Data without order
(``ray.data.read_parquet(...).iter_batches``), of ``litdata`` and of torchdata's ``StatefulDataLoader``, for
1 and 2 consumers; the time to the first batch at the start and at 90 % of a large set, against
skipping to it; and how long the main job's training function waits for its data, as a share of its step
time. The readers take turns, and figures are medians of the rounds, given as ratios: a busy machine is as
busy for all of them.

Every consumer makes the same of a step: int64 arrays of its rows. Rates are taken over a whole pass, or its
first seconds, from the first request on (``rows_per_s``) and from the first batch on
(``steady_rows_per_s``); the target is about the first, because a run's data is used from its first row, and
because Ray Data without a limit has read a small set to its end when it gives the first batch.
``StatefulDataLoader`` has all its rows in memory, ``litdata`` its own format in uncompressed chunks.

Measured on two cores that others used too (load 2 to 3), 1 and 2 consumers: 2.8 and 1.9 times the rows per
second of plain Ray Data, 2.0 and 1.0 times from the first batch on. In 10^7 rows the first batch took 0.50 s
at the start and at 90 %, skipping to it 42 s. The main job waited for data in 0.05 and 0.06 % of its step
time on 1 and 2 workers, the first step of an attempt aside (1.5 and 1.8 s). All of it took 4.5 minutes.

Exit code 0 only when all targets hold.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_readers as readers
import numpy as np
import pretrain
import pyarrow as pa
import pyarrow.parquet as pq
from bench_report import at_least, between, conclude, target_of
from pretrain import PretrainConfig, train
from ray import cloudpickle

import ray_ckpt
from ray_ckpt.data.index import load_index
from ray_ckpt.options import parse, run_main
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines

# The workers need not find this folder.
cloudpickle.register_pickle_by_value(pretrain)

FEED, PLAIN = "ray_ckpt", "plain ray data"
RATE_TARGET, SEEK_TARGET, WAIT_TARGET = 0.9, 0.2, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """Measures the feed against other readers of the same rows."""

    quick: bool = False
    """Small sets, few rounds, and the two readers that the targets are about."""
    json: str = ""
    """File for the figures."""
    rows: int = 1_000_000
    """Rows of the set whose rates are measured; --quick takes 200000."""
    seek_rows: int = 10_000_000
    """Rows of the set in which is seeked; --quick takes 1000000."""
    seq_len: int = 64
    """Tokens in a row of the first set; rows of the second have 8."""
    rounds: int = 3
    """Times that everything is measured; --quick takes 2."""
    folder: str = ""
    """Where the sets are made; empty takes a temporary folder, which is deleted."""


def make_rows(root: Path, rows: int, seq_len: int, group_rows: int, vocab: int = 50_000) -> None:
    """Writes rows of random tokens into 8 files, unless they are there."""
    if root.is_dir():
        return
    rng = np.random.default_rng(0)
    schema = pa.schema([("tokens", pa.list_(pa.uint16(), seq_len))])
    building = root.with_name(f".{root.name}")
    building.mkdir(parents=True)
    for number in range(8):
        path = building / f"part-{number}.parquet"
        # As jobs/prepare.py writes, but for the compression: random tokens have none.
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for low in range(0, rows // 8, group_rows):
                count = min(group_rows, rows // 8 - low)
                flat = pa.array(rng.integers(0, vocab, count * seq_len, dtype=np.uint16))
                column = pa.FixedSizeListArray.from_arrays(flat, seq_len)
                writer.write_table(pa.table({"tokens": column}, schema=schema))
    building.rename(root)


def measure_rates(
    crew: readers.Crew, folder: Path, names: Sequence[str], rounds: int, limit_s: float
) -> list[dict[str, object]]:
    """One row a reader and number of consumers: medians over the rounds."""
    rows: list[dict[str, object]] = []
    for consumers in (1, 2):
        found: dict[str, list[readers.Rate]] = {}
        skipped: dict[str, str] = {}
        # Starts the processes of the cluster that read, for both readers that use them.
        crew.rate(FEED, folder, consumers, min(limit_s, 1.0))
        for _ in range(rounds):
            for name in names:
                if name in skipped:
                    continue
                try:
                    found.setdefault(name, []).append(crew.rate(name, folder, consumers, limit_s))
                except readers.NotInstalled as error:
                    skipped[name] = str(error)
        plain = found[PLAIN]
        for name in names:
            row: dict[str, object] = {"what": "rate", "reader": name, "consumers": consumers}
            if name in skipped:
                rows.append({**row, "skipped": skipped[name]})
                continue
            mine = found[name]
            for field in ("rows_per_s", "steady_rows_per_s", "first_batch_s"):
                values = [getattr(rate, field) for rate in mine]
                # Round by round: both of a pair saw the same machine.
                pairs = zip(values, [getattr(rate, field) for rate in plain], strict=True)
                row[field] = statistics.median(values)
                row[f"{field}_over_plain"] = statistics.median(own / other for own, other in pairs)
            rows.append(row)
    return rows


def measure_seeks(crew: readers.Crew, folder: Path, rounds: int) -> list[dict[str, object]]:
    """Times to the first batch at the start and at 90 % of a set, by seeking and by skipping."""
    num_rows = load_index(folder).num_rows
    offsets = (0, num_rows * 9 // 10)
    crew.first_batches(folder, offsets[:1])
    times: dict[int, list[float]] = {offset: [] for offset in offsets}
    for _ in range(rounds):
        turn = (*offsets, *reversed(offsets))
        for offset, seconds in zip(turn, crew.first_batches(folder, turn), strict=True):
            times[offset].append(seconds)
    start, late = (statistics.median(times[offset]) for offset in offsets)
    skip = crew.skip_to(folder, offsets[1])  # once: it is longer by far, however busy the machine
    return [
        {"what": "first batch", "reader": FEED, "rows": num_rows, "offset": 0, "seconds": start},
        {
            "what": "first batch",
            "reader": FEED,
            "rows": num_rows,
            "offset": offsets[1],
            "seconds": late,
            "over_start": statistics.median(
                b / a for a, b in zip(*(times[offset] for offset in offsets), strict=True)
            ),
        },
        {
            "what": "first batch",
            "reader": f"{PLAIN}, skipping",
            "rows": num_rows,
            "offset": offsets[1],
            "seconds": skip,
            "over_seek": skip / late,
        },
    ]


def measure_waits(root: Path, steps: int) -> list[dict[str, object]]:
    """How long the main job waits for data: its own training function and default shape, on 1 and 2 workers."""
    data = root / f"job-{steps}"
    base = ray_ckpt.Config()
    need = steps * base.global_batch
    make_rows(data, 8 * (need // 8 + 1), base.seq_len, group_rows=100, vocab=257)
    rows: list[dict[str, object]] = []
    for workers in (1, 2):
        config = PretrainConfig(
            run=f"wait-{workers}-{os.getpid()}",
            storage=str(root / "runs"),
            data=(str(data),),
            steps=steps,
            workers=str(workers),
        )
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = ray_ckpt.run(config, train)
        if code:
            raise RuntimeError(
                f"the main job ended with exit code {code}: {said.getvalue()[-2000:]}"
            )
        lines = list(read_lines(config.run_dir / STEPS_NAME))
        waits = [float(line["data_wait_s"]) for line in lines]
        # The first step waits for the reading to start; once in an attempt, which lasts for hours.
        total = sum(float(line["step_time_s"]) for line in lines[1:])
        rows.append(
            {
                "what": "main job",
                "reader": FEED,
                "consumers": workers,
                "steps": len(lines),
                "step_s": total / (len(lines) - 1),
                "wait_share": sum(waits[1:]) / total,
                "longest_wait_s": max(waits[1:]),
                "first_wait_s": waits[0],
            }
        )
    return rows


def judge(rows: list[dict[str, object]]) -> list[dict[str, Any]]:
    """Holds the figures against the targets."""
    targets = []
    for row in rows:
        if row.get("reader") == FEED and "rows_per_s_over_plain" in row:
            value = float(str(row["rows_per_s_over_plain"]))
            name = f"rows/s over plain Ray Data, {row['consumers']} consumers"
            targets.append(at_least(name, value, RATE_TARGET))
        if "over_start" in row:
            value = float(str(row["over_start"]))
            name = "first batch at 90 % over first batch at the start"
            targets.append(between(name, value, 1 - SEEK_TARGET, 1 + SEEK_TARGET))
        if "wait_share" in row:
            value = float(str(row["wait_share"]))
            name = f"wait for data in the main job's step time, {row['consumers']} workers"
            targets.append(target_of(name, value, WAIT_TARGET))
    return targets


def show(rows: list[dict[str, object]]) -> None:
    """Prints the figures as lines."""
    for row in rows:
        head = " ".join(
            str(row.get(name, "")) for name in ("what", "reader", "consumers", "offset")
        )
        figures = [
            f"{name} {value:,.3g}" if value < 1000 else f"{name} {value:,.0f}"
            for name, value in row.items()
            if isinstance(value, float)
        ]
        print(f"{head:40} {', '.join(figures) or row.get('skipped')}")


def main() -> int:
    """Measures, prints, and says whether the targets hold."""
    options = parse(BenchOptions)
    rows = 200_000 if options.quick else options.rows
    seek_rows = 1_000_000 if options.quick else options.seek_rows
    rounds = 2 if options.quick else options.rounds
    limit_s = 1.5 if options.quick else 6.0
    steps = 20 if options.quick else 60
    # The targets are about these two; the others take some seconds to start, each time.
    names = [FEED, PLAIN] if options.quick else list(readers.READERS)
    laps = [("", time.monotonic())]

    def lap(what: str) -> None:
        laps.append((what, time.monotonic()))

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(options.folder or temporary)
        rates = root / f"rates-{rows}-{options.seq_len}"
        seeks = root / f"seeks-{seek_rows}"
        make_rows(rates, rows, options.seq_len, group_rows=1000)
        make_rows(seeks, seek_rows, 8, group_rows=1000)
        lap("sets")
        with readers.crew(2) as crew:
            lap("start")
            figures = measure_rates(crew, rates, names, rounds, limit_s)
            lap("rates")
            figures += measure_seeks(crew, seeks, rounds)
            crew.close()
            lap("first batches")
            figures += measure_waits(root, steps)
            lap("main job")
    show(figures)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    times = ", ".join(f"{b[0]} {b[1] - a[1]:.0f}" for a, b in itertools.pairwise(laps))
    print(f"seconds: {times}; load of the machine at the end: {load}")
    return conclude(judge(figures), figures, options.json, also=["torchdata", "litdata"])


if __name__ == "__main__":
    run_main(main)
