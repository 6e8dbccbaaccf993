"""A run with workers on some nodes, from a tracker's side: real files, holders in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint.guard import GuardRule
from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.errors import ManifestError, StorageError
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker.core import RunFacts, TrackerCore, TrackerOptions
from ray_ckpt.tracker.journal import read_lines
from tests.fleet import LocalFleet

NODES = ["a", "b", "c", "d"]


class World:
    """A run with workers on some nodes.

    Attributes:
        waiting: entered while a commit of its tracker waits for nodes.
    """

    waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, base: Path, stack: Stack, tier_steps: dict[str, int] | None = None) -> None:
        self.base, self.stack = base, stack
        self.run_dir = base / "storage" / "demo"
        self.run_dir.mkdir(parents=True)
        self.tier_steps = tier_steps or {}
        self.fleet = LocalFleet(base / "nodes", stack, self.run_dir)
        self.tracker = self.new_tracker()
        self.generation = 0

    def new_tracker(self) -> TrackerCore:
        facts = RunFacts(
            run="demo",
            run_dir=str(self.run_dir),
            config_fingerprint="c",
            data_fingerprint="d",
            parallel="ddp",
            versions={},
        )
        options = TrackerOptions(
            limits=IntervalLimits(),
            prior_mtbf_s=3600.0,
            stack=self.stack,
            tier_steps=self.tier_steps,
            max_fruitless=100,
            guard=GuardRule(on_nonfinite="rollback"),
        )
        return TrackerCore(facts, options, fleet=self.fleet, waiting=lambda: self.waiting())

    def begin(self, nodes: list[str]) -> Any:
        attempt = self.tracker.begin_attempt(len(nodes), nodes)
        self.generation, self.nodes = attempt.generation, nodes
        return attempt

    def save(self, step: int, **more: Any) -> bool:
        """What the workers and rank 0 do for one save."""
        name = checkpoint_name(step, self.generation)
        files, places = [], {}
        for rank, node in enumerate(self.nodes):
            folder = self.fleet.root(node, self.stack.use[0]) / CHECKPOINTS_DIR / name
            folder.mkdir(parents=True, exist_ok=True)
            paths = [f"__{rank}_0.distcp", *([".metadata"] if rank == 0 else [])]
            for path in paths:
                data = random.Random(f"{step} {self.generation} {path}").randbytes(1000 + rank)
                (folder / path).write_bytes(data)
                checksum = xxhash.xxh3_128_hexdigest(data)
                files.append({"path": path, "bytes": len(data), "checksum": checksum})
            places.setdefault(node, []).extend(paths)
        save = {
            "step": step,
            "samples": step,
            "tokens": step,
            "world_size": len(self.nodes),
            "files": files,
            "places": places,
            "stall_s": 0.1,
            "upload_s": 0.1,
            "metrics": {},
            "guard": {},
            "error": None,
            "bitwise_comparable": True,
        }
        return self.tracker.commit(self.generation, {**save, **more})

    def settle(self) -> None:
        for _ in range(8):
            self.tracker.advance()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.run_dir / "journal.jsonl") if e["event"] == kind]

    def provided(self, plan: Any, node: str) -> Path | None:
        """What a worker on a node gets; None when its holder cannot give it."""
        holder = self.fleet.holders[node]
        report = holder.provide(plan.manifest, plan.sources, self.generation)
        if report.bad:
            self.tracker.bad_copies(self.generation, plan.name, list(report.bad))
        if report.problems:
            return None
        return self.fleet.root(node, self.stack.use[0]) / CHECKPOINTS_DIR / plan.name

    def durable(self, name: str) -> bool:
        folder = self.run_dir / CHECKPOINTS_DIR / name
        try:
            return verify_files(folder, read_manifest(folder)) == []
        except (ManifestError, StorageError):
            return False
