"""Holds two runs against each other: the first step and quantity in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_ckpt.view.summary import surviving_steps

# In the order in which a fault shows: what goes into a step before what comes out of it.
EXACT_KEYS = (
    "sample_offset",
    "sample_digest",
    "tokens",
    "lr",
    "rng_digest",
    "loss_hex",
    "grad_norm",
)
# Of a run whose world changes in default mode: random numbers and sums may differ.
LOOSE_KEYS = ("sample_offset", "sample_digest", "tokens", "lr")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two runs part.

    Attributes:
        step: of the surviving history; for the state after the last step, that step.
        what: the quantity.
        reference: its value in the uninterrupted run.
        found: its value in the other.
    """

    step: int
    what: str
    reference: Any
    found: Any


def compare_steps(
    reference: Mapping[int, Mapping[str, Any]],
    found: Mapping[int, Mapping[str, Any]],
    keys: Sequence[str],
    tolerance: float = 0.0,
) -> list[Difference]:
    """Differences between two surviving histories, by step.

    Args:
        reference: step to line of the uninterrupted run.
        found: step to line of the other.
        keys: quantities that must be equal.
        tolerance: greatest difference of the loss, where "loss_hex" is not among the keys.
    """
    differences = []
    for step in sorted(set(reference) | set(found)):
        if step not in reference or step not in found:
            differences.append(
                Difference(step=step, what="step", reference=step in reference, found=step in found)
            )
            continue
        a, b = reference[step], found[step]
        differences += [
            Difference(step=step, what=key, reference=a.get(key), found=b.get(key))
            for key in keys
            if not _same(a.get(key), b.get(key))
        ]
        if "loss_hex" not in keys and not abs(a["loss"] - b["loss"]) <= tolerance:
            differences.append(
                Difference(step=step, what="loss", reference=a["loss"], found=b["loss"])
            )
    return differences


def compare_states(
    step: int, reference: Mapping[str, str], found: Mapping[str, str]
) -> list[Difference]:
    """Differences between the digests of two states after the last step."""
    return [
        Difference(step=step, what=part, reference=reference.get(part), found=found.get(part))
        for part in sorted(set(reference) | set(found))
        if reference.get(part) != found.get(part)
    ]


def loss_noise(runs: Sequence[Path]) -> float:
    """Greatest difference of a step's loss among uninterrupted runs that should be equivalent."""
    histories = [surviving_steps(run) for run in runs]
    steps = set.intersection(*(set(history) for history in histories))
    spread = 0.0
    for step in steps:
        losses = [history[step]["loss"] for history in histories]
        spread = max(spread, max(losses) - min(losses))
    return spread


def _same(a: Any, b: Any) -> bool:
    # NaN is equal to itself here: two runs that both broke are the same run.
    return a == b or (a != a and b != b)
