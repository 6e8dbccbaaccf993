"""A session for benches: rows from memory, and a tracker in a process of its own, as the actor of a run is."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_ckpt.config import Config
from ray_ckpt.data.feed import Feed, MicroBatch
from ray_ckpt.facts import check_run, tracker_options
from ray_ckpt.session import Session
from ray_ckpt.tracker.core import TrackerCore


class FromMemory:
    """The same rows again and again, from memory."""

    def __init__(self, micro_batches: list[MicroBatch]) -> None:
        self.micro_batches = micro_batches

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MicroBatch]]:
        """See :class:`ray_ckpt.data.feed.Feed`."""
        return itertools.repeat(self.micro_batches, stop_step - start_step)


class MemorySession(Session):
    """A session whose rows come from memory; all else is that of a run."""

    rows: FromMemory

    def _feed(self) -> Feed:
        return self.rows


class PipeTracker:
    """A tracker in a process of its own, as the actor of a run is.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._turn = threading.Lock()
        self._answers: dict[int, Any] = {}
        self._tickets = itertools.count()
        self._process = context.Process(target=_serve, args=(config, there), daemon=True)
        self._process.start()

    def call(self, method: str, **kwargs: Any) -> Any:
        """Calls and waits for the answer."""
        ticket = self.post(method, **kwargs)
        while True:
            done, answer = self.poll(ticket)
            if done:
                return answer
            time.sleep(0.001)

    def post(self, method: str, **kwargs: Any) -> int:
        """Calls without waiting."""
        with self._turn:
            ticket = next(self._tickets)
            self._pipe.send((ticket, method, kwargs))
        return ticket

    def poll(self, ticket: int) -> tuple[bool, Any]:
        """Whether the answer is there, and what it is."""
        with self._turn:
            while self._pipe.poll():
                number, answer = self._pipe.recv()
                self._answers[number] = answer
            if ticket not in self._answers:
                return False, None
            return True, self._answers.pop(ticket)


def _serve(config: Config, pipe: Connection) -> None:
    core = TrackerCore(check_run(config, {}), tracker_options(config))
    while True:
        try:
            ticket, method, kwargs = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        pipe.send((ticket, getattr(core, method)(**kwargs)))


def make_rows(folder: Path, seq_len: int) -> None:
    """A few rows: a session wants to know its data, though none of it is read."""
    folder.mkdir(parents=True)
    schema = pa.schema([("tokens", pa.list_(pa.uint16(), seq_len))])
    flat = pa.array(np.zeros(64 * seq_len, np.uint16))
    rows = pa.table([pa.FixedSizeListArray.from_arrays(flat, seq_len)], schema=schema)
    pq.write_table(rows, folder / "part-0.parquet", row_group_size=16)
