"""What many tests need, with the fields that they do not care about filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tracker.core import RunFacts, TrackerCore, TrackerOptions

_FIELDS: dict[str, Any] = {
    "sample_offset": 1,
    "tokens": 1,
    "world_size": 1,
    "generation": 1,
    "committed_at": 1.7e9,
    "parallel": "ddp",
    "guard": {},
    "metrics": {},
    "config_fingerprint": "c",
    "data_fingerprint": "d",
    "versions": {},
    "bitwise_comparable": True,
}


def manifest_of(**fields: Any) -> Manifest:
    """A manifest; ``run``, ``step`` and ``files`` at least have to be said."""
    return Manifest(**{**_FIELDS, **fields})


def tracker_of(run: Path) -> TrackerCore:
    """The tracker of a run that has no rules of its own."""
    facts = RunFacts(
        run="demo",
        run_dir=str(run),
        config_fingerprint="c",
        data_fingerprint="d",
        parallel="ddp",
        versions={},
    )
    return TrackerCore(facts, TrackerOptions(limits=IntervalLimits(), prior_mtbf_s=3600.0))
