"""A record of the rows that stood in for damaged ones (``--reading.on-corrupt replace``).

The digest of each step already covers the rows that were truly trained on; this file says why they are
not those of the order: ``replaced_rows.jsonl`` in the run's folder, one line for each damaged row group
and epoch, at the first step that met it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ray_ckpt.data.assemble import MicroBatch
from ray_ckpt.data.catalog import Index
from ray_ckpt.data.feed import Feed
from ray_ckpt.data.mixture import Order, split_ids
from ray_ckpt.data.reader import REPLACED

REPLACED_NAME = "replaced_rows.jsonl"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecordedFeed:
    """A feed whose replaced rows are written down.

    Attributes:
        feed: that reads with ``on_corrupt="replace"``.
        index: the data.
        order: its global order.
        run_dir: where the record goes.
        facts: what else a line says, such as the rank.
        steps_before: steps of the run before the first of the order: lines have the run's steps.
    """

    feed: Feed
    index: Index
    order: Order
    run_dir: Path
    facts: Mapping[str, Any]
    steps_before: int = 0

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MicroBatch]]:
        """See :meth:`Feed.steps`."""
        known: set[tuple[int, int, int]] = set()
        for step, batch in enumerate(self.feed.steps(start_step, stop_step), start_step):
            for met in sorted(set(self._damaged(batch)) - known):
                known.add(met)
                self._write(self.steps_before + step, *met)
            yield batch

    def _damaged(self, batch: Sequence[MicroBatch]) -> Iterator[tuple[int, int, int]]:
        """(source, epoch of it, row group) of each row of a step that stands in for another."""
        for micro in batch:
            if REPLACED not in micro.columns:
                raise RuntimeError(
                    f"the feed lost the column {REPLACED!r}: data transforms must keep it, it says which "
                    "rows stand in for damaged ones."
                )
            lost = micro.columns[REPLACED]
            sources, rows = split_ids(lost[lost >= 0])
            positions = micro.positions[lost >= 0]
            for source, row, position in zip(sources, rows, positions, strict=True):
                starts = self.order.parts[source].group_starts
                group = int(np.searchsorted(starts, row, side="right")) - 1
                yield int(source), self.order.epoch_at(int(position)), group

    def _write(self, step: int, source: int, epoch: int, group: int) -> None:
        part = self.index.parts[source]
        path, local = part.locate(group)
        line = {
            "time": time.time(),
            "step": step + 1,
            "epoch": epoch,
            "file": path,
            "row_group": local,
            "rows": part.rows_in(group),
            **self.facts,
        }
        logger.warning("step %d: other rows stand in for row group %d of %s", step + 1, local, path)
        # One write of a line in append mode: ranks on one file system do not tear each other's.
        with (self.run_dir / REPLACED_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
