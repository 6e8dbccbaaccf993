"""Only nodes that stay are counted, the tracker decides about growing, and without Ray's class Ray decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import ScalingConfig

from ray_ckpt import ray_private
from ray_ckpt.elastic import sizing
from ray_ckpt.elastic.drains import DrainWatch
from ray_ckpt.elastic.sizing import Looks, Sizing, room
from ray_ckpt.errors import LeavingError, StorageError
from ray_ckpt.policy.resize import Resizing
from ray_ckpt.ray_private import NoopDecision, draining_nodes, set_scaling_policy
from ray_ckpt.tracker.departures import Drain


class Cluster:
    """Nodes of two CPUs, a run of 1 to 9 workers on it, and the run's tracker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.living, self.draining = ["a", "b"], set[str]()
        self.reserved = ["a", "b"]
        self.now, self.asked = 0.0, list[int]()
        self.answer: Any = None
        self.policy = Sizing(
            ScalingConfig(num_workers=(1, 9)), run="r", sizes=(), micro_batches=8, check_s=20.0
        )
        monkeypatch.setattr(sizing.ray, "nodes", self.nodes)
        monkeypatch.setattr(sizing, "draining_nodes", lambda: dict.fromkeys(self.draining))
        monkeypatch.setattr(sizing, "RayTracker", lambda run: self)
        monkeypatch.setattr(sizing.time, "monotonic", lambda: self.now)
        self.slept: list[float] = []
        monkeypatch.setattr(sizing.time, "sleep", self.slept.append)
        self.requests: list[int] = []
        self.refreshed = 0
        monkeypatch.setattr(sizing, "refresh_reservations", self.refresh)
        monkeypatch.setattr(self.policy, "_maybe_send_resource_request", lambda: None)
        monkeypatch.setattr(
            self.policy,
            "_send_resource_request",
            lambda: self.requests.append(self.policy._get_num_workers_for_resource_request()),
        )
        monkeypatch.setattr(
            self.policy,
            "_get_reserved_resources",
            lambda: {node: {"CPU": 2.0} for node in self.reserved},
        )

    def refresh(self) -> None:
        self.refreshed += 1

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "Alive": node in self.living, "Resources": {"CPU": 2.0}}
            for node in ("a", "b", "c", "d", "e")
        ]

    def call(self, method: str, *, possible: int, workers: int) -> Resizing:
        assert method == "resize"
        self.asked.append(possible)
        if self.answer is None:
            raise StorageError("the tracker is gone")
        return Resizing(workers=self.answer, why="grow", reason="")

    def running(self, workers: int) -> int | None:
        """What a group of so many workers is to become; None for nothing."""
        state = SimpleNamespace(num_workers=workers, start_time=0.0)
        decision = self.policy.make_decision_for_running_worker_group(state, None)
        return None if isinstance(decision, NoopDecision) else decision.num_workers

    def starting(self) -> int | None:
        decision = self.policy.make_decision_for_non_running_worker_group()
        return None if isinstance(decision, NoopDecision) else decision.num_workers


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_group_is_as_large_as_the_nodes_that_stay(cluster: Cluster) -> None:
    assert cluster.starting() == 4
    cluster.draining = {"b"}
    assert cluster.starting() == 2, "a node that is drained gets no workers"
    cluster.draining, cluster.living = set(), ["b"]
    assert cluster.starting() == 2, "nor one that is dead, whatever is reserved there"
    cluster.living = []
    assert cluster.starting() is None
    cluster.living = cluster.reserved = ["a", "b", "c", "d", "e"]
    assert cluster.starting() == 8, "there are no more micro-batches"


def test_growing_is_asked_for_and_becoming_smaller_is_left_to_the_end_of_the_group(
    cluster: Cluster,
) -> None:
    cluster.now, cluster.answer = 20.0, 4
    cluster.reserved = cluster.living = ["a", "b", "c"]
    assert cluster.running(4) is None, "not yet, the tracker says"
    cluster.now += 1.0
    cluster.answer = 6
    assert cluster.running(4) == 6
    assert cluster.asked == [6, 6]
    cluster.now += 20.0
    cluster.answer = 6
    cluster.draining = {"b"}
    cluster.reserved = cluster.living = ["a", "b", "c", "d"]
    assert cluster.running(6) is None, "the workers on it leave when it is time"
    assert cluster.asked[-1] == 6, "nor does room on it make up for what is elsewhere"
    cluster.now += 20.0
    cluster.draining, cluster.living = set(), ["a", "c"]
    cluster.reserved = ["a", "b", "c"]
    assert cluster.running(6) is None, "a group on a dead node fails by itself"
    cluster.now += 20.0
    cluster.reserved, cluster.answer = ["a"], 2
    assert cluster.running(6) == 2, "others got the resources"
    assert cluster.asked[2:] == [6, 6, 2]


def test_a_new_node_is_seen_at_the_next_look(cluster: Cluster) -> None:
    cluster.now, cluster.answer = 20.0, 4
    assert cluster.running(4) is None
    cluster.now += 20.0
    cluster.living = ["a", "b", "c"]
    assert cluster.refreshed == 0
    assert cluster.running(4) is None
    assert cluster.refreshed == 1
    cluster.now += 20.0
    assert cluster.running(4) is None
    assert cluster.refreshed == 1


