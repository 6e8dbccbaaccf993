"""Checkpoints that are first in tiers on the nodes, and copied from there to the durable tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.errors import RayCkptError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.holder import Source
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker.aside import Aside, Thread
from ray_ckpt.tracker.checkpoint_memory import DURABLE
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.hooks import Hooks
from ray_ckpt.tracker.house import House
from ray_ckpt.tracker.keeper import Keeper
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.places import InFolder, MakeManifest
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.rollback import left
from ray_ckpt.tracker.tierdesk import TierDesk

logger = logging.getLogger(__name__)

PUSH_S = 60.0  # at the end of a run nobody trains any more


class OnNodes:
    """Workers write into a tier on their nodes; the durable tier gets copies.

    Args:
        run_dir: the run's folder.
        stack: the tiers.
        fleet: the holders on the nodes.
        house: the durable tier.
        memory: of the run.
        keeper: of the folder.
        make_manifest: makes a manifest.
        record: puts an event on record.
        every_steps: a tier to how many steps are between its copies.
        on_durable: told the name of a checkpoint that got there, once that is on record.
        seals: where the durable tier is waited for; by default here.
        waiting: entered while nodes are waited for; others may change everything meanwhile.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        stack: Stack,
        fleet: Fleet,
        house: House,
        memory: RunMemory,
        keeper: Keeper,
        make_manifest: MakeManifest,
        record: Recorder,
        every_steps: Callable[[str], int],
        on_durable: Callable[[str], None],
        seals: Aside | None,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._house, self._memory, self._keeper = house, memory, keeper
        self._aside, self._push_due = Thread("records"), False
        # The durable tier, where workers can read and write it by themselves.
        self._folder = (
            None
            if stack.remote
            else InFolder(
                run_dir=run_dir,
                house=house,
                memory=memory,
                keeper=keeper,
                make_manifest=make_manifest,
            )
        )
        self._make_manifest, self._on_durable, self._record = make_manifest, on_durable, record
        hooks = Hooks(
            record=record,
            generation=lambda: memory.generation,
            every_steps=every_steps,
            last_step=memory.tier_steps.get,
            is_durable=self.is_durable,
            is_barred=self.is_barred,
            seal=self._seal,
            promoted=self.promoted,
            is_left=lambda entry: left(entry, memory.left),
        )
        self.desk = TierDesk(
            stack=stack,
            fleet=fleet,
            book=CopyBook(run_dir),
            hooks=hooks,
            aside=seals,
            waiting=waiting,
        )

    def take_up(self, nodes: Sequence[str]) -> None:
        try:
            self.desk.begin(nodes, also=[*self._memory.all_nodes])
        except RayCkptError:
            logger.exception("the copies on the nodes are not served for now")
        self._remember()

    def begin(self, nodes: Sequence[str]) -> None:
        # Copies may also be where an attempt before had workers, and this one has none.
        self.desk.begin(nodes, also=[*self._memory.all_nodes])

    @property
    def newest_generation(self) -> int:
        entries = max((entry.generation for entry in self.entries()), default=0)
        return max(entries, self.desk.newest_generation)

    def began(self) -> None:
        self.desk.sweep()
        self._remember()

    def _remember(self) -> None:
        """What is to be kept once it is in the durable tier: whoever wanted it may be a tracker that died."""
        for name, reasons in list(self._memory.to_keep.items()):
            for reason in reasons:
                self.keep(name, reason)

    def holders(self) -> dict[str, str]:
        return self.desk.holders()

    def entries(self) -> list[Listed]:
        # Of one that is on the nodes and in the durable tier, that of the nodes comes first.
        both = [*self.desk.entries(), *self._house.entries()]
        return sorted(both, key=lambda entry: (entry.step, entry.generation), reverse=True)

    def refresh(self) -> None:
        self.desk.refresh()

    def restoring(self, name: str) -> None:
        self._keeper.restoring(name)
        self.desk.restoring(name)

    def on_nodes(self, name: str) -> bool:
        return bool(self.desk.sources(name))

    def sources(self, name: str) -> Mapping[str, tuple[Source, ...]]:
        if (found := self.desk.sources(name)) or self._folder is not None:
            return found
        entry = next(each for each in self._house.entries() if each.folder.name == name)
        assert entry.manifest is not None
        return {file.path: (Source(place=None),) for file in entry.manifest.files}

    def put(
        self, name: str, generation: int, save: Mapping[str, Any]
    ) -> tuple[Manifest | None, str]:
        if save.get("direct"):
            assert self._folder is not None
            return self._folder.put(name, generation, save)
        if name in self._memory.committed:
            return None, ""
        if save["error"]:
            return None, str(save["error"])
        manifest = self._make_manifest(generation, save)
        known = self.desk.known(name)
        if known is not None and replace(manifest, committed_at=known.committed_at) == known:
            manifest = (
                known  # nodes have committed it, for a tracker that died before it was on record
            )
        problem = self.desk.commit(manifest, save["places"])
        return (None, problem) if problem else (manifest, "")

    def committed(self, name: str) -> None:
        self.desk.advance()
        if self.is_durable(name):
            self._keeper.after_save()  # it went straight there

    def discard(self, name: str) -> None:
        self.desk.discard(name)
        if self._folder is not None:
            self._folder.discard(name)

    def set_aside(self, name: str, manifest: Manifest, save: Mapping[str, Any]) -> None:
        self.desk.set_aside(manifest, save["places"])

    def keep(self, name: str, reason: str) -> None:
        if self.is_durable(name):
            self._keeper.keep(name, reason)
            return
        if reason not in self._memory.to_keep.get(name, ()):
            key = parse_checkpoint_name(name)
            assert key is not None, name
            self._record("keep", name=name, step=key[0], reason=reason)
        self.desk.force(name)

    def durable(self, name: str) -> str:
        if self.is_durable(name):
            return ""
        self.desk.force(name)
        self.desk.advance()
        if self.is_durable(name):
            return ""
        return self.desk.problem(DURABLE) or "the copy is under way"

    def survives(self, name: str, gone: Set[str]) -> str:
        if self.is_durable(name):
            return ""
        self.desk.advance()  # replicas may have arrived
        return "" if self.desk.outlives(name, gone) else self.durable(name)

    def ask_read_back(self) -> None:
        self.desk.ask_read_back()

    def read_back(self) -> list[dict[str, Any]]:
        return self.desk.read_back()

    def advance(self) -> None:
        self.desk.advance()
        self._keeper.advance()
        self._push()

    def close(self) -> None:
        self._push_due = True
        deadline = time.monotonic() + PUSH_S
        while (self._push_due or self._aside.busy) and time.monotonic() < deadline:
            self._push()
            self._aside.wait(0.05)
        newest = self._memory.last_commit_name
        safe = not newest or self.is_durable(newest)
        if not safe:
            self._record(
                "alert",
                name=newest,
                problem="it is not in the durable tier, so the nodes keep it after the end of the run",
            )
        self.desk.close(drop_memory=safe)

    def _push(self) -> None:
        """Copies the run's records to where its checkpoints are, if they are elsewhere."""
        result = self._aside.take()
        if isinstance(result, Exception):
            logger.warning("the run's records were not copied, which is tried again: %s", result)
        if self._push_due and not self._aside.busy:
            self._push_due = False
            self._aside.start(self._pushed)

    def _pushed(self) -> str:
        self._house.push_records()
        return "pushed"

    # ---- for the desk ---------------------------------------------------------------------------

    def is_durable(self, name: str) -> bool:
        """Whether the durable tier has a checkpoint."""
        return DURABLE in self._memory.tiers.get(name, {})

    def is_barred(self, name: str) -> bool:
        """Whether the durable tier has a checkpoint that was found bad: its mark stays, whatever is put there."""
        return name in self._memory.quarantined

    def _seal(self, manifest: Manifest) -> str | None:
        """Commits a checkpoint in the durable tier; runs aside, and may have been frozen there."""
        fault_point("durable.seal")
        if problem := self._record.fence.problem():
            return problem
        sealed = self._house.seal(manifest)
        fault_point("durable.sealed")
        return sealed

    def promoted(self, name: str) -> None:
        """A checkpoint is in the durable tier, and that is on record."""
        for reason in list(self._memory.to_keep.get(name, ())):
            self._keeper.keep(name, reason)
        self._on_durable(name)
        self._push_due = True
        self._keeper.after_save()

    def bad_copies(self, name: str, bad: Sequence[tuple[Place, str]]) -> None:
        """Copies that were found not to be what was written."""
        self.desk.bad_copies(name, bad)
