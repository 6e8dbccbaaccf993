"""Tiers on the nodes, from a tracker's side: holders of several nodes in this process, real files, real copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.tiers.placement import replica_nodes
from ray_ckpt.tiers.stack import Stack
from tests.tier_world import NODES, World

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, Stack(use=("memory", "durable"), replicas=2), {"durable": 20})
    yield made
    made.fleet.close(drop_memory=False, generation=made.generation)


def test_a_commit_in_memory_gets_replicas_and_the_first_one_goes_to_the_durable_tier(
    world: World,
) -> None:
    assert world.begin(NODES).plan is None
    assert world.save(10)
    world.settle()
    assert world.durable("step-00000010-g1")
    (replicated,) = world.events("replicated")
    assert (replicated["copies"], replicated["wanted"]) == (3, 3)
    assert [e["tier"] for e in world.events("commit")] == ["memory"]
    assert [e["tier"] for e in world.events("promote")] == ["durable"]
    assert world.save(20)
    assert world.save(25)
    world.settle()
    # 20 steps after the first: not 10 after it.
    assert not world.durable("step-00000020-g1")
    assert world.save(30)
    world.settle()
    assert world.durable("step-00000030-g1")


@pytest.mark.parametrize("lost", [["a", "b"], ["a", "c"], ["c", "d"], ["b", "d"]])
def test_as_many_nodes_as_there_are_replicas_may_die_at_once(world: World, lost: list[str]) -> None:
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    assert world.save(15)
    world.settle()
    for node in lost:
        world.fleet.kill(node)
    world.tracker.interruption("node_loss", "two nodes died", group="g1")
    assert world.events("interruption")[-1]["lost_steps"] == 0
    left = [node for node in NODES if node not in lost]
    attempt = world.begin(left)
    assert attempt.plan.name == "step-00000015-g1"  # newer than what is durable
    assert attempt.plan.sources
    for node in left:
        folder = world.provided(attempt.plan, node)
        assert folder is not None
        assert verify_files(folder, attempt.plan.manifest) == []


def test_more_nodes_than_replicas_die_and_the_run_goes_back_to_the_durable_tier(
    world: World,
) -> None:
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    assert world.save(15)
    world.settle()
    for node in ["a", "b", "c"]:
        world.fleet.kill(node)
    attempt = world.begin(["d"])
    # What one survivor has of step 15 is not all of it.
    assert attempt.plan.name == "step-00000010-g1"


def test_two_nodes_on_one_machine_are_no_replicas_of_each_other(world: World) -> None:
    for node in ("b", "c"):  # of one machine: a link stands for one folder under two names
        (world.base / "nodes").mkdir(exist_ok=True)
        (world.base / "nodes" / node).symlink_to(world.base / "nodes" / "shared")
    (world.base / "nodes" / "shared").mkdir()
    world.begin(NODES)
    assert any("one machine" in e["problem"] for e in world.events("alert"))
    assert world.save(10)
    world.settle()
    world.fleet.kill("b")
    world.fleet.kill("d")
    world.fleet.kill("a")
    # The folder of b and c is there still: with it c has one copy of everything.
    assert world.events("replicated")[-1]["copies"] == 3
    assert world.begin(["c"]).plan.name == "step-00000010-g1"


def test_what_the_guard_refuses_is_kept_as_evidence_and_leaves_the_memory(world: World) -> None:
    world.begin(NODES)
    bad = {
        "findings": [{"kind": "tensor", "text": "model.w is not finite", "rank": 0, "tensor": "w"}]
    }
    assert not world.save(10, guard=bad)
    world.settle()
    name = "step-00000010-g1"
    folder = world.run_dir / CHECKPOINTS_DIR / name
    kept = {path.name for path in folder.iterdir()}
    assert {".metadata", "__0_0.distcp", "__3_0.distcp", "QUARANTINED.json"} <= kept
    assert "COMMITTED.json" not in kept
    assert not any((world.fleet.root(node) / CHECKPOINTS_DIR / name).exists() for node in NODES)
    assert world.begin(NODES).plan is None


def test_a_copy_that_rots_in_memory_is_found_by_the_scrub_and_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, Stack(use=("memory", "durable"), replicas=1, scrub_s=1e-9))
    world.begin(["a", "b"])
    assert world.save(10)
    world.settle()
    path = world.fleet.root("b") / CHECKPOINTS_DIR / "step-00000010-g1" / "__0_0.distcp"
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    world.settle()
    assert [(e["node"], e["path"]) for e in world.events("bad_copy")] == [("b", "__0_0.distcp")]
    world.settle()
    assert path.read_bytes() == good


def test_all_copies_are_read_when_somebody_asks_and_each_bad_one_is_named(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        Stack(
            use=("memory", "local", "durable"), local_folder="/of/each/node", replicas=1, scrub_s=0
        ),
    )
    world.begin(["a", "b"])
    for step in (10, 20):
        assert world.save(step)
        world.settle()
        world.settle()
    held = [(row["tier"], row["step"]) for row in world.tracker.read_back()]
    assert {("memory", 10), ("memory", 20)} <= set(held)
    assert all(row["done"] and row["ok"] for row in world.tracker.read_back())
    # One byte of a replica, and of nothing else: no interval would have anybody read it.
    path = world.fleet.root("b") / CHECKPOINTS_DIR / "step-00000020-g1" / "__0_0.distcp"
    good = path.read_bytes()
    path.write_bytes(good[:7] + bytes([good[7] ^ 1]) + good[8:])
    world.settle()
    assert not world.events("bad_copy")
    world.tracker.ask_read_back()
    assert not all(row["done"] for row in world.tracker.read_back()), "nothing was read yet"
    for _ in range(4):
        world.settle()
    rows = world.tracker.read_back()
    assert all(row["done"] for row in rows)
    assert [
        (r["tier"], r["step"], [f["path"] for f in r["faults"]]) for r in rows if not r["ok"]
    ] == [("memory", 20, ["__0_0.distcp"])]
    assert path.read_bytes() == good, "the bad copy was replaced"
    # What came of it is on record, where those look who did not ask.
    [reading] = world.events("read_back")
    assert (reading["copies"], reading["num_faults"], reading["nodes"]) == (
        len(rows),
        1,
        ["a", "b"],
    )
    assert [(f["name"], f["tier"], f["path"]) for f in reading["faults"]] == [
        ("step-00000020-g1", "memory", "__0_0.distcp")
    ]
    world.tracker.ask_read_back()
    for _ in range(4):
        world.settle()
    assert all(row["done"] and row["ok"] for row in world.tracker.read_back())
    assert [each["num_faults"] for each in world.events("read_back")] == [1, 0]


def test_an_older_one_never_goes_to_a_slower_tier_after_a_newer_one_unless_it_must(
    world: World,
) -> None:
    world.begin(NODES)
    steps = []
    for step in (10, 30, 35, 50, 52):
        assert world.save(step)
        world.settle()
        steps = [e["step"] for e in world.events("promote")]
    assert steps == [10, 30, 50]
    world.tracker._places.keep("step-00000035-g1", "for a reason")
    assert world.save(60)
    world.tracker._places.keep("step-00000052-g1", "for a reason")
    world.settle()
    assert [e["step"] for e in world.events("promote")] == [10, 30, 50, 52]
    assert [e["name"] for e in world.events("pin")] == ["step-00000052-g1"]


def test_after_a_rollback_copies_go_on_from_where_the_run_is(world: World) -> None:
    world.begin(NODES)
    for step in (10, 30):
        assert world.save(step)
        world.settle()
    world.tracker.trouble(world.generation, 31, "loss is nan", ())
    world.tracker.interruption("worker_error", "it ended itself", group="g")
    assert world.begin(NODES).plan.manifest.step == 30
    world.tracker.restored(world.generation, 30, 0.1, "x", "y")
    world.tracker.trouble(world.generation, 31, "loss is nan", ())
    world.tracker.interruption("worker_error", "it ended itself", group="h")
    assert (
        world.begin(NODES).plan.manifest.step == 10
    )  # one further back, which is in the durable tier alone
    world.tracker.restored(world.generation, 10, 0.1, "x", "y")
    for step in (15, 35):
        assert world.save(step)
        world.settle()
    assert [e["step"] for e in world.events("promote")] == [10, 30, 35]


def test_a_save_that_goes_past_the_nodes_is_a_durable_one(world: World) -> None:
    """What workers do when the tiers on the nodes fail: the folder takes it, and nothing is missed later."""
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    assert not world.save(20, error="rank 1: the memory is full")
    name = "step-00000030-g1"
    folder = world.run_dir / CHECKPOINTS_DIR / name
    folder.mkdir(parents=True)
    files = []
    for path in (".metadata", "__0_0.distcp"):
        (folder / path).write_bytes(path.encode())
        checksum = xxhash.xxh3_128_hexdigest(path.encode())
        files.append({"path": path, "bytes": len(path), "checksum": checksum})
    assert world.save(30, files=files, places={}, direct=True)
    assert world.durable(name)
    assert world.events("commit")[-1]["tier"] == "durable"
    assert world.tracker.durable(world.generation, 30) == ""
    assert world.tracker.status()["failed_in_a_row"] == 0
    world.settle()
    assert [e["step"] for e in world.events("promote")] == [10]
    for node in NODES:
        world.fleet.kill(node)
    plan = world.begin(["e"]).plan
    assert plan.name == name
    assert not plan.sources


def test_a_save_past_the_nodes_that_fails_leaves_nothing(world: World) -> None:
    world.begin(NODES)
    folder = world.run_dir / CHECKPOINTS_DIR / "step-00000010-g1"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")
    assert not world.save(10, places={}, direct=True, error="rank 0: disk full")
    assert not folder.exists()


def test_without_any_copy_left_and_nothing_durable_the_run_begins_again_and_is_not_refused(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Stack(use=("memory", "durable"), replicas=0), {"durable": 20})
    world.begin(["a"])
    for _ in range(2):
        world.fleet.stuck = {("a", "promote")}
        assert world.save(10)
    world.fleet.kill("a")
    assert world.begin(["b"]).plan is None


def test_a_bad_copy_is_deleted_told_and_another_one_is_taken(world: World) -> None:
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    name = "step-00000010-g1"
    bad = world.fleet.root("b") / CHECKPOINTS_DIR / name / "__1_0.distcp"
    bad.write_bytes(b"x" + bad.read_bytes()[1:])
    attempt = world.begin(NODES)
    folder = world.provided(attempt.plan, "b")
    assert folder is not None
    assert verify_files(folder, attempt.plan.manifest) == []
    assert {e["path"] for e in world.events("bad_copy")} == {"__1_0.distcp"}


def test_when_all_copies_of_a_file_are_bad_the_durable_tier_gives_it(world: World) -> None:
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    name = "step-00000010-g1"
    for node in NODES:
        path = world.fleet.root(node) / CHECKPOINTS_DIR / name / "__1_0.distcp"
        if path.exists():
            path.write_bytes(b"y" * path.stat().st_size)
    attempt = world.begin(NODES)
    folder = world.provided(attempt.plan, "a")
    assert folder is not None
    assert verify_files(folder, attempt.plan.manifest) == []


def test_nodes_that_do_not_give_a_checkpoint_back_are_passed_over_and_the_folder_is_read(
    world: World,
) -> None:
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    attempt = world.begin(NODES)
    assert attempt.plan.sources
    plan = world.tracker.not_gathered(world.generation, attempt.plan.name, "no answer")
    assert plan is not None
    assert plan.name == attempt.plan.name
    assert not plan.sources


def test_a_save_that_a_node_does_not_have_is_not_committed(world: World) -> None:
    world.begin(NODES)
    assert not world.save(10, places={"a": ["__0_0.distcp", ".metadata"]})
    assert not world.save(11, error="rank 2: disk full")
    world.fleet.kill("d")
    assert not world.save(12)
    assert len(world.events("save_failed")) == 3
    assert world.begin(["a", "b"]).plan is None


def test_a_broken_durable_tier_delays_itself_alone(world: World) -> None:
    world.begin(NODES)
    world.fleet.stuck = {(node, "promote") for node in NODES}
    for step in range(10, 60, 10):
        assert world.save(step)
        world.settle()
    assert not world.events("promote")
    assert len(world.events("replicated")) == 5
    world.fleet.stuck = set()
    world.settle()
    # The one that hung comes first; then the newest, not each that was missed.
    assert [e["step"] for e in world.events("promote")] == [10, 50]


def test_memory_keeps_the_newest_and_forgets_older_ones_once_newer_ones_are_proved(
    world: World,
) -> None:
    world.begin(NODES)
    for step in range(10, 80, 10):
        assert world.save(step)
        world.settle()
        held = {
            path.name
            for node in NODES
            for path in (world.fleet.root(node) / CHECKPOINTS_DIR).iterdir()
        }
        newest = checkpoint_name(step, 1)
        assert newest in held
        assert len(held) <= 3
    deleted = [e["tier"] for e in world.events("delete")]
    assert deleted
    assert set(deleted) == {"memory"}


def test_the_next_tracker_finds_what_the_nodes_hold(world: World) -> None:
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    assert world.save(15)
    world.settle()
    world.tracker = world.new_tracker()
    attempt = world.begin(["c", "d", "a", "b"])
    assert attempt.plan.name == "step-00000015-g1"
    assert attempt.generation == 2


def test_the_end_of_a_run_goes_to_the_durable_tier_whatever_the_interval_says(world: World) -> None:
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    assert world.save(12)
    world.settle()
    assert not world.durable("step-00000012-g1")
    for _ in range(9):
        problem = world.tracker.durable(world.generation, 12)
    assert problem == ""
    assert world.durable("step-00000012-g1")
    world.tracker.finished(world.generation, 12)
    assert not world.fleet.holders


def test_three_tiers_and_the_middle_one_alone_survives(tmp_path: Path) -> None:
    stack = Stack(use=("memory", "local", "durable"), local_folder="/nowhere", replicas=1)
    world = World(tmp_path, stack, {"local": 5, "durable": 1000})
    world.begin(["a", "b"])
    assert world.save(10)
    world.settle()
    assert world.save(15)
    world.settle()
    tiers = [(e["step"], e["tier"]) for e in world.events("promote")]
    assert (15, "local") in tiers
    assert (15, "durable") not in tiers
    # A reboot of all nodes: memory is gone, disks are not.
    for node in ["a", "b"]:
        world.fleet.holders[node].forget("memory", world.generation)
    attempt = world.begin(["a", "b"])
    assert attempt.plan.name == "step-00000015-g1"
    folder = world.provided(attempt.plan, "a")
    assert folder is not None
    assert verify_files(folder, attempt.plan.manifest) == []


@settings(max_examples=30)
@given(
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(1, 4),
)
def test_replicas_are_on_other_nodes_each_once_and_other_domains_come_first(
    num_nodes: int, replicas: int, num_domains: int
) -> None:
    nodes = [f"n{i}" for i in range(num_nodes)]
    domains = {node: f"zone{i % num_domains}" for i, node in enumerate(nodes)}
    kept = dict.fromkeys(nodes, 0)
    for node in nodes:
        chosen = replica_nodes(node, nodes, replicas, domains)
        assert node not in chosen
        assert len(set(chosen)) == len(chosen)
        assert len(chosen) == min(replicas, num_nodes - 1)
        reached = {domains[other] for other in chosen} | {domains[node]}
        assert len(reached) == min(len(chosen) + 1, len(set(domains.values())))
        for other in replica_nodes(node, nodes, replicas):
            kept[other] += 1
    # Without domains each node keeps as much for others as others keep for it.
    assert len(set(kept.values())) == 1
