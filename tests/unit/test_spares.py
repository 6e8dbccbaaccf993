"""Spare processes: as many as can be used, never more and more of them, and no node is left without for long."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

from ray_ckpt import warm
from ray_ckpt.elastic.callbacks import make_callbacks
from ray_ckpt.elastic.spares import TRIES, YOUNG_S, Kept, trains, wanted

NODES = st.sampled_from("abc")


GROUPS = st.dictionaries(NODES, st.tuples(st.integers(1, 3), st.booleans()), min_size=1)


@settings(max_examples=40)
@given(groups=st.lists(GROUPS, max_size=8), pause_s=st.sampled_from([1.0, 2 * YOUNG_S]))
def test_each_node_has_as_many_as_are_wanted_whatever_the_groups_took(groups, pause_s) -> None:
    """Ray gives a group the spare processes of a node if they are up by then, and if they have not died."""
    kept, there, now_s = Kept(), Counter[str](), 0.0
    for group in groups:
        now_s += pause_s
        late = pause_s < YOUNG_S  # they start, and are there for the group after this one
        nodes, spare = [], []
        for node, (workers, died) in group.items():
            if died and not late:
                there[node] = 0  # one that dies and would not have been needed is missed by nobody
            taken = 0 if late else min(workers, there[node])
            there[node] -= taken
            nodes += [node] * workers
            spare += [True] * taken + [False] * (workers - taken)
        assert kept.took(nodes, spare, now_s) == sum(spare)
        if kept.useless:
            return
        want = {node: max(workers for workers, _ in group.values()) for node in group}
        for node, number in kept.missing(want).items():
            kept.started(node, number, now_s)
            there[node] += number
        for node in [node for node in there if node not in want]:
            del there[node]  # it left, or is a new one when it is seen again
        assert all(there[node] >= number for node, number in want.items())
        assert all(number <= 3 for number in there.values()), "they pile up"
    assert kept.missing({}) == {}


def test_what_ray_does_not_give_to_workers_is_not_started_for_ever() -> None:
    kept = Kept()
    for number in range(1, TRIES + 1):
        assert not kept.useless
        kept.started("a", 2, now_s=1000.0 * number)
        assert kept.took(["a", "b"], [False, False], now_s=1000.0 * number + 2 * YOUNG_S) == 0
    assert kept.useless


def test_one_group_that_gets_none_says_nothing() -> None:
    kept = Kept()
    for number, given_s in enumerate([False, True] * TRIES, 1):
        kept.started("a", 1, now_s=1000.0 * number)
        kept.took(["a"], [given_s], now_s=1000.0 * number + 2 * YOUNG_S)
    assert not kept.useless


def test_a_node_gets_as_many_as_it_has_room_for() -> None:
    nodes = [
        {"NodeID": "gpus", "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"NodeID": "few", "Resources": {"CPU": 64.0, "GPU": 2.0}},
        {"NodeID": "head", "Resources": {"CPU": 8.0}},
    ]
    assert wanted(nodes, {"CPU": 4, "GPU": 1}, most=4) == {"gpus": 4, "few": 2}


def test_an_attempt_trains_when_it_has_made_a_step_itself() -> None:
    present = {"attempt_open": True, "generation": 3}
    assert not trains({**present, "last": None})
    assert not trains({**present, "last": {"step": 7, "generation": 2}})
    assert trains({**present, "last": {"step": 7, "generation": 3}}), "however soon it was"
    assert not trains({**present, "attempt_open": False, "last": {"step": 7, "generation": 3}})


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
