"""A clock that jumps by an hour, within an attempt and between two: order, counts and what is kept do not follow it."""

from __future__ import annotations

import dataclasses
import re
import time

from disk import add_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tracker_core import OPTIONS, Run

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.cli import main
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.view.story import tell
from ray_ckpt.view.summary import summary

HOUR = 3600.0
STEPS = ["save", "save", "save", "attempt", "back", "back", "forth"]
STEP = {"loss": 1.0, "step_time_s": 0.5, "sample_offset": 8}
NEGATIVE = re.compile(r"(?<![\w.-])-\d")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=st.lists(st.sampled_from(STEPS), min_size=4, max_size=25), every_s=st.booleans())
def test_commits_are_in_the_order_of_steps_and_none_goes_because_of_its_age(
    tmp_path_factory, history, every_s
):
    rules = Rules(keep_newest=2, keep_every_s=HOUR if every_s else 0.0)
    run = Run(tmp_path_factory.mktemp("run"), dataclasses.replace(OPTIONS, retention=rules))
    run.begin()
    saved: list[str] = []
    for what in history:
        if what == "save":
            run.train(3)
            saved.append(run.save())
        elif what == "attempt":
            run.open()
            plan = run.begin().plan
            assert (plan.name if plan else None) == (saved[-1] if saved else None)
        else:
            run.clock.now += HOUR if what == "forth" else -HOUR
    left = run.usable()  # reads every byte
    assert left[:2] == saved[::-1][:2], "the newest by step and attempt, whatever the clock said"
    if every_s:  # more is kept for its time, never less
        assert set(left) >= set(saved[-2:])
    else:
        assert left == saved[::-1][:2]
    assert run.fold().generation == run.generation == 1 + history.count("attempt")
    memory = run.core.memory
    assert memory.lost_steps == 0
    assert memory.exposure_s >= 0.0
    if saved:
        run.core.steps(run.generation, [{**STEP, "step": run.step + 1}])
        assert not NEGATIVE.search(summary(run.dir))
    assert not [line for line in map(tell, run.journal()) if line and NEGATIVE.search(line)]


def test_what_a_dead_attempt_left_does_not_age_by_a_clock_that_jumped_back(tmp_path):
    run = Run(tmp_path / "demo", dataclasses.replace(OPTIONS, retention=Rules(keep_newest=1)))
    run.begin()
    run.clock.now = time.time()
    left = add_checkpoint(run.dir, 5, 1, commit=False)  # its writer's clock is the right one
    run.clock.now -= HOUR
    run.open()
    run.begin()
    for _ in range(3):
        run.train(10)
        run.save()
    assert left.is_dir()
    assert len(run.usable()) == 1


def test_ages_are_never_negative_where_people_look(tmp_path, capsys):
    run = Run(tmp_path / "demo")
    run.clock.now = time.time() + 2 * HOUR  # saved by a clock that is set right only now
    run.begin()
    run.train(10)
    name = run.save()
    run.core.pin(name, "a paper", "ada")
    for command, *more in (["ls"], ["show", "10"]):
        assert main([command, str(run.dir), *more]) == 0
        text = capsys.readouterr().out
        assert "ahead" in text
        assert not NEGATIVE.search(text), text


def test_a_newest_one_from_the_future_is_still_replaced_by_the_next_step(tmp_path):
    run = Run(tmp_path / "demo")
    run.begin()
    run.train(10)
    run.save()
    run.clock.now -= HOUR
    run.train(10)
    second = run.save()
    times = [e.manifest.committed_at for e in usable(list_checkpoints(run.dir)) if e.manifest]
    assert times[0] < times[1], "the clock did not jump"
    run.open()
    plan = run.begin().plan
    assert plan is not None
    assert plan.name == second
