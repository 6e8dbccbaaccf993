"""The saves of one attempt, as one rank takes part in them: when one begins, where it goes, what is told of it.

What one save does is :mod:`ray_ckpt.checkpoint.saver`; whether it counts, the tracker says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.checkpoint.memory import check_memory
from ray_ckpt.checkpoint.restore import with_rng
from ray_ckpt.checkpoint.saver import Saver, SaveResult
from ray_ckpt.checkpoint.staging import Stager, size_bytes
from ray_ckpt.config import Config
from ray_ckpt.elastic.whereabouts import HERE
from ray_ckpt.reporter import Reporter
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.tracker.records import Attempt
from ray_ckpt.tracker.steward import Steward
from ray_ckpt.validation import METRIC, Validated, Validation
from ray_ckpt.watch import Watch

# Saves in a row that may fail on the nodes before one goes straight to the durable folder.
DIRECT_AFTER = 2


class Saving:
    """Saves of one attempt.

    Args:
        config: of the run.
        state: that is saved.
        attempt: what the tracker said when the attempt began.
        steward: rank 0's end of the line to the tracker.
        watch: looks at what is saved.
        validation: measures a loss at each save; None for none.
        group: gloo process group of all ranks.
        device: of this rank.
        node: of this rank.
        pace: takes the mean time of this rank's forward passes since it was taken last, seconds.
    """

    def __init__(
        self,
        *,
        config: Config,
        state: TrainState,
        attempt: Attempt,
        steward: Steward,
        watch: Watch,
        validation: Validation | None,
        group: dist.ProcessGroup,
        device: torch.device,
        node: str,
        pace: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._state, self._skips = state, attempt.skips
        self._steward, self._watch = steward, watch
        self._validation = validation
        self._group, self._device = group, device
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._run_dir, self._stack = config.run_dir, config.tiers.stack()
        on_nodes = bool(self._stack.node_tiers) and not self._stack.remote
        self._may_bypass = on_nodes and self._rank == 0
        to_ray = config.saving.report_to_ray
        self._reporter = Reporter(self._run_dir, self._rank) if to_ray else None
        self._prepared_bytes = 0
        self._saver = Saver(
            run_dir=self._first_tier(),
            node=node,
            generation=attempt.generation,
            group=group,
            stager=Stager(config.saving.staging, state.optimizers),
            on_result=self._saved,
            inspect=watch.scan,
            signed=attempt.signed,
            pace=pace,
        )
        self.prepare()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._saver.busy

    def prepare(self) -> None:
        """Makes the buffers for saving, where the state is more than they were made for; every rank calls it."""
        full_state = self._full_state()
        grown = max(0, size_bytes(full_state) - self._prepared_bytes)
        # Asked together whoever needs what: a rank with an empty shard grows by nothing, and must not be waited for.
        check_memory(grown, self._group)
        if grown:
            self._saver.prepare(full_state)
            self._prepared_bytes += grown

    def bypasses(self, failures: int = DIRECT_AFTER) -> bool:
        """On rank 0: whether the tiers on the nodes failed so often that the next save does without them.

        A full memory or a dead holder must not keep a run from its durable folder; an object store cannot be
        written by workers.
        """
        return self._may_bypass and self._steward.failures >= failures

    def save(self, *, direct: bool = False) -> float:
        """Begins a save; returns how long to hold after it, seconds (0 on ranks other than 0).

        Args:
            direct: straight to the durable folder, past the tiers on the nodes.
        """
        # First: once the save is committed no later attempt makes these steps again, nor writes their lines.
        self._steward.exchange(flush=True)
        progress = self._state.progress
        validated = None
        if self._validation is not None:
            HERE.enter("validate")
            validated = self._validation.measure(self._state.model)
        HERE.enter("save")
        self._present = progress, self._steward.last_record, validated
        self._direct = direct
        hold_s = self._steward.saving(progress.step)
        self._request = self._steward.answered
        self._saver.save(progress.step, self._full_state, self._run_dir if direct else None)
        return hold_s

    def hold(self, seconds: float, told: Callable[[bool], bool]) -> None:
        """All ranks wait for the end of the attempt, or an order to leave; they go on when neither comes.

        Rank 0 says every moment that it still waits: the others do not take it for one that is gone.

        Args:
            seconds: how long at most; rank 0's counts.
            told: gives every rank what rank 0 says.
        """
        deadline = time.monotonic() + seconds
        steward = self._steward
        while told(
            time.monotonic() < deadline
            and (self._saver.busy or not (steward.asked or steward.leave is not None))
        ):
            time.sleep(0.05)
            if not self._saver.busy:
                self._steward.exchange(flush=True)

    def wait(self, timeout_s: float) -> None:
        """Waits for the save that is in flight."""
        self._saver.wait(timeout_s)

    def tell_durable(self, step: int | None) -> None:
        """On rank 0: a checkpoint of this attempt is in the durable tier, where Ray Train may look for it."""
        if self._reporter is not None:
            self._reporter.committed(step, self._steward.generation)

    @property
    def wants_report(self) -> bool:
        """Whether a commit waits to be told to Ray Train; False on ranks other than 0."""
        return self._reporter is not None and self._reporter.waiting

    def report(self) -> None:
        """Tells Ray Train of the newest commit; every rank calls it at the same step."""
        if self._reporter is not None:
            self._reporter.report()

    def close(self, timeout_s: float) -> None:
        """Ends the saver of an attempt that has saved its last."""
        self._saver.close(timeout_s)

    def _full_state(self) -> dict[str, Any]:
        return with_rng(self._state.state_dict(), self._rank, self._device)

    def _first_tier(self) -> Path:
        """The run's folder in the tier that this rank writes into."""
        tiers = self._stack.node_tiers
        return self._stack.root(tiers[0], self._run_dir) if tiers else self._run_dir

    def _saved(self, result: SaveResult) -> None:
        """On rank 0, in the background: asks the tracker to commit what was written."""
        progress, record, validated = self._present
        save: dict[str, Any] = {
            "step": result.step,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "world_size": self._world_size,
            "files": [asdict(entry) for entry in result.files],
            "places": result.places,
            "paces": result.paces,
            "direct": self._direct,
            "request": self._request,
            "stall_s": result.stall_s,
            "upload_s": result.write_s,
            "error": result.error,
            "metrics": _metrics(record, validated),
            "validation": validated.to_json() if validated else {},
            "guard": self._watch.report(result.guard, record),
            "bitwise_comparable": self._watch.bitwise_comparable,
            "skipped": [asdict(skip) for skip in self._skips],
        }
        if self._reporter is not None:
            self._reporter.saved(result.step, save["metrics"])
        if self._steward.commit(save) and (self._direct or not self._stack.node_tiers):
            self.tell_durable(result.step)


def _metrics(record: dict[str, Any], validated: Validated | None) -> dict[str, float]:
    metrics = {"loss": record.get("loss", math.nan)}
    return metrics if validated is None else {**metrics, METRIC: validated.loss}
