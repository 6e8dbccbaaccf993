"""Spare processes: as many as can be used, never more and more of them, and no node is left without for long."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

from ray_ckpt import warm
from ray_ckpt.elastic.callbacks import make_callbacks
from ray_ckpt.elastic.spares import Kept, wanted

NODES = st.sampled_from("abc")


@settings(max_examples=40)
@given(
    groups=st.lists(
        st.dictionaries(NODES, st.tuples(st.integers(1, 3), st.booleans()), min_size=1), max_size=8
    )
)
def test_each_node_has_as_many_as_are_wanted_whatever_the_groups_took(groups) -> None:
    """What Ray does: it gives a group the spare processes of a node as long as there are some, unless they died."""
    kept, there = Kept(), Counter[str]()
    for group in groups:
        nodes, spare = [], []
        for node, (workers, died) in group.items():
            if died and workers > 1:  # one at least is left, or it would seem that Ray gives none
                there[node] = min(there[node], 1)
            taken = min(workers, there[node])
            there[node] -= taken
            nodes += [node] * workers
            spare += [True] * taken + [False] * (workers - taken)
        assert kept.took(nodes, spare) == sum(spare)
        assert not kept.useless
        want = {node: max(workers for workers, _ in group.values()) for node in group}
        for node, number in kept.missing(want).items():
            kept.started(node, number)
            there[node] += number
        for node in [node for node in there if node not in want]:
            del there[
                node
            ]  # its processes are not known any more: a node that comes back is a new one
        assert all(there[node] >= number for node, number in want.items())
        assert all(there[node] <= 3 for node in there), "they pile up"
    assert kept.missing({}) == {}


def test_what_ray_does_not_give_to_workers_is_not_started_for_ever() -> None:
    kept = Kept()
    kept.started("a", 2)
    assert kept.took(["a", "b"], [False, False]) == 0
    assert kept.useless


def test_a_node_gets_as_many_as_it_has_room_for() -> None:
    nodes = [
        {"NodeID": "gpus", "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"NodeID": "few", "Resources": {"CPU": 64.0, "GPU": 2.0}},
        {"NodeID": "head", "Resources": {"CPU": 8.0}},
    ]
    assert wanted(nodes, {"CPU": 4, "GPU": 1}, most=4) == {"gpus": 4, "few": 2}


def test_a_process_is_warmed_up_where_its_runtime_environment_says_so(monkeypatch) -> None:
    monkeypatch.setattr(warm, "_begun", [])
    monkeypatch.setattr(warm, "IMPORTS", ("ray_ckpt.no_such_module",))
    monkeypatch.delenv(warm.WARM_VARIABLE, raising=False)
    warm.warm_up()
    assert warm.begun_ago_s() == 0
    assert warm.task_options() == {}
    asked = warm.worker_environment("HOOK")["env_vars"]
    assert asked["HOOK"] == "ray_ckpt.warm.warm_up"
    monkeypatch.setenv(warm.WARM_VARIABLE, asked[warm.WARM_VARIABLE])
    warm.warm_up()  # what is raised here would end the process
    assert warm.begun_ago_s() > 0
    [others] = [warm.task_options()["runtime_env"]["env_vars"]]
    assert others != {warm.WARM_VARIABLE: asked[warm.WARM_VARIABLE]}, "a task would take it"
    monkeypatch.setenv(warm.WARM_VARIABLE, others[warm.WARM_VARIABLE])
    assert warm.task_options() == {}


def test_callbacks_travel_to_the_controller() -> None:
    found = make_callbacks(
        "r", save_timeout_s=1.0, node_loss_wait_s=1.0, exclude_after=1, spare_after_s=1.0
    )
    assert len(cloudpickle.loads(cloudpickle.dumps(found))) == len(found)
