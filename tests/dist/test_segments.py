"""A run whose data or batch is changed at a resume: each segment in its own order, each sample of it once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_fallback import _flip, _shard
from worlds import events, history, make_config, make_data, open_session, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.config import PolicyConfig
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import check_run, expected_digest, global_order
from ray_ckpt.segment import FIRST, Segment
from ray_ckpt.tracker.identity import IDENTITY_NAME
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines

pytestmark = pytest.mark.dist

ROW_GROUPS = [7, 1, 0, 12, 9, 3, 20, 5]
EVERY_STEP = PolicyConfig(interval_steps=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", ROW_GROUPS)
    return tmp_path


def only_restore(rank: int, world: int, config: Any) -> int:
    """An attempt that is lost before its first step; returns where it began."""
    session, state, _ = open_session(rank, config)
    session.restore(state)
    return int(state.progress.step)


def check_history(config: Any, line: list[tuple[Segment, Any]]) -> None:
    """Holds a run's steps against what its segments say, from their orders alone.

    Args:
        config: of the run.
        line: its segments, each with the options that it had.
    """
    ends = [segment.start_step for segment, _ in line[1:]] + [config.steps]
    found = history(config)
    assert list(found) == list(range(1, config.steps + 1))
    for (segment, options), end in zip(line, ends, strict=True):
        order, batch = global_order(options, segment), options.global_batch
        for step in range(segment.start_step, end):
            digest = expected_digest(
                order, segment.own_step(step), global_batch=batch, micro_batch=options.micro_batch
            )
            row = found[step + 1]
            assert row["sample_digest"] == digest, f"step {step + 1}"
            assert row["segment"] == segment.number
            assert row["sample_offset"] == segment.start_offset + batch * (
                step + 1 - segment.start_step
            )


def refused(config: Any, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(config, {})
    for word in (*words, '--change-at-resume "reason"'):
        assert word in str(caught.value)


def test_resumes_before_at_and_after_a_segments_start_lose_and_repeat_nothing(folder: Path) -> None:
    """Another global batch from step 6 on; every step is saved, so each stop is where it says. 5 micro-batches."""
    old = make_config(folder, policy=EVERY_STEP)
    new = replace(old, global_batch=15, micro_batch=3)
    declared = replace(new, change_at_resume="larger batch")
    starts = [run_world(train, world, old, stop)[0]["started"] for world, stop in ((3, 5), (2, 6))]
    refused(new, "--global-batch was 10, now 15", "--micro-batch was 2, now 3")
    starts += [run_world(only_restore, 3, config)[0] for config in (declared, declared, new)]
    refused(old, "--global-batch was 15, now 10")
    starts += [
        run_world(train, world, config, stop)[0]["started"]
        for world, config, stop in ((3, new, 7), (2, declared, 8), (4, new, None))
    ]
    assert starts == [0, 5, 6, 6, 6, 6, 7, 8]
    first = Segment(number=1, start_step=6, start_offset=60, reason="larger batch")
    check_history(new, [(FIRST, old), (first, new)])
    # Each step was made once, and the change is on record once.
    assert [line["step"] for line in read_lines(new.run_dir / STEPS_NAME)] == list(range(1, 13))
    [event] = events(new, "segment")
    assert (event["step"], event["sample_offset"]) == (6, 60)
    assert event["changed"]["--global-batch"] == {"old": 10, "new": 15}
    for entry in list_checkpoints(new.run_dir):
        assert entry.manifest is not None
        assert entry.manifest.segment == (first if entry.step > 6 else FIRST).mark()


def test_data_row_length_and_weights_change_each_in_its_own_segment(folder: Path) -> None:
    make_data(folder / "short", [8, 9, 30], seq_len=7)
    make_data(folder / "more", [3, 4, 0, 5], seq_len=7)
    short, more = str(folder / "short"), str(folder / "more")
    base = make_config(folder, steps=11, policy=EVERY_STEP)
    plan = [
        (base, 3),
        (replace(base, data=(short,), seq_len=7), 5),
        (replace(base, data=(f"a={short}:2", f"b={more}:1"), seq_len=7), 8),
        (replace(base, data=(f"a={short}:1", f"b={more}:3"), seq_len=7), None),
    ]
    line: list[tuple[Segment, Any]] = []
    start = 0
    for number, (config, stop) in enumerate(plan):
        if number:
            refused(config, "--data (fingerprint of its content) was")
        reason = f"change {number}" if number else ""
        started = run_world(train, 2, replace(config, change_at_resume=reason), stop)[0]["started"]
        assert started == start
        line.append(
            (
                Segment(number=number, start_step=start, start_offset=10 * start, reason=reason),
                config,
            )
        )
        start = stop or 0
    last = plan[-1][0]
    check_history(last, line)
    record = json.loads((last.run_dir / IDENTITY_NAME).read_text())["segments"]
    assert [s["start_step"] for s in record] == [0, 3, 5, 8]
    assert {row["tokens"] for s, row in history(last).items() if s > 3} == {10 * 6}


def test_bad_checkpoints_up_to_before_the_boundary_start_the_segment_there(folder: Path) -> None:
    """Saved at 3, 6 and 9; the batch changes at 6; 9 and 6 turn out to be bad. The record is of the old format."""
    old = make_config(folder)
    new = replace(old, global_batch=20)
    run_world(train, 2, old, 7)
    path = old.run_dir / IDENTITY_NAME
    record = json.loads(path.read_text())
    identity = {**record["fixed"], **record["segments"][0]["options"]}
    path.write_text(json.dumps({"schema": 1, "identity": identity}))
    refused(new, "--global-batch was 10, now 20")
    started = run_world(train, 3, replace(new, change_at_resume="larger batch"), 10)[0]["started"]
    assert started == 6
    for entry in list_checkpoints(new.run_dir):
        if entry.step > 3:
            _flip(_shard(entry.folder))
    assert run_world(train, 2, new, 5)[0]["started"] == 3
    assert run_world(train, 1, new, 7)[0]["started"] == 3  # nothing was saved yet: the same again
    assert run_world(train, 3, new)[0]["started"] == 6
    again = Segment(number=1, start_step=3, start_offset=30, reason="larger batch")
    check_history(new, [(FIRST, old), (again, new)])
    assert [(e["step"], e["sample_offset"]) for e in events(new, "segment")] == [(6, 60), (3, 30)]
    assert [e["reason"] for e in events(new, "segment")] == ["larger batch"] * 2
    refused(old, "--global-batch was 20, now 10", "since step 3 (segment 1)")


def test_exact_mode_gives_the_same_bits_for_every_world_across_a_change(folder: Path) -> None:
    found = []
    for run, first, second in (("narrow", 1, 3), ("wide", 3, 2)):
        old = make_config(folder, run=run, exact=True, steps=6)
        new = replace(old, global_batch=14, change_at_resume="larger batch")
        run_world(train, first, old, 3)
        assert run_world(train, second, new)[0]["started"] == 3
        found.append([(row["loss_hex"], row["sample_digest"]) for row in history(new).values()])
    assert len(found[0]) == 6
    assert found[0] == found[1]
