"""The step bench calls a target met only when it is, and sees every collective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from bench_step import COLLECTIVES, counted
from bench_worlds import conclude, target_of


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


def test_collectives_are_counted_and_the_real_ones_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, lambda *args, name=name: name)
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    with counted() as calls:
        dist.all_reduce("tensor")  # type: ignore[arg-type]
        dist.all_reduce("tensor")  # type: ignore[arg-type]
        assert dist.barrier() == "barrier"
    assert dict(calls) == {"all_reduce": 2, "barrier": 1}
    assert {name: getattr(dist, name) for name in COLLECTIVES} == before
