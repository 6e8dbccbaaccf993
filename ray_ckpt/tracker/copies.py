"""What the nodes hold: which file of which checkpoint has a living copy where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from ray_ckpt.checkpoint.listing import CheckpointEntry
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.tiers.depot import Holding
from ray_ckpt.tiers.holder import Address, Inventory, Source
from ray_ckpt.tiers.placement import Place, missing
from ray_ckpt.tiers.stack import TIER_NAMES, NodeTier


class CopyBook:
    """Copies of one run on its nodes, as far as their holders have told.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._manifests: dict[str, Manifest] = {}
        self._copies: dict[str, dict[str, set[Place]]] = {}
        self._addresses: dict[str, Address] = {}
        self._same: dict[str, str] = {}
        self.generation = 0  # newest attempt that any node has heard of

    def take(self, inventories: Mapping[str, Inventory]) -> list[str]:
        """Forgets all, and learns what these nodes have; returns what is wrong with it, in words."""
        self._manifests, self._copies = {}, {}
        self._addresses = {node: found.address for node, found in inventories.items()}
        self.generation = max((found.generation for found in inventories.values()), default=0)
        problems = self._find_same(inventories)
        # Checkpoint to each manifest of it that there is, and the copies that lie beside it.
        found_of: dict[str, list[tuple[Manifest, list[tuple[Place, Sequence[str]]]]]] = {}
        for node, found in sorted(inventories.items()):
            if node in self._same:
                continue  # a copy in one folder is one copy
            problems += [f"node {node}: {text}" for text in found.problems.values()]
            for place, holding in _committed(node, found):
                variants = found_of.setdefault(holding.name, [])
                beside = next((each for known, each in variants if known == holding.manifest), None)
                if beside is None:
                    assert holding.manifest is not None
                    variants.append((holding.manifest, beside := []))
                beside.append((place, holding.paths))
        for variants in found_of.values():
            variants.sort(key=_worth, reverse=True)
            for place, paths in variants[0][1]:
                self.add(place, variants[0][0], paths)
            problems += [
                f"node {place.node} has another manifest of {manifest.name} in {place.tier} than others: its copies "
                "are not used"
                for manifest, beside in variants[1:]
                for place, _ in beside
            ]
        return problems

    def welcome(self, node: str, found: Inventory) -> None:
        """A node has another holder: what it holds counts again, as far as it is what is known."""
        self._addresses[node] = found.address
        if node in self._same:
            return
        for place, holding in _committed(node, found):
            manifest = self._manifests.get(holding.name, holding.manifest)
            if manifest is not None and manifest == holding.manifest:
                self.add(place, manifest, holding.paths)

    def _find_same(self, inventories: Mapping[str, Inventory]) -> list[str]:
        firsts: dict[str, str] = {}
        self._same, problems = {}, []
        for node, found in sorted(inventories.items()):
            first = firsts.setdefault(found.identity, node)
            if first != node:
                self._same[node] = first
                problems.append(
                    f"nodes {first} and {node} are on one machine and have one folder for their copies: they hold no "
                    "replicas of each other. Give each its own, by a variable in --tiers.memory-folder"
                )
        return problems

    def nodes(self, names: Iterable[str]) -> list[str]:
        """Those of some nodes that have a folder of their own, sorted."""
        return sorted({self._same.get(node, node) for node in names})

    def add(self, place: Place, manifest: Manifest, paths: Iterable[str]) -> None:
        """Notes copies."""
        if not (paths := tuple(paths)):
            return
        self._manifests[manifest.name] = manifest
        place = Place(place.tier, self._same.get(place.node, place.node))
        copies = self._copies.setdefault(manifest.name, {})
        for path in paths:
            copies.setdefault(path, set()).add(place)

    def remove(self, place: Place, name: str, path: str) -> None:
        """One copy is no more."""
        self._copies.get(name, {}).get(path, set()).discard(place)
        self._forget_empty(name)

    def remove_all(self, tier: NodeTier, name: str) -> set[str]:
        """All copies of a checkpoint in a tier are no more; returns the nodes that had some."""
        nodes = set()
        for places in self._copies.get(name, {}).values():
            gone = {place for place in places if place.tier == tier}
            nodes |= {place.node for place in gone}
            places -= gone
        self._forget_empty(name)
        return nodes

    def forget_node(self, node: str) -> None:
        """A node is gone."""
        self._addresses.pop(node, None)
        for name, copies in list(self._copies.items()):
            for places in copies.values():
                places -= {place for place in places if place.node == node}
            self._forget_empty(name)

    def _forget_empty(self, name: str) -> None:
        """A run has thousands of checkpoints in its life: those that no node has are not kept in mind."""
        if not any(self._copies.get(name, {}).values()):
            self._copies.pop(name, None)
            self._manifests.pop(name, None)

    def names(self) -> list[str]:
        """Of all checkpoints that some node holds something of, newest first."""
        held = self._manifests.values()
        return [m.name for m in sorted(held, key=lambda m: (m.step, m.generation), reverse=True)]

    def manifest(self, name: str) -> Manifest:
        """Of a checkpoint in :meth:`names`."""
        return self._manifests[name]

    def known(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint, None when no node has any of it."""
        return self._manifests.get(name)

    def copies(self, name: str, tier: NodeTier | None = None) -> dict[str, set[Place]]:
        """Path to the places that have it, in one tier or in all."""
        return {
            path: {place for place in places if tier in (None, place.tier)}
            for path, places in self._copies.get(name, {}).items()
        }

    def complete(self, name: str, tier: NodeTier | None = None) -> bool:
        """Whether every file has a living copy, in one tier or in all of them together."""
        manifest = self._manifests.get(name)
        return manifest is not None and not missing(manifest, self.copies(name, tier))

    def outlives(self, name: str, gone: Set[str]) -> bool:
        """Whether every file has a copy on another node than these."""
        manifest, lost = self._manifests.get(name), set(self.nodes(gone))
        left = {
            path: {place for place in places if place.node not in lost}
            for path, places in self.copies(name).items()
        }
        return manifest is not None and not missing(manifest, left)

    def entries(self) -> list[CheckpointEntry]:
        """The complete ones, newest first, as a listing of a folder has them."""
        found = []
        for name in self.names():
            if not self.complete(name):
                continue
            manifest = self._manifests[name]
            # Nominal: where it is, or would be, in the durable tier.
            folder = self._dir / CHECKPOINTS_DIR / name
            found.append(
                CheckpointEntry(folder, manifest.step, manifest.generation, manifest, None)
            )
        return found

    def sources(self, name: str, *, durable: bool) -> dict[str, tuple[Source, ...]]:
        """Where each file can be taken from, fastest tier first; empty when no node has anything.

        Args:
            name: of the checkpoint.
            durable: whether the durable tier has it too.
        """
        copies = self._copies.get(name, {})
        if not any(copies.values()):
            return {}
        last = (Source(place=None),) if durable else ()
        return {
            entry.path: tuple(
                Source(place=place, address=self._addresses[place.node])
                for place in sorted(copies.get(entry.path, ()), key=_fastest)
                if place.node in self._addresses
            )
            + last
            for entry in self._manifests[name].files
        }


def _committed(node: str, found: Inventory) -> Iterator[tuple[Place, Holding]]:
    """What a node holds that counts."""
    for tier, holdings in found.holdings.items():
        for holding in holdings:
            if holding.manifest is not None and holding.quarantined is None:
                yield Place(tier, node), holding


def _worth(
    variant: tuple[Manifest, Sequence[tuple[Place, Sequence[str]]]],
) -> tuple[bool, int, float]:
    """Of two manifests of one checkpoint the one counts with which it is whole; then the one that more nodes have."""
    manifest, beside = variant
    here = {path for _, paths in beside for path in paths}
    whole = all(entry.path in here for entry in manifest.files)
    return whole, len(beside), -manifest.committed_at


def described(sources: Mapping[str, Sequence[Source]]) -> str:
    """The tiers that a restore begins with, in words."""
    firsts = {
        each[0].place.tier if each[0].place else "durable" for each in sources.values() if each
    }
    return " and ".join(tier for tier in TIER_NAMES if tier in firsts)


def _fastest(place: Place) -> tuple[int, str]:
    return TIER_NAMES.index(place.tier), place.node
