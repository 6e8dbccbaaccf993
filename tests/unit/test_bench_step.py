"""The step bench calls a target met only when it is, and sees every collective."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from bench_step import COLLECTIVES, counted


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
