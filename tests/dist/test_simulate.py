"""`ray-ckpt simulate`: every policy meets the same failures; bad options are refused by name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from readme import commands

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


def scenes(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], float]:
    """Goodput of the policy that learns, by tiers and by what the job does."""
    assert main(["simulate", "--mtbf", "4h", *COMMON, *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["policies"]
    return {(row["tiers"], row["job"]): row["goodput"] for row in rows if "learns" in row["policy"]}


def test_an_elastic_job_and_one_that_waits_are_shown_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiers = ["--tiers", "memory:stall=5s,upload=5s,restart=2m", "durable", "--upload", "5m"]
    nodes = ["--workers", "64", "--workers-per-node", "8", "--elastic", "--repair", "6h"]
    found = scenes(capsys, *tiers, *nodes)
    elastic, waits = "elastic", "waits for lost nodes"
    assert list(found) == [
        ("memory + durable", elastic),
        ("memory + durable", waits),
        ("durable", elastic),
        ("durable", waits),
    ]
    assert found["memory + durable", elastic] > found["durable", elastic] > found["durable", waits]
    assert found["memory + durable", elastic] > found["memory + durable", waits]


def test_a_replica_outlives_a_lost_node(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--tiers", "memory:upload=5s,restart=1m", "durable", "--upload", "20m"]
    lost = ["--shares", "node_loss=1"]
    with_one, without = (
        scenes(capsys, *tiers, *lost, "--replicas", replicas)[
            "memory + durable", "lost nodes are replaced at once"
        ]
        for replicas in ("1", "0")
    )
    assert with_one > without + 0.03


def test_restarts_grow_with_the_job_up_to_131072_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("gpus,recovery_s\n1000,100\n2000,200\n")
    told = []
    for given in (["--restart", "table"], ["--restart-by-scale", str(path)]):
        for workers in ("16384", "131072"):
            args = ["--llama3", "--workers", workers, "--stall", "20s", "--runs", "2", "--json"]
            assert main(["simulate", *args, "--days", "2", *given]) == 0
            told.append(json.loads(capsys.readouterr().out))
    published_small, published, own_small, own = (each["restart_s"] for each in told)
    # 200 s and 900 s are published for 16,384 and 98,304; a line through all of it goes on.
    assert published_small == pytest.approx(200, rel=0.15)
    assert 900 < published < 900 * 131072 / 98304
    assert (own_small, own) == (pytest.approx(1638.4), pytest.approx(13107.2))
    # Eight times the machines of a job whose failures come with them, but for its software.
    share = 56 / 419
    assert told[0]["mtbf_s"] / told[1]["mtbf_s"] == pytest.approx(share + 8 * (1 - share))


def test_a_page_of_curves_needs_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    few = ["--mtbf", "2h", "--every-steps", "500", "--elastic", "--days", "4"]
    found = policies(capsys, *few, "--html", str(path))
    text = path.read_text()
    assert text.count("<svg") == 3
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text
    assert "src=" not in text
    for name in found:
        assert text.count(name) >= 3  # at the end of its line, beside its sign and in a table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mtbf", "2h", "--tiers", "memory"], "durable"),
        (["--mtbf", "2h", "--tiers", "durable", "memory"], "fastest first"),
        (["--mtbf", "2h", "--tiers", "memory:speed=2", "durable"], "'speed=2'"),
        (["--mtbf", "2h", "--shares", "meteor=1"], "'meteor'"),
        (["--mtbf", "2h", "--shares", "lost=0"], "--shares"),
        (["--mtbf", "2h", "--elastic", "--repair", "0"], "--repair 0"),
        (["--mtbf", "2h", "--workers", "9", "--workers-per-node", "8"], "--workers-per-node 8"),
        (["--mtbf", "2h", "--least-workers", "99", "--elastic"], "1 to 64 nodes"),
        (["--mtbf", "2h", "--restart-by-scale", "/nowhere.csv"], "give one of --restart"),
        (["--mtbf", "2h", "--job-share", "2"], "--job-share"),
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


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("ray-ckpt simulate")])
def test_those_of_README_play_and_name_the_best(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As they stand there, with fewer runs of fewer days."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    assert main([*words, "--runs", "2", "--days", "2"]) == 0
    assert "learns" in capsys.readouterr().out
    assert ("--html" in words) == (tmp_path / "planned.html").exists()
