"""A resumed run is the uninterrupted run: same losses, same samples, same state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import events, history, make_config, make_data, run_world, train

from ray_ckpt.config import PolicyConfig
from ray_ckpt.facts import expected_digest, global_order
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines

pytestmark = pytest.mark.dist

ROW_GROUPS = [7, 1, 0, 12, 9, 3, 20, 5]  # 57 rows: 5 global batches an epoch, 7 rows left out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", ROW_GROUPS)
    return tmp_path


def losses(config: Any) -> list[str]:
    return [line["loss_hex"] for line in history(config).values()]


def digests(config: Any) -> list[str]:
    return [line["sample_digest"] for line in history(config).values()]


def expected_digests(config: Any, steps: int) -> list[str]:
    """What the digests of a run's first steps should be, from its global order alone."""
    order = global_order(config)
    return [expected_digest(order, step, global_batch=10, micro_batch=2) for step in range(steps)]


@pytest.mark.parametrize(
    ("parallel", "world", "staging"),
    [
        ("ddp", 1, "blocking"),
        ("ddp", 2, "overlapped"),
        ("ddp", 3, "blocking"),
        ("fsdp", 2, "blocking"),
        ("fsdp", 3, "overlapped"),
    ],
)
def test_two_resumes_repeat_the_uninterrupted_run_bit_for_bit(
    folder: Path, parallel: str, world: int, staging: Any
) -> None:
    whole = make_config(folder, run="whole", parallel=parallel)
    reference = run_world(train, world, whole)[0]
    saving = replace(whole.saving, staging=staging)
    broken = make_config(folder, run="broken", parallel=parallel, saving=saving)
    first = run_world(train, world, broken, 5)[0]
    second = run_world(train, world, broken, 8)[0]
    third = run_world(train, world, broken)[0]
    assert (first["started"], second["started"], third["started"]) == (0, 3, 6)
    assert losses(broken) == losses(whole)
    assert digests(broken) == digests(whole)
    assert third["at_end"] == reference["at_end"]
    rows = history(broken)
    assert [row["sample_offset"] for row in rows.values()] == [10 * s for s in rows]
    assert [row["lr"] for row in rows.values()] == [row["lr"] for row in history(whole).values()]
    assert [e["lost_steps"] for e in events(broken, "interruption")] == [2, 2]


def test_every_world_sees_the_same_samples_in_the_same_order(folder: Path) -> None:
    seen = {}
    for world in (1, 2, 3, 5):
        config = make_config(folder, run=f"w{world}", steps=7)
        run_world(train, world, config)
        seen[world] = digests(config)
    expected = expected_digests(make_config(folder), 7)
    assert all(found == expected for found in seen.values())


def test_a_run_that_changes_its_world_keeps_batch_and_order(folder: Path) -> None:
    config = make_config(folder, run="changing")
    for world, stop in ((3, 4), (2, 8), (5, None)):
        run_world(train, world, config, stop)
    whole = make_config(folder, run="whole")
    run_world(train, 1, whole)
    assert digests(config) == digests(whole)
    assert {line["tokens"] for line in history(config).values()} == {10 * 8}
    assert [e["world_size"] for e in events(config, "attempt_started")] == [3, 2, 5]


def test_state_survives_resharding_between_fsdp_and_ddp(folder: Path) -> None:
    config = make_config(folder, run="reshard", parallel="fsdp", steps=20)
    saved = run_world(train, 2, config, 3)[0]["at_end"]
    route = [("ddp", 1, 6), ("fsdp", 3, 9), ("ddp", 2, 12), ("fsdp", 2, 15)]
    for parallel, world, stop in route:
        found = run_world(
            train, world, make_config(folder, run="reshard", parallel=parallel, steps=20), stop
        )
        assert found[0]["started"] == stop - 3
        assert found[0]["at_start"] == saved
        saved = found[0]["at_end"]


def test_resumes_before_at_and_after_an_epochs_end_lose_and_repeat_nothing(folder: Path) -> None:
    """torchdata#1437, verl#7401: five steps are an epoch here; every step is saved, so each stop is where it says."""
    every_step = PolicyConfig(interval_steps=1)
    whole = make_config(folder, run="whole", steps=12, policy=every_step)
    run_world(train, 1, whole)
    config = make_config(folder, run="ends", steps=12, policy=every_step)
    starts = []
    for world, stop in ((2, 4), (1, 5), (2, 6), (1, 9), (2, 10), (1, 11), (2, None)):
        starts.append(run_world(train, world, config, stop)[0]["started"])
    assert starts == [0, 4, 5, 6, 9, 10, 11]
    assert digests(config) == digests(whole)
    assert [line["step"] for line in read_lines(config.run_dir / STEPS_NAME)] == list(range(1, 13))


def test_a_mixture_is_the_same_for_every_world_and_around_its_sources_epochs(folder: Path) -> None:
    make_data(
        folder / "more", [3, 4, 0, 5]
    )  # 12 rows: an epoch of 2 rows a stream, 3 steps at one row in 3
    data = (f"most={folder / 'data'}:2", f"more={folder / 'more'}:1")
    every_step = PolicyConfig(interval_steps=1)
    whole = make_config(folder, run="whole", data=data, steps=8, policy=every_step)
    run_world(train, 1, whole)
    config = make_config(folder, run="mixed", data=data, steps=8, policy=every_step)
    starts = []
    for world, stop in ((2, 2), (1, 3), (2, 4), (3, None)):
        starts.append(run_world(train, world, config, stop)[0]["started"])
    assert starts == [0, 2, 3, 4]
    assert digests(config) == digests(whole)
    assert digests(whole) == expected_digests(config, 8)
