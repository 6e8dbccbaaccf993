"""One node's copies, and whoever moves them: memory and disk here, other nodes, the durable tier.

A holder is an actor of its own on each node (:mod:`ray_ckpt.tiers.fleet`), so that training neither waits for a copy
nor shares an interpreter with one. It decides nothing: the tracker says what is committed, copied and deleted, and a
worker that restores says what it needs. Whatever it is asked for twice, it does once.

Each call that changes something carries the generation of the attempt that it is for. Once a newer attempt has called,
those of older ones are refused (:mod:`ray_ckpt.tiers.fence`), and what an older call had begun is not committed.

A copy is compared with the checksum of the manifest while it is made. When that fails, its source is read again: a bad
one is deleted, so that nobody takes it a second time, and the tracker is told.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Literal

from ray_ckpt.checkpoint.manifest import FileEntry, Manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.paths import NotPlainFileError
from ray_ckpt.errors import (
    ConfigError,
    CopyError,
    CutOffError,
    ManifestError,
    StaleGenerationError,
    StorageError,
)
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.depot import Depot, Holding
from ray_ckpt.tiers.durable import Durable, chunks_of
from ray_ckpt.tiers.fence import Fence
from ray_ckpt.tiers.placement import Place
from ray_ckpt.tiers.stack import NodeTier, Stack
from ray_ckpt.tiers.throttle import Throttle
from ray_ckpt.tiers.wire import FileServer, fetch

Address = tuple[str, int]
Target = Literal["memory", "local", "durable"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_AT_A_TIME = 2  # copies of one holder: more would take from training, and one disk is soon busy
_PROVED_S = 60.0  # what was read for one worker need not be read again for its neighbours, seconds
_FETCHES = 4  # files that a restore takes at a time: nobody trains meanwhile
_FETCH_TIMEOUT_S = 60.0  # without a byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What a node has.

    Attributes:
        address: of its file server.
        holdings: tier to its checkpoints, newest first.
        problems: tier to why it cannot be listed.
        identity: names the folder of the first tier among all machines.
        generation: newest attempt that has called here, 0 before the first.
    """

    address: Address
    identity: str
    holdings: Mapping[NodeTier, tuple[Holding, ...]]
    generation: int = 0
    problems: Mapping[NodeTier, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What came of copying some files of a checkpoint.

    Attributes:
        done: files that are at the target, compared with their checksums.
        problems: file to why it is not there.
        bad: places whose copy of a file turned out to be bad, and was deleted; with the file.
        damaged: files whose copy in the durable tier turned out to be bad.
        bytes: copied; without what was there already.
        seconds: that it took.
    """

    done: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    bad: tuple[tuple[Place, str], ...] = ()
    damaged: tuple[str, ...] = ()
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a file can be taken from.

    Attributes:
        place: of the copy; None for the durable tier.
        address: of that node's file server.
    """

    place: Place | None
    address: Address = ("", 0)


class Holder:
    """The copies of one run on one node.

    Args:
        node: Ray's id of it.
        run_dir: the run's folder.
        stack: the tiers.
        durable: the slowest of them.
        host: address of this node, for other nodes.
        token: that all holders of the run share, and nobody else knows.
    """

    def __init__(
        self,
        *,
        node: str,
        run_dir: Path,
        stack: Stack,
        durable: Durable,
        host: str,
        token: bytes,
    ) -> None:
        self._node, self._stack, self._durable, self._token = node, stack, durable, token
        self._depots: dict[str, Depot] = {
            tier: Depot(stack.root(tier, run_dir), sync=tier == "local")
            for tier in stack.node_tiers
        }
        self._fences = {tier: Fence(depot.root) for tier, depot in self._depots.items()}
        self._throttle = Throttle(stack.bytes_per_s)
        # For each target its own: one that is slow or hangs delays itself alone.
        self._turns = {target: threading.Semaphore(_AT_A_TIME) for target in stack.use}
        self._server = FileServer(self._open, host=host, token=token)
        self._providing = threading.Lock()
        self._proved: dict[tuple[str, str], float] = {}  # file of a checkpoint to when it was read

    @property
    def address(self) -> Address:
        """Of the file server."""
        return self._server.address

    @property
    def first(self) -> NodeTier:
        """The tier that workers write into."""
        return self._stack.node_tiers[0]

    def alive(self) -> bool:
        """Answers, as whoever hangs does not."""
        return True

    def inventory(self) -> Inventory:
        """What this node has; reads no files."""
        holdings: dict[NodeTier, tuple[Holding, ...]] = {}
        problems: dict[NodeTier, str] = {}
        generations = [0]
        for tier in self._stack.node_tiers:
            try:
                holdings[tier] = tuple(self._depots[tier].inventory())
                generations.append(self._fences[tier].newest)
            except StorageError as error:
                problems[tier] = str(error)
        return Inventory(
            address=self.address,
            identity=_identity(self._depots[self.first].root),
            holdings=holdings,
            generation=max(generations),
            problems=problems,
        )

    def commit(
        self, tier: NodeTier, manifest: Manifest, paths: Sequence[str], generation: int
    ) -> str | None:
        """Commits this node's part of a checkpoint; what is missing, in words, if it cannot."""
        fault_point("holder.commit")
        problem = self._keep(tier, manifest, paths, generation)
        fault_point("holder.committed")
        return problem

    def verify(self, tier: NodeTier, name: str, paths: Sequence[str], generation: int) -> Report:
        """Reads files of a checkpoint that should be here, and deletes those that are not as written."""
        started = monotonic()
        self._fences[tier].check(generation)
        depot = self._depots[tier]
        faults = depot.verify(name, paths)
        gone = {fault.path for fault in faults if not fault.unreadable}
        if MANIFEST_NAME in gone:
            # Without it no file here counts, and the next one cannot be put beside a damaged one.
            depot.drop(name)
            gone = set(paths)
        for path in gone:
            self._put_out(tier, name, path)
        return Report(
            done=tuple(path for path in paths if path not in gone),
            problems={fault.path: fault.fault for fault in faults},
            bad=tuple((Place(tier, self._node), path) for path in sorted(gone)),
            seconds=monotonic() - started,
        )

    def replicate(
        self,
        manifest: Manifest,
        pulls: Mapping[str, Sequence[Source]],
        tier: NodeTier,
        generation: int,
    ) -> Report:
        """Fetches files from other nodes into a tier here, and commits them."""
        self._fences[tier].check(generation)
        report = self._copy(
            manifest, pulls, lambda entry, source: self._pull(manifest.name, entry, source, tier)
        )
        return self._committed(tier, manifest, report, generation)

    def promote(
        self, manifest: Manifest, paths: Sequence[str], target: Target, generation: int
    ) -> Report:
        """Copies files that are here to a slower tier; the durable one is committed by the tracker."""
        self._fences[self.first].check(generation)
        here = {path: self._sources_here(manifest, path) for path in paths}

        def push(entry: FileEntry, source: Source) -> None:
            assert source.place is not None
            path = self._depots[source.place.tier].folder(manifest.name) / entry.path
            with self._turns[target]:
                if target == "durable":
                    fault_point("durable.put")
                    self._durable.put(manifest.name, entry, path, self._throttle)
                else:
                    chunks = chunks_of(path, self._throttle)
                    self._depots[target].put(manifest.name, entry, chunks)

        report = self._copy(manifest, here, push)
        if target == "durable":
            return report
        return self._committed(target, manifest, report, generation)

    def provide(
        self, manifest: Manifest, sources: Mapping[str, Sequence[Source]], generation: int
    ) -> Report:
        """Makes files readable in this node's fastest tier, every byte compared with the manifest.

        Several workers of a node may ask for the same; the files are read once.
        """
        tier, name = self.first, manifest.name
        here = Place(tier, self._node)
        self._fences[tier].check(generation)

        def bring(entry: FileEntry, source: Source) -> None:
            if source.place is None:
                self._durable.get(manifest.name, entry, self._depots[tier], Throttle())
            elif source.place == here:
                # Not put in its own place: a bad one would need the space of two.
                if fault := self._depots[tier].fault(name, entry):
                    kind = StorageError if fault.unreadable else CopyError
                    raise kind(f"{entry.path} of {name} in {tier}: {fault.fault}")
            elif source.place.node == self._node:
                path = self._depots[source.place.tier].folder(manifest.name) / entry.path
                self._depots[tier].put(manifest.name, entry, chunks_of(path, Throttle()))
            else:
                self._pull(manifest.name, entry, source, tier)

        with self._providing:
            now_s = monotonic()
            fresh = {key for key, at_s in self._proved.items() if now_s - at_s < _PROVED_S}
            proved = tuple(path for path in sources if (name, path) in fresh)
            left = {path: each for path, each in sources.items() if path not in proved}
            copied = self._copy(manifest, left, bring, _FETCHES)
            report = self._committed(tier, manifest, copied, generation)
            self._proved = {key: at_s for key, at_s in self._proved.items() if key in fresh}
            self._proved |= dict.fromkeys(((name, path) for path in report.done), monotonic())
            fault_point("holder.provided")
            return replace(report, done=(*proved, *report.done))

    def has(self, tier: NodeTier, name: str, entry: FileEntry, generation: int) -> bool:
        """Whether a file is here as the manifest says; reads it, and deletes it when it is not.

        One that cannot be read is not here, but may be good: it is left alone.
        """
        self._fences[tier].check(generation)
        return self._has(tier, name, entry)

    def drop(self, tier: NodeTier, name: str, generation: int) -> None:
        """Ends what is here of a checkpoint."""
        self._fences[tier].check(generation)
        self._disprove(name)
        self._depots[tier].drop(name, lambda: self._fences[tier].check(generation))

    def forget(self, tier: NodeTier, generation: int) -> None:
        """Ends all that is here in a tier."""
        for holding in self._depots[tier].inventory():
            self.drop(tier, holding.name, generation)

    def sweep(self, keep: Sequence[str], generation: int) -> None:
        """Clears away what attempts before this one never committed."""
        problems = []
        for tier, depot in self._depots.items():
            self._fences[tier].check(generation)
            try:
                depot.sweep(keep, generation)
            except StorageError as error:
                problems.append(str(error))  # one bad tier does not keep the other
        if problems:
            raise StorageError("; ".join(problems))

    def close(self) -> None:
        """Ends the file server."""
        self._server.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _open(self, tier: str, name: str, path: str) -> Path | None:
        depot = self._depots.get(tier)
        return None if depot is None else depot.find(name, path)

    def _sources_here(self, manifest: Manifest, path: str) -> list[Source]:
        """Tiers here that have a file, fastest first."""
        return [
            Source(place=Place(tier, self._node))
            for tier in self._stack.node_tiers
            if (self._depots[tier].folder(manifest.name) / path).is_file()
        ]

    def _pull(self, name: str, entry: FileEntry, source: Source, tier: NodeTier) -> None:
        assert source.place is not None
        fetch(
            source.address,
            self._token,
            source.place.tier,
            name,
            entry,
            self._depots[tier],
            Throttle(),
            _FETCH_TIMEOUT_S,
        )

    def _keep(
        self, tier: NodeTier, manifest: Manifest, paths: Sequence[str], generation: int
    ) -> str | None:
        def allowed() -> None:
            self._fences[tier].check(generation)

        allowed()
        return self._depots[tier].keep(manifest, paths, allowed)

    def _committed(
        self, tier: NodeTier, manifest: Manifest, report: Report, generation: int
    ) -> Report:
        """The same report, once what was copied counts."""
        if not report.done:
            return report
        fault_point("holder.copied")
        try:
            self._fences[tier].check(generation)
            self._depots[tier].renounce(manifest)
            problem = self._keep(tier, manifest, report.done, generation)
        except (StorageError, ConfigError, ManifestError, StaleGenerationError) as error:
            problem = str(error)
        if problem is None:
            return report
        problems = {**report.problems, **dict.fromkeys(report.done, problem)}
        return Report(problems=problems, bad=report.bad, damaged=report.damaged)

    def _copy(
        self,
        manifest: Manifest,
        wanted: Mapping[str, Sequence[Source]],
        copy: Callable[[FileEntry, Source], None],
        at_a_time: int = _AT_A_TIME,
    ) -> Report:
        """Copies each file from the first of its sources that gives it whole."""
        started = monotonic()
        entries = {entry.path: entry for entry in manifest.files}
        bad: list[tuple[Place, str]] = []
        damaged: list[str] = []

        def one(path: str) -> str | None:
            problem = "no copy of it is here"
            for source in wanted[path]:
                try:
                    copy(entries[path], source)
                    return None
                except CutOffError as error:
                    problem = str(error)  # the other node may be gone, and what it has be good
                except CopyError as error:
                    problem = str(error)
                    if source.place is None:
                        damaged.append(path)
                    elif self._is_bad(manifest.name, entries[path], source.place):
                        bad.append((source.place, path))
                except (StorageError, NotPlainFileError, OSError) as error:
                    problem = str(error)
            return problem

        with ThreadPoolExecutor(at_a_time, "copy") as pool:
            problems = dict(zip(wanted, pool.map(one, wanted), strict=True))
        done = tuple(path for path, problem in problems.items() if problem is None)
        return Report(
            done=done,
            problems={path: problem for path, problem in problems.items() if problem is not None},
            bad=tuple(bad),
            damaged=tuple(damaged),
            bytes=sum(entries[path].bytes for path in done),
            seconds=monotonic() - started,
        )

    def _is_bad(self, name: str, entry: FileEntry, place: Place) -> bool:
        """Whether a source that gave other bytes than it should is to blame, and not the way or the target."""
        if place.node != self._node:
            return True  # its own holder looks again, when it is told
        return not self._has(place.tier, name, entry, or_unreadable=True)

    def _has(
        self, tier: NodeTier, name: str, entry: FileEntry, *, or_unreadable: bool = False
    ) -> bool:
        fault = self._depots[tier].fault(name, entry)
        if fault is not None and not fault.unreadable:
            self._put_out(tier, name, entry.path)
        return fault is None or (or_unreadable and fault.unreadable)

    def _put_out(self, tier: NodeTier, name: str, path: str) -> None:
        self._disprove(name)
        self._depots[tier].set_aside(name, path)

    def _disprove(self, name: str) -> None:
        """What was read of a checkpoint may be another one now, or gone."""
        self._proved = {key: at_s for key, at_s in self._proved.items() if key[0] != name}


def _identity(folder: Path) -> str:
    """Equal for two nodes that are one machine, and have one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    with contextlib.suppress(OSError):
        return f"{_BOOT_ID.read_text().strip()} {found.st_dev} {found.st_ino}"
    return f"{platform.node()} {found.st_dev} {found.st_ino}"
