"""Flags and TOML give the same options; what is not understood is refused by name, with exit code 2."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.config import Config, PolicyConfig
from ray_ckpt.errors import ConfigError, RestoreError, StorageError
from ray_ckpt.options import load_toml, parse, run_main


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(*args: str) -> str:
    """Words of the mistake that these flags are; a program that is given them ends with code 2."""
    told: list[ConfigError] = []

    def main() -> None:
        try:
            parse(Config, list(args))
        except ConfigError as error:
            told.append(error)
            raise

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 2
    return str(told[0])


def exit_code(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: parse(Config, list(args)) and None)
    return int(typing.cast(int, caught.value.code))


def test_without_arguments_the_defaults_hold():
    assert parse(Config, []) == Config()


def test_flags_and_toml_say_the_same(toml):
    path = toml(
        'run = "big"\nsteps = 7\nglobal-batch = 32\nworkers = "2:4"\nparallel = "fsdp"\n'
        "[policy]\nprior-mtbf-s = 3600\nprior_weight = 2.5\n"
        '[reading]\nwindow_groups = 9\nfeed = "local"\n'
        "[saving]\nreport_to_ray = false\n"
    )
    flags = [
        "--run", "big", "--steps", "7", "--global-batch", "32", "--workers", "2:4",
        "--parallel", "fsdp", "--policy.prior-mtbf-s", "3600", "--policy.prior-weight", "2.5",
        "--reading.window-groups", "9", "--reading.feed", "local", "--saving.no-report-to-ray",
    ]  # fmt: skip
    from_flags = parse(Config, flags)
    assert from_flags == parse(Config, ["--config", str(path)]) == load_toml(Config, path)
    assert from_flags.policy.prior_mtbf_s == 3600.0
    assert isinstance(from_flags.policy.prior_mtbf_s, float)
    assert not from_flags.saving.report_to_ray


def test_flags_win_over_toml_and_leave_the_rest_of_it(toml):
    path = toml("steps = 7\nseed = 3\n[policy]\nmin_interval_s = 5\nmax_interval_s = 50\n")
    for config in (["--config", str(path)], [f"--config={path}"]):
        for args in (
            [*config, "--steps", "9", "--policy.min-interval-s", "6"],
            ["--steps", "9", "--policy.min-interval-s", "6", *config],
        ):
            found = parse(Config, args)
            assert (found.steps, found.seed) == (9, 3)
            assert (found.policy.min_interval_s, found.policy.max_interval_s) == (6.0, 50.0)


def test_an_empty_file_changes_nothing(toml):
    assert parse(Config, ["--config", str(toml(""))]) == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", ["stepz is not an option", "did you mean steps?"]),
        ("banana = 3", ["banana is not an option", "known: run, storage"]),
        ("[policy]\nprior_mtbf = 3", ["policy.prior_mtbf", "did you mean policy.prior_mtbf_s?"]),
        ("[polcy]\nprior_mtbf_s = 3", ["polcy is not an option", "did you mean policy?"]),
        ("policy = 3", ["policy is a group", "write [policy]"]),
        ("steps = 3.5", ["steps = 3.5", "type int"]),
        ('steps = "3"', ["steps = '3'", "type int"]),
        ("steps = true", ["steps = True", "type int"]),
        ("run = 3", ["run = 3", "type str"]),
        ("[steps]\nx = 1", ["steps = ", "type int"]),
        ("workers = [1, 2]", ["workers = [1, 2]", "type str"]),
        ("[saving]\nreport_to_ray = 1", ["saving.report_to_ray = 1", "type bool"]),
        ("[policy]\nprior_mtbf_s = true", ["policy.prior_mtbf_s = True", "type float"]),
        ("steps = ", ["is not TOML"]),
        ("steps = 1\nsteps = 2", ["is not TOML"]),
        ("\ufeffsteps = 1", ["is not TOML"]),
        ("steps = 0", ["--steps 0", "at least 1"]),
        ("micro_batch = 5", ["--micro-batch 5", "--global-batch 24"]),
        ("[policy]\nprior-mtbf-s = -1", ["--policy.prior-mtbf-s", "more than 0"]),
    ],
)
def test_what_a_file_may_not_say_is_refused_by_name(toml, text, words):
    path = toml(text)
    message = refused("--config", str(path))
    for word in words:
        assert word in message
    if not message.startswith("--"):
        assert str(path) in message


def test_a_wrong_value_of_a_file_names_the_file(toml):
    path = toml("steps = 0")
    with pytest.raises(ConfigError, match=str(path)):
        parse(Config, ["--config", str(path)])


def test_a_file_and_flags_are_checked_together(toml):
    path = toml('workers = "1:20"')  # too many for the default batch
    assert parse(Config, ["--config", str(path), "--micro-batch", "1"]).worker_range == (1, 20)


@pytest.mark.parametrize(
    "text", ['parallel = "tensor"', '[reading]\nfeed = "x"', '[elastic]\ngpu = "maybe"']
)
def test_a_word_of_a_file_that_is_no_choice_is_refused(toml, text):
    with pytest.raises(ConfigError):
        parse(Config, ["--config", str(toml(text))])


def test_flags_that_are_wrong_by_themselves_are_not_the_files_fault(toml):
    path = toml("seed = 3")
    with pytest.raises(ConfigError) as caught:
        parse(Config, ["--config", str(path), "--micro-batch", "5"])
    assert str(caught.value).startswith("--micro-batch 5")
    path = toml("micro_batch = 4")
    with pytest.raises(ConfigError, match=rf"--config {path}: --workers 1:12"):
        parse(Config, ["--config", str(path), "--workers", "1:12"])


def test_a_file_is_read_as_utf_8(toml):
    path = toml('storage = "/läufe/\u8bad"')
    assert load_toml(Config, path).storage == "/läufe/\u8bad"
    assert parse(Config, ["--config", str(path)]).storage == "/läufe/\u8bad"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A group of somebody's own."""

    dim: int = 8
    """Width."""
    hidden: int | None = None
    """Inner width."""

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ValueError(f"dim={self.dim} must be even")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnConfig(Config):
    """Options of somebody's own."""

    policy: PolicyConfig = dataclasses.field(default_factory=lambda: PolicyConfig(interval_steps=5))
    shape: Shape = dataclasses.field(default_factory=lambda: Shape(dim=16))
    three: int = 3
    """A number."""


