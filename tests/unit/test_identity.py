"""A run keeps its options; some of them change when somebody says so, and never by mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest
from making import manifest_of

from ray_ckpt.checkpoint.manifest import FileEntry, write_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.segment import OPTIONS, Segment
from ray_ckpt.tracker.identity import (
    IDENTITY_NAME,
    RunRecord,
    check_identity,
    fingerprint,
    read_record,
    write_record,
)

NAMES: dict[str, Any] = {
    "--global-batch": 10,
    "--micro-batch": 2,
    "--seq-len": 9,
    "--seed": 0,
    "--exact": False,
    "--reading.window-groups": 2,
    "--data (fingerprint of its content)": "da7a",
    "--model.dim": 16,
}
OTHER = {
    "--global-batch": 20,
    "--micro-batch": 5,
    "--seq-len": 8,
    "--reading.window-groups": 4,
    "--data (fingerprint of its content)": "web=da7a:2 code=c0de:1",
}


@pytest.fixture
def run(tmp_path):
    assert check_identity(tmp_path / "run", NAMES) == ""
    return tmp_path / "run"


@pytest.mark.parametrize("option", OPTIONS)
def test_a_change_that_is_not_declared_is_refused_and_offered(run, option):
    before = (run / IDENTITY_NAME).read_bytes()
    with pytest.raises(ConfigError) as caught:
        check_identity(run, {**NAMES, option: OTHER[option]})
    text = str(caught.value)
    assert f"{option} was {NAMES[option]!r}, now {OTHER[option]!r}" in text
    assert '--change-at-resume "reason"' in text
    assert "Use the old values" in text
    assert (run / IDENTITY_NAME).read_bytes() == before


@pytest.mark.parametrize("option", OPTIONS)
def test_a_declared_change_is_let_pass_and_not_written_before_it_is_known_where_it_starts(
    run, option
):
    before = (run / IDENTITY_NAME).read_bytes()
    assert check_identity(run, {**NAMES, option: OTHER[option]}, "because") == ""
    assert (run / IDENTITY_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", 1), ("--exact", True), ("--model.dim", 32)]
)
@pytest.mark.parametrize("more", [{}, {"--global-batch": 20}])
def test_seed_exact_and_model_are_refused_also_when_declared(run, option, value, more):
    for change in ("", "because"):
        with pytest.raises(ConfigError) as caught:
            check_identity(run, {**NAMES, option: value, **more}, change)
        text = str(caught.value)
        assert f"{option} cannot be changed, with --change-at-resume" in text
        assert "--global-batch cannot" not in text
        assert "add --change-at-resume" not in text


def test_a_declaration_of_nothing_says_so_and_goes_on(run, tmp_path):
    notice = check_identity(run, NAMES, "because")
    assert "nothing is changed" in notice
    assert "segment 0" in notice
    assert "\n" not in notice
    assert "new run" in check_identity(tmp_path / "other", NAMES, "because")
    assert check_identity(tmp_path / "other", NAMES) == ""


def test_what_counts_is_the_newest_segment(run):
    """After a change the new values are the run's, and the old ones are refused like any others."""
    record = read_record(run)
    options = {**record.segments[0].options, "--global-batch": 20}
    later = Segment(number=1, start_step=6, start_offset=60, reason="larger", options=options)
    write_record(run, RunRecord(fixed=record.fixed, segments=(*record.segments, later)))
    assert read_record(run).segments == (record.segments[0], later)
    assert check_identity(run, {**NAMES, "--global-batch": 20}) == ""
    with pytest.raises(
        ConfigError, match=r"since step 6 .segment 1., other options: --global-batch was 20, now 10"
    ):
        check_identity(run, NAMES)
    assert check_identity(run, NAMES, "back again") == ""
    assert "segment 1 (since step 6)" in check_identity(
        run, {**NAMES, "--global-batch": 20}, "again"
    )


def test_a_record_of_before_segments_is_read_as_one_segment(tmp_path):
    document = {"schema": 1, "identity": NAMES}
    (tmp_path / IDENTITY_NAME).write_text(json.dumps(document))
    record = read_record(tmp_path)
    assert record == RunRecord.of(NAMES)
    assert set(record.segments[0].options) == set(OPTIONS)
    assert set(record.fixed) == {"--seed", "--exact", "--model.dim"}
    assert check_identity(tmp_path, NAMES) == ""
    assert json.loads((tmp_path / IDENTITY_NAME).read_text()) == document
    with pytest.raises(ConfigError, match="--seed was 0, now 1"):
        check_identity(tmp_path, {**NAMES, "--seed": 1})
    with pytest.raises(ConfigError, match="--micro-batch was 2, now 5"):
        check_identity(tmp_path, {**NAMES, "--micro-batch": 5})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"schema": 1}',
        '{"schema": 1, "identity": 3}',
        '{"schema": 2, "fixed": {}}',
        '{"schema": 2, "fixed": {}, "segments": []}',
        '{"schema": 2, "fixed": {}, "segments": [3]}',
        '{"schema": 2, "fixed": {}, "segments": [{"number": 1, "start_step": -3}]}',
        '{"schema": 2, "fixed": 7, "segments": [{"number": 0}]}',
    ],
)
def test_a_damaged_record_is_an_error_and_not_a_new_run(tmp_path, text):
    (tmp_path / IDENTITY_NAME).write_text(text)
    with pytest.raises(StorageError, match="damaged"):
        check_identity(tmp_path, NAMES)
    assert (tmp_path / IDENTITY_NAME).read_text() == text


def test_a_record_of_a_later_version_is_told_from_a_damaged_one(tmp_path):
    (tmp_path / IDENTITY_NAME).write_text('{"schema": 3, "segments": []}')
    with pytest.raises(StorageError, match="format 3, this version reads up to 2"):
        check_identity(tmp_path, NAMES)


def test_a_record_that_is_gone_is_told_and_other_options_are_refused_without_it(tmp_path):
    folder = tmp_path / CHECKPOINTS_DIR / checkpoint_name(3, 1)
    folder.mkdir(parents=True)
    assert check_identity(tmp_path, NAMES) == "", "nothing was committed that could be harmed"
    (tmp_path / IDENTITY_NAME).unlink()
    made_with = manifest_of(
        run="r", step=3, files=(FileEntry("a", 1, "0" * 32),), config_fingerprint=fingerprint(NAMES)
    )
    write_manifest(folder, made_with)
    other = {**NAMES, "--seed": 1}
    with pytest.raises(ConfigError, match=r"run\.json is not there.*made with other options"):
        check_identity(tmp_path, other)
    assert read_record(tmp_path) is None, "a refusal writes nothing"
    assert "the record is written anew" in check_identity(tmp_path, NAMES)
    assert read_record(tmp_path) == RunRecord.of(NAMES)
    (tmp_path / IDENTITY_NAME).unlink()
    assert "other options: moved" in check_identity(tmp_path, other, "moved")
