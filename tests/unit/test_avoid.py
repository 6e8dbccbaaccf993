"""Nodes that were suspected too often get no workers, and never so many that the run does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tracker_core import Run

from ray_ckpt import ray_private
from ray_ckpt.elastic import avoidance
from ray_ckpt.policy.avoid import nodes_to_avoid, selector_without, slots_of
from ray_ckpt.view.story import tell

nodes = st.sampled_from("abcdef")


@given(
    st.dictionaries(nodes, st.integers(0, 6)),
    st.dictionaries(nodes, st.integers(1, 4)),
    st.integers(1, 8),
    st.integers(0, 4),
)
def test_only_the_guilty_that_live_are_left_out_and_the_fewest_workers_fit(
    suspected: dict[str, int], slots: dict[str, int], fewest: int, after: int
) -> None:
    found = nodes_to_avoid(suspected, slots, fewest=fewest, after=after)
    assert all(after and suspected[node] >= after and node in slots for node in found)
    left = sum(slots.values()) - sum(slots[node] for node in found)
    assert left >= min(fewest, sum(slots.values()))
    for node in set(slots) - set(found):
        is_guilty = after and suspected.get(node, 0) >= after
        assert not is_guilty or left - slots[node] < fewest, "one more could have been left out"


def test_the_most_suspected_goes_first() -> None:
    slots = {"a": 1, "b": 1, "c": 1}
    assert nodes_to_avoid({"a": 3, "b": 5}, slots, fewest=2, after=3) == ["b"]


def test_a_selector_names_all_nodes_for_whatever_reason() -> None:
    assert selector_without([]) is None
    assert selector_without({"b", "a"}) == {"ray.io/node-id": "!in(a,b)"}


def test_slots_are_whole_workers_of_all_that_one_needs() -> None:
    assert slots_of({"CPU": 7.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}) == 2
    assert slots_of({"CPU": 7.0}, {"CPU": 2.0, "GPU": 0}) == 3
    assert slots_of({"memory": 1e9}, {"CPU": 1.0}) == 0


class RestartingState:
    """Named as Ray's own."""


class Scaling:
    num_workers, resources_per_worker = (1, 3), {"CPU": 1.0}


class Policy:
    """Counts as Ray's elastic policy does."""

    def _count_possible_workers(self, reserved: dict[str, dict[str, float]]) -> int:
        return int(sum(have["CPU"] for have in reserved.values()))

    def _get_num_workers_for_resource_request(self) -> int:
        return 3


def test_a_node_suspected_three_times_gets_no_workers_and_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    cluster = [
        {"NodeID": node, "Alive": True, "Resources": {"CPU": 1.0}, "Labels": {}} for node in "abc"
    ]

    class Tracker:
        def __init__(self, name: str) -> None:
            self.call = lambda method, **more: getattr(run.core, method)(**more)

    monkeypatch.setattr(avoidance, "RayTracker", Tracker)
    monkeypatch.setattr(avoidance.ray, "nodes", lambda: cluster)
    monkeypatch.setattr(
        ray_private, "import_module", lambda place: type("", (), {"ElasticScalingPolicy": Policy})
    )
    callback = avoidance.Avoidance("demo", 3)
    context: Any = type("Context", (), {"scaling_config": Scaling})
    callback.after_controller_start(context)

    def select() -> Any:
        callback.after_controller_state_update(None, RestartingState())
        return callback.on_controller_start_worker_group(scaling_config=None, num_workers=1)

    policy, reserved = Policy(), {node: {"CPU": 1.0} for node in "abc"}
    for times in range(3):
        assert select() is None, f"left out after {times} hangs"
        assert (
            policy._count_possible_workers(reserved),
            policy._get_num_workers_for_resource_request(),
        ) == (3, 3)
        run.begin()
        run.train(1)
        run.core.interruption("hang", "no step", suspect_nodes=["b"], suspect_names=["node-b"])
    run.open()
    assert select() == {"ray.io/node-id": "!in(b)"}
    assert policy._count_possible_workers(reserved) == 2
    assert policy._get_num_workers_for_resource_request() == 4
    assert select() is not None
    (event,) = run.journal("excluded")
    assert event["nodes"] == ["b"]
    assert "no workers on node b (3 hangs)" in str(tell(event))
    cluster[1]["Alive"] = False  # it is gone: forgotten
    assert select() is None
    assert run.journal("excluded")[-1]["nodes"] == []