def test_options_of_ones_own_keep_their_defaults_and_their_checks(toml):
    path = toml("[shape]\nhidden = 7\n")
    assert parse(OwnConfig, []) == OwnConfig()
    found = parse(
        OwnConfig, ["--config", str(path), "--three", "4", "--policy.first-save-steps", "2"]
    )
    assert found == OwnConfig(
        three=4,
        policy=PolicyConfig(interval_steps=5, first_save_steps=2),
        shape=Shape(dim=16, hidden=7),
    )
    assert type(found.shape) is Shape
    with pytest.raises(ConfigError, match="--shape: dim=3 must be even"):
        parse(OwnConfig, ["--shape.dim", "3"])
    with pytest.raises(ConfigError, match=rf"{path}: shape.hidden = 'x' must be of type int"):
        parse(OwnConfig, ["--config", str(toml('[shape]\nhidden = "x"'))])


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        parse(Config, ["--config", str(path)])
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b'run = "\xff\xfe"')
    with pytest.raises(ConfigError, match=r"run\.toml: is not TOML"):
        load_toml(Config, path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--bogus", "1"], ["--bogus"]),
        (["--step", "1"], ["--step"]),  # no guessing from a part of a name
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps", "1.5"], ["--steps", "1.5"]),
        (["--steps"], ["--steps"]),
        (["--parallel", "tensor"], ["--parallel", "ddp", "fsdp"]),
        (["--reading.feed", "x"], ["--reading.feed", "local"]),
        (["--micro-batch", "5"], ["--micro-batch 5", "--global-batch 24"]),
        (["--workers", "1:99"], ["--workers 1:99", "at most 12"]),
        (["--policy.min-interval-s", "9e9"], ["policy.min-interval-s", "policy.max-interval-s"]),
        (["--config"], ["--config"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_wrong_command_line_ends_with_one_message_and_code_2(capfd, args, words):
    assert exit_code(*args) == 2
    out, err = capfd.readouterr()
    assert out == ""
    for word in words:
        assert word in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def names_of(options: Any, prefix: str = "") -> list[str]:
    """Dotted names of all options."""
    names = []
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), f"{prefix}{field.name}"
        names += names_of(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return names


def test_help_explains_every_option_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # a wide help has its boxes side by side
    assert exit_code("--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--config FILE.toml" in text
    names = names_of(Config())
    assert len(names) > 20
    for name in names:
        flag = "--" + name.replace("_", "-")
        assert flag in text
        if name.endswith("_s"):
            after = text.split(f"{flag} ", 1)[1]
            assert "seconds" in after[: after.index("(default")]
    assert text.count("(default: ") + text.count("(repeatable)") >= len(names)


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (ConfigError("--steps 0: must be at least 1"), 2, "error: --steps 0"),
        (StorageError("disk full"), 1, "error: disk full"),
        (RestoreError("nothing to restore"), 1, "error: nothing to restore"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_how_a_program_ends_tells_whose_fault_it_was(capsys, outcome, code, words):
    def main() -> int | None:
        if isinstance(outcome, BaseException):
            raise outcome
        return typing.cast("int | None", outcome)

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == code
    err = capsys.readouterr().err
    assert err.strip().startswith(words)
    assert len(err.strip().splitlines()) == (1 if words else 0)


def test_a_fault_of_ours_is_shown_whole():
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_main(main)
