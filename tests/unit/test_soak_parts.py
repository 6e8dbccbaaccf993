"""A soak's events follow from its seed, and its judgement finds what must not be."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak_judge import (
    judge_causes,
    judge_history,
    judge_journal,
    judge_ledger,
    lost_by_kind,
)
from soak_remains import Scene, left_behind
from soak_schedule import ENDS, FEWEST_NODES, KINDS, LOSES_NODE, Event, draw

from ray_ckpt.errors import ConfigError
from ray_ckpt.tracker.memory import PLANNED

BATCH = 16


def events(seed: int, nodes: int, count: int, kinds: tuple[str, ...] = ()) -> list[Event]:
    return list(itertools.islice(draw(seed, nodes, kinds), count))


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(FEWEST_NODES, 6))
def test_a_seed_decides_and_never_asks_for_what_cannot_be(seed: int, nodes: int) -> None:
    drawn = events(seed, nodes, 80)
    assert drawn == events(seed, nodes, 80)
    alive, gone = {f"node{i}" for i in range(nodes)}, set[str]()
    for number, event in enumerate(drawn, start=1):
        assert event.number == number
        if event.kind == "add":
            assert event.node in gone
            alive.add(event.node)
            gone.remove(event.node)
        elif event.node:
            assert event.node in alive
        if event.kind in LOSES_NODE:
            assert event.node != "node0", "the head is the cluster"
            alive.remove(event.node)
            gone.add(event.node)
        assert FEWEST_NODES <= len(alive) <= nodes
    assert not drawn[0].at_once
    assert not any(a.at_once and b.at_once for a, b in itertools.pairwise(drawn))
    assert events(seed + 1, nodes, 80) != drawn


def test_every_kind_comes_and_none_but_those_asked_for() -> None:
    assert Counter(event.kind for event in events(3, 4, 400)).keys() == KINDS.keys()
    some = events(3, 4, 100, ("kill-node", "slow-disk"))
    assert {event.kind for event in some} == {"kill-node", "slow-disk"}
    # When no node may be lost any more, one comes back.
    assert {event.kind for event in events(3, 3, 30, ("kill-node",))} == {"kill-node", "add"}
    assert ENDS.keys() == KINDS.keys()
    with pytest.raises(ConfigError, match="no such event"):
        draw(0, 4, ("earthquake",))
    with pytest.raises(ConfigError, match="needs 2 nodes"):
        draw(0, 1)


def row(step: int, generation: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "generation": generation,
        "world_size": 4 - generation,
        "sample_offset": BATCH * step,
        "sample_digest": f"d{step}",
        "loss_hex": f"l{step}",
        **changes,
    }


GOOD = [row(1), row(2), row(3), row(3, 2), row(4, 2), row(5, 3)]


def broken(rows: list[dict[str, Any]], steps: int = 5) -> list[str]:
    return [finding.rule for finding in judge_history(rows, steps, BATCH, lambda step: f"d{step}")]


@pytest.mark.parametrize(
    ("rows", "rules"),
    [
        (GOOD, []),
        ([*GOOD[:4], GOOD[5]], ["every step is made"]),
        ([*GOOD, row(6, 3)], ["no step beyond the last"]),
        ([*GOOD[:5], row(5, 3, sample_digest="d4")], ["every sample once, in order"]),
        ([*GOOD[:5], row(5, 3, sample_offset=4 * BATCH)], ["every sample once, in order"]),
        ([*GOOD[:3], row(3, 2, loss_hex="l0"), *GOOD[4:]], ["what is done again is the same"]),
        ([*GOOD, row(4)], ["what is over writes nothing"]),
    ],
)
def test_a_history_that_is_not_exact_is_found(rows: list[dict[str, Any]], rules: list[str]) -> None:
    assert broken(rows) == rules


def end(kind: str, time: float, lost: int = 0) -> dict[str, Any]:
    return {
        "event": "interruption",
        "kind": kind,
        "time": time,
        "generation": 1,
        "lost_steps": lost,
    }


def test_ends_without_a_cause_and_old_attempts_that_commit_are_found() -> None:
    killed = replace(events(3, 4, 1)[0], kind="kill-worker", node="node1")
    happened = [(100.0, killed)]
    good = [end("worker_error", 101.0, 7), end("resize", 130.0), end("user_stop", 140.0)]
    assert judge_causes(happened, good) == []
    assert [f.rule for f in judge_causes(happened, [end("worker_error", 90.0)])] == [
        "each end has its cause"
    ]
    assert [f.rule for f in judge_causes(happened, [end("hang", 101.0)])] == [
        "each end has its cause"
    ]
    node = end("node_loss", 101.0) | {"cause": "node node2 died, with rank 1"}
    assert judge_causes(happened, [node], {"node2"}) == []
    assert len(judge_causes(happened, [node], {"node1"})) == 1
    begun = [{"event": "attempt_started", "generation": n} for n in (1, 2)]
    commit = {"event": "commit", "step": 8, "generation": 1}
    assert judge_journal([begun[0], commit, begun[1]]) == []
    assert [f.rule for f in judge_journal([*begun, commit])] == ["what is over writes nothing"]
    assert [f.rule for f in judge_journal(begun[::-1])] == ["generations only grow"]
    assert lost_by_kind([*good, end("worker_error", 150.0, 2)])["worker_error"] == (2, 9)
    known = {"node_loss", "worker_error", "hang", "lost"} | PLANNED
    assert frozenset().union(*ENDS.values()) <= known


@pytest.mark.parametrize(
    ("buckets", "good"),
    [
        ({"useful": 99.95, "idle": 0.0}, True),
        ({"useful": 99.0}, False),
        ({"useful": 101.0, "idle": -1.0}, False),
    ],
)
def test_a_ledger_that_does_not_add_up_is_found(buckets: dict[str, float], good: bool) -> None:
    assert (judge_ledger(100.0, buckets) == []) == good


def test_what_is_left_behind_is_told_from_what_others_have() -> None:
    before = Scene(
        processes={(1, 1): "init", (7, 7): "bash /run/soak-x"},
        files=frozenset({"/tmp/a"}),
        threads=("main",),
    )
    clean = Scene(
        processes={**before.processes, (50, 5): "python theirs"},
        files=before.files | {"/tmp/theirs", "/dev/shm/torch_4711_1", "/tmp/soak-x/run/data"},
        threads=("main",),
    )
    seen = {(40, 4), (41, 4)}
    assert left_behind(before, clean, ["soak-x"], seen, kept=["/tmp/soak-x"]) == []
    dirty = Scene(
        processes={
            **clean.processes,
            (41, 4): "renamed",
            (60, 6): "ray::IDLE TAG=soak-x/node1",
            (40, 9): "recycled",
        },
        files=clean.files | {"/dev/shm/torch_41_1", "/dev/shm/rcl-0/soak-x", "/tmp/soak-xy"},
        threads=("main", "fit"),
    )
    found = [
        (f.rule, f.text.split(":")[0])
        for f in left_behind(before, dirty, ["soak-x"], seen, ["/tmp/soak-x"])
    ]
    assert found == [
        ("no process is left behind", "41"),
        ("no process is left behind", "60"),
        ("no shared memory is left behind", "/dev/shm/rcl-0/soak-x"),
        ("no shared memory is left behind", "/dev/shm/torch_41_1"),
        ("no file is left behind", "/tmp/soak-xy"),
        ("no thread is left behind", "fit"),
    ]
