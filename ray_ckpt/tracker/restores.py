"""What an attempt restores: the newest checkpoint that can be used, and the next older one when it turns out bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ray_ckpt.checkpoint.listing import Listed, usable
from ray_ckpt.checkpoint.names import parse_checkpoint_name
from ray_ckpt.checkpoint.verify import Fault
from ray_ckpt.errors import RestoreError
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tracker.copies import described
from ray_ckpt.tracker.keeper import Keeper
from ray_ckpt.tracker.loops import Loops
from ray_ckpt.tracker.on_nodes import OnNodes
from ray_ckpt.tracker.places import Places
from ray_ckpt.tracker.recorder import Recorder
from ray_ckpt.tracker.records import RestorePlan, RunFacts
from ray_ckpt.tracker.rollback import passed_over
from ray_ckpt.tracker.shelf import newest_usable, restore_plan


class Restores:
    """Restores of one run.

    Args:
        facts: what stays the same for the run.
        record: puts an event on record.
        places: where its checkpoints are.
        keeper: labels those that are bad.
        loops: names those whose restore failed too often.
        remote: whether the durable tier is an object store.
    """

    def __init__(
        self,
        *,
        facts: RunFacts,
        record: Recorder,
        places: Places,
        keeper: Keeper,
        loops: Loops,
        remote: bool,
    ) -> None:
        self._run, self._dir, self._remote = facts.run, Path(facts.run_dir), remote
        self._record, self._memory = record, record.memory
        self._places, self._keeper, self._loops = places, keeper, loops
        self._unreadable: dict[str, str] = {}  # what storage would not give this attempt, and why

    def begin(self) -> None:
        """A new attempt: what storage would not give the one before is asked for again."""
        self._unreadable.clear()

    def newest_usable(self) -> Listed | None:
        """The checkpoint to restore; None for a run that never had one.

        Raises:
            RestoreError: there are checkpoints and none can be used.
        """
        entries = self._places.entries()
        for entry in entries:
            damaged = entry.manifest is None and entry.committed and not entry.unreadable
            if damaged and entry.quarantined is None:
                # Somebody once promised this checkpoint; that it cannot be used must be seen.
                self._keeper.quarantine(entry.folder.name, f"manifest: {entry.fault}", [])
        return newest_usable(
            self._run,
            self._dir,
            entries,
            commits=self._memory.durable_commits,
            passed=self._passed(entries),
        )

    def plan(self, entry: Listed | None) -> RestorePlan | None:
        """What the workers need to know to restore a checkpoint, which is kept until they have; None for none."""
        if entry is None:
            return None
        self._places.restoring(entry.folder.name)
        entries = self._places.entries()
        plan = restore_plan(entry, entries, self._passed(entries))
        sources = self._places.sources(plan.name)
        where = f", from {described(sources)}" if sources else ""
        holders = self._places.holders() if sources else {}
        return replace(plan, reason=f"{plan.reason}{where}", sources=sources, holders=holders)

    def bad_copies(self, name: str, bad: Sequence[tuple[Place, str]]) -> None:
        """Copies on nodes that were found not to be what was written; others were taken in their place."""
        assert isinstance(self._places, OnNodes)
        self._places.bad_copies(name, bad)

    def not_gathered(self, name: str, problem: str, damaged: tuple[str, ...]) -> RestorePlan | None:
        """The holders did not give a checkpoint back: offers it from the durable folder, or an older one.

        When one of them had died, it is replaced, and the same is offered again.

        Args:
            name: of the checkpoint.
            problem: what one of them said.
            damaged: files whose copy in the durable tier is not what was written.

        Raises:
            RestoreError: there is no other.
        """
        assert isinstance(self._places, OnNodes)
        if not damaged and self._places.desk.revive(name):
            entry = next(e for e in self._places.entries() if e.folder.name == name)
            return self.plan(entry)
        self._places.desk.pass_over(name)
        if damaged:
            findings = [{"path": path, "fault": "not as written"} for path in damaged]
            self._keeper.quarantine(name, problem, findings)
        else:
            if self._remote:
                self._unreadable[name] = problem  # the store was asked too
            self._record("skipped", name=name, reason=f"from the nodes: {problem}", faults=[])
        return self.plan(self.newest_usable())

    def reject(self, name: str, faults: list[Fault]) -> RestorePlan | None:
        """Quarantines a checkpoint that failed verification and offers the next older one.

        Raises:
            RestoreError: it was the last one.
        """
        if parse_checkpoint_name(name) is None:  # it becomes a path
            raise RestoreError(f"{name!r} is no checkpoint's name. Nothing was changed.")
        reason = f"{faults[0].path}: {faults[0].fault}"
        findings = [{"path": fault.path, "fault": fault.fault} for fault in faults]
        if all(fault.unreadable for fault in faults):
            # Storage failed, which says nothing about the bytes: skipped now, not condemned.
            self._unreadable[name] = reason
            self._record("skipped", name=name, reason=reason, faults=findings)
        else:
            self._keeper.quarantine(name, reason, findings)
        return self.plan(self.newest_usable())

    def _passed(self, entries: list[Listed]) -> dict[str, str]:
        """Usable checkpoints that are passed over just now, and why."""
        passed = {**passed_over(entries, self._memory.left), **self._unreadable}
        left = [name for e in usable(entries) if (name := e.folder.name) not in passed]
        return {**passed, **self._loops.tired(left)}
