"""A restore from copies on the nodes: each rank gets the files that it needs, from wherever a copy lives."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.checkpoint.restore import NotBroughtError, bring_together, load
from ray_ckpt.config import Config
from ray_ckpt.errors import RayCkptError
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.tiers.holder import Report
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tiers.ray_fleet import holder_by_name, take
from ray_ckpt.tracker.core import Attempt, RestorePlan

_METADATA = ".metadata"


class Gathering:
    """One checkpoint of an attempt, given back by the nodes.

    The holder of a rank's node fetches what the rank needs into the node's fastest tier, and compares each byte with
    the manifest. What is there already is compared too, and not fetched.

    Args:
        plan: what to restore.
        attempt: that restores it.
        config: of the run.
        group: of all ranks.
        node: of this rank.
    """

    def __init__(
        self,
        plan: RestorePlan,
        attempt: Attempt,
        config: Config,
        *,
        group: dist.ProcessGroup,
        node: str,
    ) -> None:
        self._plan, self._config, self._group = plan, config, group
        self._holder, self._generation = plan.holders.get(node, ""), attempt.generation
        stack = config.tiers.stack()
        root = stack.root(stack.node_tiers[0], config.run_dir)
        self.folder = root / CHECKPOINTS_DIR / plan.name
        self._bad: list[tuple[Place, str]] = []
        self._damaged: list[str] = []

    def load(self, state: TrainState, device: torch.device) -> bool:
        """As :func:`ray_ckpt.checkpoint.restore.load`; every rank calls it.

        Raises:
            NotBroughtError: on every rank, when one of them could not get a file.
        """
        bring_together(self.bring, {_METADATA}, self._group)
        return load(
            state,
            self.folder,
            self._plan.manifest,
            self._group,
            device,
            self._config.saving.allow_missing,
            bring=self.bring,
        )

    def bring(self, paths: Collection[str]) -> None:
        """Makes files readable in :attr:`folder`.

        Raises:
            NotBroughtError: no copy of one of them could be had.
        """
        report = self._ask(paths)
        self._bad += report.bad
        self._damaged += report.damaged
        for path, problem in report.problems.items():
            raise NotBroughtError(f"{path or self._plan.name}: {problem}")

    def found_bad(self) -> tuple[list[tuple[Place, str]], tuple[str, ...]]:
        """Copies that turned out to be bad, on any rank, with others in their place or not; every rank calls it.

        Returns:
            Those on nodes, and files whose copy in the durable tier is bad.
        """
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, (self._bad, self._damaged), group=self._group)
        bad = dict.fromkeys(each for own, _ in found for each in own)
        return list(bad), tuple(sorted({path for _, own in found for path in own}))

    def _ask(self, paths: Collection[str]) -> Report:
        sources = {path: self._plan.sources.get(path, ()) for path in sorted(paths)}
        timeout_s = self._config.saving.timeout_s
        try:
            actor = holder_by_name(self._holder)
            ticket = actor.provide.remote(
                manifest=self._plan.manifest, sources=sources, generation=self._generation
            )
            done, report = take(ticket, timeout_s)
        except RayCkptError as error:
            return Report(problems={"": str(error)})
        return report if done else Report(problems={"": f"no answer within {timeout_s:g} s"})
