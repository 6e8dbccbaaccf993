"""The progress line tells the truth: the next save comes at the step that it names."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from test_tracker_core import Run

from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tracker.client import LocalTracker
from ray_ckpt.tracker.core import TrackerOptions
from ray_ckpt.tracker.steward import Steward
from ray_ckpt.view.narrator import progress_line

TOTAL, EVERY = 40, 7


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.integers(0, 3),
    st.sets(st.integers(1, 40)),
)
def test_the_next_save_comes_at_the_step_that_the_progress_line_names(
    tmp_path_factory, outcomes, upload_steps, ends
):
    options = TrackerOptions(
        limits=IntervalLimits(fixed_steps=EVERY), prior_mtbf_s=1e9, max_fruitless=99
    )
    run = Run(Path(tmp_path_factory.mktemp("run")), options)

    def begin() -> Steward:
        attempt = run.begin()
        return Steward(
            tracker=LocalTracker(run.core),
            attempt=attempt,
            start_step=run.step,
            total_steps=TOTAL,
        )

    steward, written, due, named = begin(), 0, None, 0
    while run.step < TOTAL:
        if run.step in ends:
            ends.discard(run.step)
            run.core.interruption("node_loss", "x")
            steward, written, due, named = begin(), 0, None, 0
        run.step += 1
        steward.executed({"step": run.step, "loss": 1.0, "lr": 0.1, "tokens": 9, "world_size": 1,
                          "step_time_s": 0.5})  # fmt: skip
        saves = not written and steward.wants_save(run.step)
        if named:
            assert saves == (run.step == named)
        if saves:
            steward.saving(run.step)
            written, due, named = run.step, run.step + upload_steps, 0
        steward.exchange(flush=True)
        if written and due is not None and run.step >= due:
            error = None if outcomes.pop() else "no space"
            outcomes.insert(0, error is None)
            steward.commit(run.written(written, error=error))
            written = 0
        line = progress_line(run.core.status(), TOTAL)
        if written:
            assert "a save is under way" in line
        elif run.step < TOTAL:
            words = (
                "next save near step" if steward._failures == 0 else "FAILED, next try near step"
            )
            if words in line:
                named = int(line.split(words)[1].split()[0])
                assert named > run.step
            else:  # it is due, and begins at the end of the step that is being made
                assert "a save is under way" in line
                named = run.step + 1


def test_a_run_that_is_saved_to_its_end_has_no_next_save(tmp_path):
    run = Run(tmp_path / "run")
    run.begin()
    run.core.steps(1, [{"step": n, "loss": 1.0, "lr": 0.1, "tokens": 9, "world_size": 1,
                        "step_time_s": 0.5} for n in range(1, 11)])  # fmt: skip
    run.step = 10
    run.save()
    line = progress_line(run.core.status(), 10)
    assert line.endswith("ago)")
    assert "last commit step 10" in line
    assert "next save near step" in progress_line(run.core.status(), 11)


def test_a_run_without_tokens_shows_its_steps(tmp_path):
    run = Run(tmp_path / "run")
    run.begin()
    for tokens, words in ((9, "18 tokens/s"), (0, "2.00 steps/s")):
        run.step += 1
        run.core.steps(1, [{"step": run.step, "loss": 1.0, "lr": 0.1, "tokens": tokens, "world_size": 1,
                            "step_time_s": 0.5}])  # fmt: skip
        assert words in progress_line(run.core.status(), TOTAL)
