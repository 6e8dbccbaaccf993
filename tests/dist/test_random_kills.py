"""A run that is killed at random named points, again and again, is the run that was not."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from killing import LIMIT_S, check_restores, newest_good, run_struck, train_struck
from worlds import events, history, make_config, make_data, run_world, train

from ray_ckpt.config import PolicyConfig, RetentionConfig

pytestmark = pytest.mark.dist

# Point to the number of times that a process comes by in an attempt, about; on rank 0 alone, or on each.
ON_RANK_0 = {
    "attempt.begin": 1,
    "attempt.begun": 1,
    "save.report": 4,
    "commit.check": 4,
    "commit.temporary": 4,
    "commit.rename": 4,
    "commit.renamed": 4,
    "commit.placed": 4,
    "commit.told": 4,
    "journal.line": 14,
    "journal.sync": 14,
    "steps.line": 5,
    "collect.end": 3,
    "collect.ended": 3,
    "collect.file": 9,
    "collect.emptied": 3,
    "collect.unmarked": 3,
    "collect.removed": 3,
}
ON_EACH = {
    "restore.verify": 1,
    "restore.verified": 1,
    "restore.loading": 1,
    "restore.loaded": 1,
    "save.stage": 4,
    "save.staged": 4,
    "save.write": 4,
    "save.file": 200,
    "save.written": 4,
}


def config_of(folder: Path, run: str, **changes: Any) -> Any:
    return make_config(
        folder,
        run=run,
        exact=True,
        steps=10,
        policy=PolicyConfig(interval_steps=2),
        retention=RetentionConfig(keep_newest=2, keep_every_s=0.0),
        **changes,
    )


def traces(config: Any) -> list[tuple[Any, ...]]:
    keys = ("step", "loss_hex", "sample_offset", "sample_digest", "rng_digest", "grad_norm", "lr")
    return [tuple(line[key] for key in keys) for line in history(config).values()]


def draw(chance: random.Random, world: int) -> tuple[str, dict[int, str]]:
    """A point, and the fault there: of one rank that comes by."""
    point, times = chance.choice([*ON_RANK_0.items(), *ON_EACH.items()])
    rank = 0 if point in ON_RANK_0 else chance.randrange(world)
    return point, {rank: f"{point}@{chance.randint(1, times)}=kill"}


def kill_until(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Runs to their end through ``kills`` kills in all; each must be the one that was not killed."""
    make_data(folder / "data", [16] * 12)
    whole = config_of(folder, "whole")
    reference = run_world(train, 1, whole)[0]["at_end"]
    chance, at = random.Random(seed), Counter[str]()
    number = 0
    while at.total() < kills:
        number += 1
        config = config_of(folder, f"run-{number}")
        newest, ended = 0, False
        for attempt in range(60):
            world = chance.choice([1, 2, 3])
            point, faults = draw(chance, world)
            parallel = config_of(folder, config.run, parallel=chance.choice(["ddp", "fsdp"]))
            overlap = chance.random() < 0.5  # saves beside the steps, or steps that wait for them
            done = max((e["generation"] for e in events(config)), default=0)
            grace_s = chance.choice([0.0, 0.2])
            more = (None, False, None, overlap)
            ending = run_struck(train_struck, world, parallel, faults, *more, grace_s=grace_s)
            words = f"seed {seed}, run {number}, attempt {attempt}, {world} workers, {faults}"
            print(f"{words}: {ending.exits} after {ending.seconds:.1f} s")
            assert ending.seconds < LIMIT_S, words
            check_restores(config, newest, done)
            now = newest_good(config.run_dir)
            assert now >= newest, f"{words}: step {newest} was committed and is lost"
            newest = now
            if not ending.struck:
                assert ending.errors == [], f"{words}:\n{ending.errors[0]}"
                ended = True
                break
            at[point] += 1
        assert ended, f"seed {seed}: run {number} does not come to its end"
        assert ending.results[0]["at_end"] == reference, words
        assert traces(config) == traces(whole), words
        assert events(config, "finished")
    return at


def test_a_run_killed_at_random_points_is_the_run_that_was_not(folder: Path) -> None:
    at = kill_until(folder, 24, seed=1)
    print(sorted(at.items()))
    assert len(at) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_hundreds_of_kills(folder: Path, seed: int) -> None:
    at = kill_until(folder, 60, seed)
    print(sorted(at.items()))
    assert len(at) > 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_step_that_is_committed_has_its_line_whenever_the_kill_comes(folder: Path) -> None:
    """Nobody makes it again, so nobody else would write the line: here that of a save as late as in close()."""
    make_data(folder / "data", [16] * 12)
    config = make_config(folder, steps=4, policy=PolicyConfig(interval_steps=3))
    faults = {0: "save.write@1=sleep:0.5,commit.told@2=kill"}
    assert run_struck(train_struck, 1, config, faults, None, False, None, True).struck
    assert newest_good(config.run_dir) == 4
    assert list(history(config)) == [1, 2, 3, 4]
