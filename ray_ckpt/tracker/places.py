"""Where a tracker's checkpoints are: in the run's folder alone, or first in tiers on the nodes.

Two answers to the same questions, so that the tracker does not ask which kind of run it has: :class:`InFolder` here,
and :class:`ray_ckpt.tracker.on_nodes.OnNodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.manifest import Manifest, write_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.tiers.holder import Source
from ray_ckpt.tracker.house import House
from ray_ckpt.tracker.keeper import Keeper
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.shelf import discard, incomplete, manifest_in

MakeManifest = Callable[[int, Mapping[str, Any]], Manifest]
"""A manifest of what a save of a generation reports, if its state may be committed."""


class Places(Protocol):
    """Where checkpoints are."""

    def take_up(self, nodes: Sequence[str]) -> None:
        """A tracker takes up an attempt that goes on, with workers on these nodes; raises nothing."""
        ...

    def begin(self, nodes: Sequence[str]) -> None:
        """A new attempt, with workers on these nodes."""
        ...

    @property
    def newest_generation(self) -> int:
        """The newest attempt that has left a trace."""
        ...

    def began(self) -> None:
        """Its generation is on record: what older ones left uncommitted may go."""
        ...

    def holders(self) -> dict[str, str]:
        """Node to the name of the holder there."""
        ...

    def entries(self) -> list[Listed]:
        """All checkpoints, newest first."""
        ...

    def refresh(self) -> None:
        """Workers are gone, and copies may be gone with them."""
        ...

    def restoring(self, name: str) -> None:
        """Protects the checkpoint that an attempt restores; an empty name is the end of that."""
        ...

    def on_nodes(self, name: str) -> bool:
        """Whether an attempt takes a checkpoint from copies on the nodes."""
        ...

    def sources(self, name: str) -> Mapping[str, tuple[Source, ...]]:
        """File to where it can be taken from; empty: all from the run's folder."""
        ...

    def put(
        self, name: str, generation: int, save: Mapping[str, Any]
    ) -> tuple[Manifest | None, str]:
        """The manifest of a checkpoint, put in place if it is not there yet; or None and why not.

        None without a reason: it was committed before, and is deleted since.

        Raises:
            UnsaneStateError: its state must not be committed.
        """
        ...

    def committed(self, name: str) -> None:
        """The commit is on record."""
        ...

    def discard(self, name: str) -> None:
        """Removes what a failed save left."""
        ...

    def set_aside(self, name: str, manifest: Manifest, save: Mapping[str, Any]) -> None:
        """Keeps the files of a save whose state must not be committed; raises nothing."""
        ...

    def keep(self, name: str, reason: str) -> None:
        """Pins a checkpoint for the run itself; raises nothing."""
        ...

    def durable(self, name: str) -> str:
        """Asks for a checkpoint in the durable tier: empty when it is there, else what is in the way."""
        ...

    def ask_read_back(self) -> None:
        """Has the nodes read all that they hold."""
        ...

    def read_back(self) -> list[dict[str, Any]]:
        """What came of it so far, a row for each checkpoint in each tier on the nodes."""
        ...

    def advance(self) -> None:
        """Takes on record what was done aside, and begins what is due; neither waits nor raises."""
        ...

    def close(self) -> None:
        """The run has finished."""
        ...


class InFolder:
    """Workers write into the run's folder, and there is no other place.

    Args:
        run_dir: the run's folder.
        house: the same.
        memory: of the run.
        keeper: of the folder.
        make_manifest: makes a manifest.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        house: House,
        memory: RunMemory,
        keeper: Keeper,
        make_manifest: MakeManifest,
    ) -> None:
        self._dir, self._house, self._memory, self._keeper = run_dir, house, memory, keeper
        self._make_manifest = make_manifest

    def take_up(self, nodes: Sequence[str]) -> None:
        pass

    def begin(self, nodes: Sequence[str]) -> None:
        pass

    @property
    def newest_generation(self) -> int:
        return max((entry.generation for entry in self.entries()), default=0)

    def began(self) -> None:
        pass

    def holders(self) -> dict[str, str]:
        return {}

    def entries(self) -> list[Listed]:
        return self._house.entries()

    def refresh(self) -> None:
        pass

    def restoring(self, name: str) -> None:
        self._keeper.restoring(name)

    def on_nodes(self, name: str) -> bool:
        return False

    def sources(self, name: str) -> Mapping[str, tuple[Source, ...]]:
        return {}

    def put(
        self, name: str, generation: int, save: Mapping[str, Any]
    ) -> tuple[Manifest | None, str]:
        folder = self._dir / CHECKPOINTS_DIR / name
        # First of all: a commit that is in place is never undone, whatever a late or repeated call says.
        manifest = manifest_in(folder)
        if manifest is not None:
            return manifest, ""
        if name in self._memory.committed:
            return None, ""  # its files are going, or gone
        problem = save["error"] or incomplete(folder, save["files"])
        if problem:
            return None, str(problem)
        manifest = self._make_manifest(generation, save)
        write_manifest(folder, manifest)
        return manifest, ""

    def committed(self, name: str) -> None:
        self._keeper.after_save()

    def discard(self, name: str) -> None:
        discard(self._dir / CHECKPOINTS_DIR / name)

    def set_aside(self, name: str, manifest: Manifest, save: Mapping[str, Any]) -> None:
        pass  # they are where they are kept

    def keep(self, name: str, reason: str) -> None:
        self._keeper.keep(name, reason)

    def durable(self, name: str) -> str:
        return "" if name in self._memory.committed else "it is not committed"

    def ask_read_back(self) -> None:
        pass

    def read_back(self) -> list[dict[str, Any]]:
        return []

    def advance(self) -> None:
        self._keeper.advance()

    def close(self) -> None:
        pass
