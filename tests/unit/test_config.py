"""A wrong option or combination is refused when it is built: the option, the rule, the way out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.config import (
    Config,
    ElasticConfig,
    PolicyConfig,
    ReadingConfig,
    SavingConfig,
    absolute_folder,
)
from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.decision import IntervalLimits

WRONG: list[tuple[type, dict[str, Any], list[str]]] = [
    (Config, {"steps": 0}, ["--steps 0", "at least 1"]),
    (Config, {"seq_len": 1}, ["--seq-len 1", "at least 2"]),
    (Config, {"log_every": 0}, ["--log-every 0", "at least 1"]),
    (Config, {"global_batch": 0}, ["--global-batch", "at least 1"]),
    (Config, {"micro_batch": -2}, ["--micro-batch", "at least 1"]),
    (Config, {"micro_batch": 5}, ["--micro-batch 5", "--global-batch 24", "same size", "3, 4, 6"]),
    (
        Config,
        {"workers": "1:13"},
        ["--workers 1:13", "at most 12", "--micro-batch", "--global-batch"],
    ),
    (Config, {"workers": "13"}, ["--workers 13", "at most 12"]),
    (Config, {"workers": "3:2"}, ["--workers 3:2", "MIN <= MAX"]),
    (Config, {"workers": "0:2"}, ["--workers 0:2", "1 <= MIN"]),
    (Config, {"workers": "0"}, ["--workers 0", "1 <= MIN"]),
    (Config, {"workers": ""}, ["--workers ''", "MIN:MAX"]),
    (Config, {"workers": "1:2:3"}, ["--workers '1:2:3'", "MIN:MAX"]),
    (Config, {"workers": "-1:2"}, ["--workers '-1:2'", "MIN:MAX"]),
    (Config, {"workers": "1-2"}, ["--workers '1-2'", "MIN:MAX"]),
    (Config, {"change_at_resume": " "}, ["--change-at-resume ' '", "reason in words"]),
    (Config, {"run": ""}, ["--run ''", "folder's name"]),
    (Config, {"run": "a/b"}, ["--run 'a/b'", "letters"]),
    (Config, {"run": "../x"}, ["--run '../x'", "letters"]),
    (Config, {"run": ".hidden"}, ["--run '.hidden'", "the first a letter or digit"]),
    (Config, {"run": "a\n"}, ["--run 'a\\n'", "letters"]),
    (Config, {"run": "x" * 101}, ["--run", "100 at most"]),
    (ReadingConfig, {"window_groups": 0}, ["--reading.window-groups 0", "at least 1"]),
    (ReadingConfig, {"rows_per_task": 0}, ["--reading.rows-per-task 0", "at least 1"]),
    (ReadingConfig, {"read_tasks": 0}, ["--reading.read-tasks 0", "at least 1"]),
    (ReadingConfig, {"prefetch_batches": -1}, ["--reading.prefetch-batches -1", "at least 0"]),
    (PolicyConfig, {"interval_steps": -1}, ["policy.interval-steps", "0 (computed) or more"]),
    (PolicyConfig, {"first_save_steps": 0}, ["policy.first-save-steps", "at least 1"]),
    (PolicyConfig, {"min_interval_s": 0}, ["policy.min-interval-s", "got 0"]),
    (
        PolicyConfig,
        {"min_interval_s": 5, "max_interval_s": 4},
        ["policy.min-interval-s", "policy.max-interval-s", "5", "4"],
    ),
    (PolicyConfig, {"min_interval_s": math.nan}, ["policy.min-interval-s", "nan"]),
    (PolicyConfig, {"prior_mtbf_s": 0}, ["--policy.prior-mtbf-s", "more than 0"]),
    (PolicyConfig, {"prior_weight": -1}, ["--policy.prior-weight", "more than 0"]),
    (
        PolicyConfig,
        {"prior_per_1000_worker_days": -1},
        ["policy.prior-per-1000-worker-days", "0 or more"],
    ),
    (PolicyConfig, {"prior_per_1000_worker_days": math.nan}, ["policy.prior-per-1000-worker-days"]),
    (SavingConfig, {"timeout_s": 0}, ["--saving.timeout-s", "more than 0 s"]),
    (SavingConfig, {"final_tries": 0}, ["--saving.final-tries 0", "at least 1"]),
    (Config, {"worker_sizes": "2 4"}, ["--worker-sizes '2 4'", "8,16,32"]),
    (Config, {"worker_sizes": "1,,2"}, ["--worker-sizes '1,,2'", "8,16,32"]),
    (
        Config,
        {"worker_sizes": "2,4", "workers": "1:3"},
        ["--worker-sizes 2,4: 4 is not within --workers 1:3"],
    ),
    (ElasticConfig, {"min_gain": -0.1}, ["--elastic.min-gain", "0 or more"]),
    (ElasticConfig, {"drain_margin_s": -1}, ["--elastic.drain-margin-s", "0 or more"]),
    (ElasticConfig, {"cpus_per_worker": 0}, ["--elastic.cpus-per-worker", "more than 0"]),
    (ElasticConfig, {"resize_check_s": -1}, ["--elastic.resize-check-s", "more than 0"]),
    (ElasticConfig, {"start_timeout_s": 0}, ["--elastic.start-timeout-s", "more than 0"]),
    (
        ElasticConfig,
        {"max_fruitless_attempts": 0},
        ["--elastic.max-fruitless-attempts 0", "at least 1"],
    ),
]


@pytest.mark.parametrize(("kind", "values", "words"), WRONG)
def test_a_wrong_value_is_refused_with_option_and_rule(kind, values, words):
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (PolicyConfig, "prior_mtbf_s"),
        (PolicyConfig, "prior_weight"),
        (SavingConfig, "timeout_s"),
        (ElasticConfig, "cpus_per_worker"),
        (ElasticConfig, "resize_check_s"),
        (ElasticConfig, "start_timeout_s"),
        (ElasticConfig, "node_loss_wait_s"),
        (ElasticConfig, "cooldown_s"),
        (ElasticConfig, "settle_s"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_finite_number_is_refused(kind, name, value):
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} {value}"):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "name"), [(Config, "parallel"), (ReadingConfig, "feed"), (ElasticConfig, "gpu")]
)
def test_a_word_that_is_no_choice_is_refused(kind, name):
    with pytest.raises(ConfigError, match=f"{name} 'bogus': must be one of "):
        kind(**{name: "bogus"})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 45), st.integers(0, 45))
def test_any_worker_range_up_to_the_micro_batches_is_taken_and_no_other(v, b, low, high):
    values: dict[str, Any] = {"global_batch": v * b, "micro_batch": b, "workers": f"{low}:{high}"}
    if 1 <= low <= high <= v:
        assert Config(**values).worker_range == (low, high)
    else:
        with pytest.raises(ConfigError, match=f"--workers {low}:{high}"):
            Config(**values)


@pytest.mark.parametrize(
    ("text", "expected"), [("3", (3, 3)), ("1:12", (1, 12)), (" 2:2 ", (2, 2))]
)
def test_workers_are_written_as_a_range_or_a_number(text, expected):
    assert Config(workers=text).worker_range == expected


def test_the_defaults_are_a_valid_run():
    config = Config()
    low, high = config.worker_range
    assert 1 <= low <= high <= config.global_batch // config.micro_batch
    assert config.run_dir == Path(config.storage) / config.run
    assert config.policy.limits() == IntervalLimits(
        fixed_steps=0, min_s=1.0, max_s=1800.0, first_steps=10
    )


def test_options_cannot_be_changed_once_they_are_checked():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.micro_batch = 5  # type: ignore[misc]
    with pytest.raises(ConfigError, match="--micro-batch 5"):
        dataclasses.replace(config, micro_batch=5)


# ---- folders --------------------------------------------------------------------------------------

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def test_a_relative_folder_is_the_users_and_refused_in_a_job(monkeypatch, tmp_path):
    monkeypatch.delenv(JOB, raising=False)
    monkeypatch.chdir(tmp_path)
    assert absolute_folder("runs/../x", "--storage") == str(tmp_path / "x")
    monkeypatch.setenv(JOB, "{}")
    with pytest.raises(ConfigError) as caught:
        absolute_folder("runs", "--storage")
    for word in ("--storage runs", "relative", "temporary copy", "absolute path"):
        assert word in str(caught.value)


def test_absolute_folders_and_homes_are_taken_everywhere(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for environment in (None, "{}"):
        if environment:
            monkeypatch.setenv(JOB, environment)
        assert absolute_folder("/a/b", "--data") == "/a/b"
        assert absolute_folder("~/ray_ckpt", "--data") == str(tmp_path / "ray_ckpt")


def test_the_variable_that_tells_a_job_is_the_one_that_ray_sets():
    constants = pytest.importorskip("ray._private.runtime_env.constants")
    assert constants.RAY_JOB_CONFIG_JSON_ENV_VAR == JOB


def test_an_object_store_is_refused_and_not_made_a_folder():
    with pytest.raises(ConfigError, match=r"--storage s3://b/x: only folders .* Mount it"):
        absolute_folder("s3://b/x", "--storage")


def test_an_empty_folder_is_refused():
    for value in ("", " "):
        with pytest.raises(ConfigError, match="--storage"):
            absolute_folder(value, "--storage")


def test_preferred_sizes_are_numbers_with_commas():
    assert Config().preferred_sizes == ()
    assert Config(workers="1:12", worker_sizes="8, 2,4,2").preferred_sizes == (2, 4, 8)
