"""What was seen before a run: from a table to the belief that the run begins with; and what one run has seen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import make_config, make_data

from ray_ckpt import cli
from ray_ckpt.config import PolicyConfig
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import check_run, tracker_options
from ray_ckpt.policy.belief import Seen
from ray_ckpt.policy.history import history_from_json, history_of_csv, history_to_json
from ray_ckpt.tracker.memory import RunMemory
from ray_ckpt.tracker.pace import Pace

TABLE = """# Llama 3: 54 days on 2,048 nodes of 8
workers, hours, kind, failures
2048,1296,,
2048,,worker_error,324

2048,,node_loss,95
256,100,,
"""
SEEN = (
    Seen(world_size=256, exposure_s=3.6e5, failures={}),
    Seen(world_size=2048, exposure_s=1296 * 3600, failures={"worker_error": 324, "node_loss": 95}),
)
KINDS = st.sampled_from(["worker_error", "node_loss", "hang"])


def call(capsys, *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_rows_add_up_by_number_of_workers():
    assert history_of_csv(TABLE.splitlines()) == SEEN


@settings(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 500), KINDS, st.integers(0, 50)), max_size=8
    )
)
def test_no_hour_and_no_failure_gets_lost_on_the_way(rows):
    lines = ["kind,failures,workers,hours", *(f"{k},{n},{w},{h}" for w, h, k, n in rows)]
    seen = history_of_csv(lines)
    assert history_from_json(json.loads(json.dumps(history_to_json(seen)))) == seen
    assert {each.world_size for each in seen} == {row[0] for row in rows}
    for each in seen:
        mine = [row for row in rows if row[0] == each.world_size]
        assert each.exposure_s == 3600 * sum(row[1] for row in mine)
        for kind, count in each.failures.items():
            assert count == sum(row[3] for row in mine if row[2] == kind)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("workers,hours,kind\n1,2,x", "failures is missing"),
        ("", "workers is missing"),
        ("workers,hours,kind,failures\n0,2,,", "line 2: workers"),
        ("workers,hours,kind,failures\n# x\n2,1,,\n2,nan,,", "line 4: hours"),
        ("workers,hours,kind,failures\n2,1,hang,1.5", "failures is '1.5'"),
        ("workers,hours,kind,failures\n2,1,,3", "of no kind"),
        ("workers,hours,kind,failures\n2,,hang,3", "no hours"),
    ],
)
def test_a_table_that_is_wrong_is_refused_where_it_is_wrong(text, named, tmp_path, capsys):
    (tmp_path / "seen.csv").write_text(text)
    code, _, err = call(capsys, "interruptions", "import", tmp_path / "seen.csv")
    assert code == 2
    assert named in err
    assert not (tmp_path / "seen.json").exists()


def test_a_run_begins_with_what_was_imported(tmp_path, capsys):
    (tmp_path / "seen.csv").write_text(TABLE)
    code, out, _ = call(capsys, "interruptions", "import", tmp_path / "seen.csv")
    assert (code, "324 worker_error" in out) == (0, True)
    config = make_config(tmp_path)
    path = str(tmp_path / "seen.json")
    taught = replace(config, policy=replace(config.policy, history=path))
    assert tracker_options(taught).history == SEEN
    memory = RunMemory(world_size=2048)
    naive, wise = (
        Pace(tracker_options(each), memory, []).belief(memory) for each in (config, taught)
    )
    assert wise.mtbf_s == pytest.approx(1296 * 3600 / 419, rel=0.05)  # what was seen at this size
    assert wise.failures == 419
    assert naive.mtbf_s > 2 * wise.mtbf_s


def test_a_history_that_is_none_is_refused_before_anything_starts(tmp_path):
    make_data(tmp_path / "data", [16] * 12)
    path = tmp_path / "history.json"
    for text in (None, "{", "[]", '{"schema": 1}', '{"schema": 1, "seen": [{"world_size": 2}]}'):
        if text is not None:
            path.write_text(text)
        config = make_config(tmp_path, policy=PolicyConfig(history=str(path)))
        with pytest.raises(ConfigError, match=r"--policy\.history"):
            check_run(config, {})
        assert not config.run_dir.exists()


def test_interruptions_are_listed_with_their_cause_and_size(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    ended = {"event": "interruption", "kind": "node_loss", "cause": "node\nb died", "step": 9}
    events = [
        {"event": "attempt_started", "time": 5.0, "generation": 1, "world_size": 3},
        {**ended, "time": 6.0, "generation": 1, "lost_steps": 4},
        {"event": "interruption", "generation": 2},  # a line that lost most of itself
    ]
    (run / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    code, out, _ = call(capsys, "interruptions", run, "--json")
    first, second = json.loads(out)
    assert code == 0
    assert first == {
        "time": 6.0,
        "generation": 1,
        "kind": "node_loss",
        "cause": "node\nb died",
        "step": 9,
        "lost_steps": 4,
        "world_size": 3,
    }
    assert second["kind"] is None
    code, out, _ = call(capsys, "interruptions", run)
    assert (code, len(out.splitlines())) == (0, 3)
    assert "node b died" in out
    (run / "journal.jsonl").write_text("")
    assert "no interruptions" in call(capsys, "interruptions", run)[1]
    assert call(capsys, "interruptions", run, "x.csv")[0] == 2