def test_room_on_nodes_that_go_is_asked_for_elsewhere(cluster: Cluster) -> None:
    assert cluster.running(4) is None
    assert cluster.requests == []
    cluster.draining = {"b", "gone for long"}
    assert cluster.running(4) is None
    assert cluster.running(4) is None
    assert cluster.requests == [9 + 2], "once, and for two more than the most workers"
    cluster.draining = set()
    assert cluster.running(4) is None
    assert cluster.requests == [11, 9]


def test_while_there_is_no_room_the_controller_rests_between_its_looks(cluster: Cluster) -> None:
    assert cluster.starting() is not None
    assert cluster.slept == []
    cluster.living = []
    assert [cluster.starting() for _ in range(3)] == [None] * 3
    assert cluster.slept == [sizing.NO_ROOM_S] * 3


def test_a_worker_that_needs_what_a_node_lacks_has_no_room_there() -> None:
    assert room({"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}) == 2
    assert room({"CPU": 8.0}, {"CPU": 3.0, "GPU": 1.0}) == 0
    assert room({"CPU": 8.0}, {"CPU": 0.0}) == 0


def test_a_tracker_that_does_not_answer_changes_nothing(cluster: Cluster) -> None:
    cluster.now, cluster.answer = 20.0, None
    assert cluster.running(2) is None
    assert cluster.asked == [4]


def test_a_cluster_that_does_not_answer_is_counted_as_ray_does(cluster: Cluster) -> None:
    cluster.living = None  # type: ignore[assignment]
    assert cluster.starting() == 4


def test_looks_are_closer_while_the_cluster_offers_more() -> None:
    looks = Looks(20.0)
    assert [looks.due(now, 5.0) for now in (24.0, 25.0, 26.0, 44.0, 45.0)] == [
        *(False, True),
        *(False, False, True),
    ]
    looks.saw(more=True)
    assert [looks.due(now, 5.0) for now in (45.5, 46.0, 46.5, 47.0)] == [False, True, False, True]
    looks.saw(more=False)
    assert [looks.due(now, 5.0) for now in (48.0, 67.0)] == [False, True]


def test_a_trainer_gets_the_policy_where_it_makes_its_own(cluster: Cluster) -> None:
    started: dict[str, Any] = {}
    trainer = SimpleNamespace(_initialize_and_run_controller=lambda **given: started.update(given))
    assert set_scaling_policy(trainer, lambda config: ("ours", config.max_workers))
    own = ray_private.ElasticScalingPolicy(ScalingConfig(num_workers=(1, 3)))
    trainer._initialize_and_run_controller(scaling_policy=own, callbacks=[])
    assert started == {"scaling_policy": ("ours", 3), "callbacks": []}
    trainer._initialize_and_run_controller(scaling_policy="of a fixed size")
    assert started["scaling_policy"] == "of a fixed size"


def test_another_ray_decides_by_itself_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not set_scaling_policy(SimpleNamespace(), lambda config: None)
    monkeypatch.setattr(ray_private, "_POLICY_METHODS", ("_count_by_magic",))
    assert ray_private._elastic_policy() == (None, None)
    assert caplog.text.count("read in 2.60.0") == 2


def test_a_ray_without_drains_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray._private.state import GlobalState

    monkeypatch.delattr(GlobalState, "get_draining_nodes")
    ray_private._missing_once.cache_clear()
    assert draining_nodes() == draining_nodes() == {}
    assert caplog.text.count("get_draining_nodes is not there in Ray") == 1


def test_a_planned_end_is_one_line_of_a_workers_log(caplog: pytest.LogCaptureFixture) -> None:
    from ray.train.v2._internal.util import construct_user_exception_with_traceback

    ray_private.short_leaving()
    for error in (LeavingError("the attempt ends as planned"), ValueError("a bug")):
        try:
            raise error
        except (LeavingError, ValueError) as raised:
            construct_user_exception_with_traceback(raised)
    left, failed = caplog.records
    assert (left.getMessage(), left.levelname) == ("the attempt ends as planned", "WARNING")
    assert "Traceback" in failed.getMessage()
    assert failed.levelname == "ERROR"


def test_the_watch_tells_what_changed_and_survives_a_cluster_that_does_not_answer() -> None:
    told: list[list[Drain]] = []
    answers: list[Any] = [
        {},
        {"n1": 5.0},
        {"n1": 5.0},
        RuntimeError("no"),
        {"n1": 5.0, "n2": None},
        {},
    ]

    def look() -> dict[str, float | None]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = DrainWatch(told.append, look, lambda: {"n1": "spot-1"})
    while answers:
        watch.once()
    one = Drain(node="n1", name="spot-1", deadline=5.0)
    assert told == [[one], [one, Drain(node="n2", name="n2", deadline=None)], []]


def test_controllers_of_a_run_reserve_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a controller that died has reserved is the next one's: under a name of its own it would wait for minutes."""
    names = []
    for _ in range(2):
        cluster = Cluster(monkeypatch)
        context = SimpleNamespace(run_id=f"another each time {len(names)}")
        cluster.policy.after_controller_start(context)
        names.append(cluster.policy._requester_id)
        assert cluster.requests == [9]
    assert names[0] == names[1]
    other = Sizing(ScalingConfig(num_workers=(1, 9)), run="s", sizes=(), micro_batches=8, check_s=1)
    monkeypatch.setattr(other, "_send_resource_request", lambda: None)
    other.after_controller_start(context)
    assert other._requester_id not in names
