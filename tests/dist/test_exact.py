"""Exact mode: the number of workers leaves no trace in losses, weights or optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import events, history, make_config, make_data, run_world, train

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", [16] * 12)
    return tmp_path


def traces(config: Any) -> list[tuple[str, str, str, float]]:
    keys = ("loss_hex", "sample_digest", "rng_digest", "grad_norm")
    return [tuple(line[key] for key in keys) for line in history(config).values()]


def test_every_world_and_both_ways_to_spread_give_the_same_bits(folder: Path) -> None:
    runs = [
        ("ddp", 1),
        ("ddp", 2),
        ("ddp", 3),
        ("ddp", 4),
        ("ddp", 5),
        ("fsdp", 1),
        ("fsdp", 2),
        ("fsdp", 3),
    ]
    found = {}
    for parallel, world in runs:
        config = make_config(
            folder, run=f"{parallel}{world}", parallel=parallel, exact=True, steps=6
        )
        end = run_world(train, world, config)[0]["at_end"]
        found[parallel, world] = (traces(config), end)
    reference = found["ddp", 1]
    for key, value in found.items():
        assert value == reference, key
    assert len({loss for loss, *_ in reference[0]}) == 6


def test_a_run_that_is_killed_and_resized_is_the_run_that_was_not(folder: Path) -> None:
    whole = make_config(folder, run="whole", exact=True)
    reference = run_world(train, 1, whole)[0]["at_end"]
    config = make_config(folder, run="broken", exact=True)
    route = [("ddp", 4, 5), ("fsdp", 2, 8), ("ddp", 3, 10), ("fsdp", 5, None)]
    for parallel, world, stop in route:
        step = make_config(folder, run="broken", exact=True, parallel=parallel)
        end = run_world(train, world, step, stop)[0]["at_end"]
    assert traces(config) == traces(whole)
    assert end == reference
    assert [e["world_size"] for e in events(config, "attempt_started")] == [4, 2, 3, 5]
