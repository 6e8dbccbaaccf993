"""A bench says that a target holds only when it does, to the eye, to a program and to a shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_report import at_least, between, conclude, target_of


@pytest.mark.parametrize(("value", "ok"), [(1.0, True), (1.01, True), (1.0101, False)])
def test_a_target_holds_up_to_its_limit(
    value: float, ok: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    targets = [target_of("a", 0.0, 0.0), target_of("b", value, 1.01)]
    assert conclude(targets, [{"x": 1}], str(path)) == (0 if ok else 1)
    found = json.loads(path.read_text())
    assert [target["ok"] for target in found["targets"]] == [True, ok]
    assert found["rows"] == [{"x": 1}]
    assert found["versions"]
    assert ("MISSED" in capsys.readouterr().out) == (not ok)


@pytest.mark.parametrize(
    ("target", "ok"),
    [
        (at_least("a", 0.9, 0.9), True),
        (at_least("a", 0.89, 0.9), False),
        (between("a", 1.0, 1.0, 2.0), True),
        (between("a", 2.0, 1.0, 2.0), True),
        (between("a", 2.01, 1.0, 2.0), False),
        (between("a", float("nan"), 1.0, 2.0), False),
    ],
)
def test_a_floor_and_a_range_hold_at_their_ends(target: dict[str, object], ok: bool) -> None:
    assert target["ok"] is ok


def test_versions_of_what_else_was_measured_are_told(tmp_path: Path) -> None:
    conclude([], [], str(tmp_path / "found.json"), also=["numpy", "no-such-thing"])
    versions = json.loads((tmp_path / "found.json").read_text())["versions"]
    assert versions["no-such-thing"] == "not installed"
    assert versions["numpy"] != "not installed"
