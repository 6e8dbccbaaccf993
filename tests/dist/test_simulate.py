"""`ray-ckpt simulate`: every policy meets the same failures; bad options are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ray_ckpt.cli import main

COMMON = ["--stall", "20s", "--restart", "5m", "--runs", "20", "--days", "10", "--json"]


def policies(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, float]]:
    assert main(["simulate", *COMMON, *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["policies"]
    return {row["policy"]: row for row in rows}


def test_learning_is_near_the_best_and_better_than_a_belief_that_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = policies(capsys, "--mtbf", "2h", "--believed-mtbf", "20h")
    best, learns, young, hourly = found.values()
    assert best["regret"] == 0
    assert learns["regret"] < 0.1 < hourly["regret"]
    assert learns["regret"] < young["regret"]
    for row in found.values():
        waste = row["waste"]
        assert waste["total"] == pytest.approx(  # type: ignore[index]
            sum(waste[part] for part in ("save", "rework", "restart"))  # type: ignore[index]
        )


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--mtbf", "2h", "--runs", "4", "--days", "3"]
    assert policies(capsys, *few) == policies(capsys, *few)
    assert policies(capsys, *few) != policies(capsys, *few, "--seed", "1")


def test_failures_as_they_were_seen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "gaps.csv"
    path.write_text("gap_s\n3600\n7200\n10800\n")
    assert len(policies(capsys, "--trace", str(path))) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of --mtbf, --llama3 and --trace"),
        (["--mtbf", "2h", "--llama3"], "one of"),
        (["--mtbf", "soon"], "'soon' is no time"),
        (["--mtbf", "0"], "more than 0"),
        (["--mtbf", "2h", "--weibull", "-1"], "--weibull"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["simulate", *arguments, *COMMON]) == 2
    assert words in capsys.readouterr().err
