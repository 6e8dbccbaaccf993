"""One checkpoint on its way into one tier: who copies what, what failed, when it is tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.errors import HolderGoneError, RayCkptError
from ray_ckpt.tiers.fleet import Fleet
from ray_ckpt.tiers.holder import Report, Target
from ray_ckpt.tiers.placement import Copies, Place, replica_nodes, senders
from ray_ckpt.tiers.stack import NodeTier
from ray_ckpt.tracker.copies import CopyBook

# Longest pause between two tries, seconds.
_LONGEST_PAUSE_S = 60.0
_CALL_S = 3600.0  # a holder that copies for longer is taken for stuck: bounded, and far beyond any real copy


@dataclass(kw_only=True)
class Transfer:
    """A checkpoint on its way.

    Attributes:
        manifest: of the checkpoint.
        first: tier that workers write into.
        target: tier that it goes to; the first tier is for reading back what workers wrote, and for replicas.
        wanted: work that is left, node to paths: for replicas the node that gets them.
        checks: nodes that are to read back what their workers wrote.
        tickets: node to its call that runs, the paths of it, and since when.
        looks: the same for nodes that read back.
        tries: that ended without success, in a row.
        not_before: when the next try may begin, seconds of the caller's clock.
        problem: of the last try, in words.
        avoid: nodes that send, or get replicas, and paths that failed there.
        bytes: copied so far.
        began_s: seconds of the caller's clock.
        sealing: whether all files are there, and the commit is under way.
        gone: nodes whose holder turned out to be gone; whoever takes note empties it.
    """

    manifest: Manifest
    target: Target
    first: NodeTier
    wanted: dict[str, set[str]]
    began_s: float
    checks: set[str] = field(default_factory=set)
    tickets: dict[str, tuple[Any, tuple[str, ...], float]] = field(default_factory=dict)
    looks: dict[str, tuple[Any, float]] = field(default_factory=dict)
    tries: int = 0
    not_before: float = 0.0
    problem: str = ""
    avoid: set[tuple[str, str]] = field(default_factory=set)
    bytes: int = 0
    sealing: bool = False
    gone: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        return self.manifest.name

    @property
    def done(self) -> bool:
        """Whether everything is there."""
        return not self.busy and not self.checks and not any(self.wanted.values())

    @property
    def busy(self) -> bool:
        """Whether holders work on it."""
        return bool(self.tickets or self.looks)

    @property
    def owing(self) -> set[str]:
        """Nodes that have not answered."""
        return {*self.tickets, *self.looks}

    def start(self, fleet: Fleet, book: CopyBook, now_s: float, generation: int) -> None:
        """Begins a try: calls the holders that have work."""
        here = book.copies(self.name, self.first)
        for node in self.checks - self.looks.keys():
            place = Place(self.first, node)
            own = tuple(sorted(path for path, places in here.items() if place in places))
            if not own:
                self.checks.discard(node)  # what it had is bad, or gone
                continue
            call = {"tier": self.first, "name": self.name, "paths": own}
            try:
                ticket = fleet.post(node, "verify", generation=generation, **call)
                self.looks[node] = ticket, now_s
            except RayCkptError as error:
                self._note(node, error)
        for node, paths in self._division(book).items():
            if node in self.tickets or not paths:
                continue
            try:
                if self.target == self.first:
                    sources = book.sources(self.name, durable=False)
                    pulls = {
                        path: tuple(
                            s for s in sources.get(path, ()) if s.place and s.place.node != node
                        )
                        for path in paths
                    }
                    ticket = fleet.post(
                        node,
                        "replicate",
                        manifest=self.manifest,
                        pulls=pulls,
                        tier=self.first,
                        generation=generation,
                    )
                else:
                    ticket = fleet.post(
                        node,
                        "promote",
                        manifest=self.manifest,
                        paths=paths,
                        target=self.target,
                        generation=generation,
                    )
            except RayCkptError as error:
                self._note(node, error)
                self._failed(node, paths, str(error))
                continue
            self.tickets[node] = (ticket, tuple(paths), now_s)

    def poll(self, fleet: Fleet, now_s: float) -> list[tuple[str, Report]]:
        """Takes the answers that are there: node and report."""
        reports = self._poll_looks(fleet, now_s)
        for node, (ticket, paths, since_s) in list(self.tickets.items()):
            try:
                done, report = fleet.take(ticket, 0)
            except RayCkptError as error:
                del self.tickets[node]
                self._note(node, error)
                self._failed(node, paths, str(error))
                continue
            if not done and now_s - since_s > _CALL_S:
                done, report = True, Report(problems=dict.fromkeys(paths, "it takes too long"))
            if not done:
                continue
            del self.tickets[node]
            for path, problem in report.problems.items():
                self._failed(node, (path,), problem)
            for key in list(self.wanted):
                if self.target != self.first or key == node:
                    self.wanted[key] -= set(report.done)
            self.bytes += report.bytes
            reports.append((node, report))
        return reports

    def _poll_looks(self, fleet: Fleet, now_s: float) -> list[tuple[str, Report]]:
        reports = []
        for node, (ticket, since_s) in list(self.looks.items()):
            try:
                done, report = fleet.take(ticket, 0)
            except RayCkptError as error:
                self._note(node, error)
                done, report = True, Report(problems={"": str(error)})
            if not done and now_s - since_s > _CALL_S:
                done, report = True, Report(problems={"": "it takes too long"})
            if not done:
                continue
            del self.looks[node]
            if report.problems:
                self.problem = f"node {node}: {next(iter(report.problems.values()))}"
            else:
                self.checks.discard(node)
            reports.append((node, Report(bad=report.bad)))
        return reports

    def leave(self, node: str) -> None:
        """Waits no longer for a node: its holder hangs, and another one takes its place."""
        problem = f"the holder on node {node} does not answer"
        if (call := self.tickets.pop(node, None)) is not None:
            self._failed(node, call[1], problem)
        if self.looks.pop(node, None) is not None:
            self.problem = problem

    def pause(self, now_s: float, pause_s: float) -> None:
        """After a try that left something: waits, longer each time."""
        self.tries += 1
        self.not_before = now_s + min(pause_s * 2 ** (self.tries - 1), _LONGEST_PAUSE_S)

    def _division(self, book: CopyBook) -> Mapping[str, Sequence[str]]:
        """Node to the paths that it is to copy."""
        if self.target == self.first:
            return {node: sorted(paths) for node, paths in self.wanted.items()}
        left = set().union(*self.wanted.values())
        sizes = {entry.path: entry.bytes for entry in self.manifest.files}
        division = senders(left, book.copies(self.name), sizes, self.avoid)
        if lost := left - {path for paths in division.values() for path in paths}:
            self.problem = f"no living copy of {min(lost)}"
        return division

    def _note(self, node: str, error: RayCkptError) -> None:
        self.problem = str(error)
        if isinstance(error, HolderGoneError):
            self.gone.add(node)

    def _failed(self, node: str, paths: Sequence[str], problem: str) -> None:
        self.problem = problem
        self.avoid |= {(node, path) for path in paths}


def replicas(
    manifest: Manifest,
    copies: Copies,
    nodes: Sequence[str],
    *,
    count: int,
    domains: Mapping[str, str],
    avoid: AbstractSet[tuple[str, str]] = frozenset(),
) -> dict[str, set[str]]:
    """Which node is to get which files, so that each has ``count`` copies on other nodes, as far as there are nodes.

    Args:
        manifest: of the checkpoint.
        copies: in memory.
        nodes: that can keep copies.
        count: copies beside the first.
        domains: node to its failure domain.
        avoid: node and path that failed before, such as of a node whose memory is full; taken only when there is no
            other node.
    """
    failed = Counter(path for _, path in avoid)
    wanted: dict[str, set[str]] = {}
    for entry in manifest.files:
        here = {place.node for place in copies.get(entry.path, ())} & set(nodes)
        if not here:
            continue
        owner = min(here)
        # The first few of the ring are the same whether more are asked for or not, and few are cheap.
        first = replica_nodes(owner, nodes, count + len(here) + failed[entry.path], domains)
        targets = [node for node in first if node not in here]
        targets.sort(key=lambda node: (node, entry.path) in avoid)
        for node in targets[: max(0, count + 1 - len(here))]:
            wanted.setdefault(node, set()).add(entry.path)
    return wanted


def places_of(report: Report, target: Target, node: str) -> Place | None:
    """Where the files of a report are now, when that is on a node."""
    return None if target == "durable" or not report.done else Place(target, node)
