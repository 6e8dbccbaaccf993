"""A journal whose lines are lost, cut, doubled and out of order costs what it tells, and nothing that the run has."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tracker_core import Run

from ray_ckpt.tracker.journal import JOURNAL_NAME, STEPS_NAME
from ray_ckpt.tracker.recall import read_ledger

GENERATIONS, NEWEST = 3, "step-00000025-g3"
HARMS = st.lists(
    st.tuples(
        st.sampled_from(["lose", "cut", "double", "move", "end"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three attempts, two of which failed."""
    run = Run(tmp_path_factory.mktemp("whole") / "demo")
    for count in (10, 10, 5):
        run.begin()
        run.train(count)
        run.save()
        if run.generation < GENERATIONS:
            run.train(2)
            run.core.interruption("node_loss", "a node died")
    return run.dir


def harmed(text: bytes, harms: list[tuple[str, float, float]]) -> bytes:
    lines = text.splitlines(keepends=True)
    for what, at, other in harms:
        here, there = int(at * len(lines)), int(other * len(lines))
        if what == "lose":
            del lines[here]
        elif what == "cut":
            lines[here] = lines[here][: int(other * len(lines[here]))]
        elif what == "double":
            lines.insert(there, lines[here])
        elif what == "move":
            lines.insert(there, lines.pop(here))
        else:
            del lines[max(1, here) :]
        lines = lines or [b""]
    return b"".join(lines)


@settings(max_examples=40, deadline=None)
@given(journal=HARMS, steps=HARMS, both=st.booleans())
def test_what_a_harmed_journal_does_not_tell_is_not_lost(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    journal: list[tuple[str, float, float]],
    steps: list[tuple[str, float, float]],
    both: bool,
) -> None:
    copy = tmp_path_factory.mktemp("harmed") / "demo"
    shutil.copytree(folder, copy)
    for name, harms in ((JOURNAL_NAME, journal), (STEPS_NAME, steps))[: 1 + both]:
        (copy / name).write_bytes(harmed((folder / name).read_bytes(), harms))
    run = Run(copy)
    kept = run.usable()
    assert kept[0] == NEWEST
    memory = run.core.memory
    counts = (memory.commits, memory.lost_steps, memory.failures, *memory.interruptions.values())
    assert min(counts) >= 0
    assert memory.exposure_s >= 0
    # Manifests say which numbers were given out and what there is to restore; the journal need not.
    attempt = run.begin()
    assert attempt.generation > GENERATIONS
    assert attempt.plan is not None
    assert attempt.plan.name == NEWEST
    assert attempt.directive.every_steps >= 1
    run.train(3)
    assert run.save() in run.usable()
    assert {*kept} <= {*run.usable()}
    ledger = read_ledger(copy)
    assert ledger is not None
    assert math.isclose(sum(ledger.buckets.values()), ledger.wall_s, rel_tol=1e-3, abs_tol=1e-6)
    assert min(ledger.buckets.values()) >= 0
