"""Tiers on the nodes under faults, each of one kind: what a fault in one place must not do to the rest."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.checkpoint.manifest import FileEntry, Manifest, read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.verify import Fault, verify_files
from ray_ckpt.errors import CutOffError, StaleGenerationError, StorageError
from ray_ckpt.fault_points import arm
from ray_ckpt.tiers.depot import Depot
from ray_ckpt.tiers.durable import DurableFolder
from ray_ckpt.tiers.fence import FENCE_NAME, Fence
from ray_ckpt.tiers.holder import Inventory
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tiers.throttle import Throttle
from ray_ckpt.tracker.aside import Thread
from ray_ckpt.tracker.copies import CopyBook
from ray_ckpt.tracker.drops import Drops
from ray_ckpt.tracker.health import ANSWER_S, ASK_AFTER_S, Health
from tests.fleet import LocalFleet
from tests.tier_world import NODES, World

pytestmark = pytest.mark.usefixtures("quick_disk")

MEMORY = Stack(use=("memory", "durable"), replicas=2)
THREE = Stack(use=("memory", "local", "durable"), local_folder="/of/each/node", replicas=1)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, MEMORY, {"durable": 20})
    yield made
    arm("")
    made.fleet.close(drop_memory=False, generation=made.generation)


def committed(world: World, step: int) -> str:
    assert world.save(step)
    world.settle()
    return checkpoint_name(step, world.generation)


def held(world: World, node: str, tier: str = "memory") -> set[str]:
    folder = world.fleet.root(node, tier) / CHECKPOINTS_DIR
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# ---- trackers and holders that die -----------------------------------------------------------------


def test_workers_whose_tracker_died_can_go_on_saving(world: World) -> None:
    world.begin(NODES)
    committed(world, 10)
    for node in NODES:
        world.fleet.renew(node)  # holders end with the tracker that they belong to
    world.tracker = world.new_tracker()
    assert world.save(15)
    world.settle()
    assert world.events("replicated")[-1]["step"] == 15


def test_a_holder_that_died_costs_one_save_and_not_all_that_follow(world: World) -> None:
    world.begin(NODES)
    committed(world, 10)
    world.fleet.renew("b")
    assert not world.save(15)
    world.settle()
    assert committed(world, 20) == "step-00000020-g1"
    # What the dead holder held counts, and what it was to drop is dropped.
    assert "step-00000010-g1" in held(world, "b")
    assert "step-00000015-g1" not in held(world, "b")


def test_a_commit_that_is_asked_for_again_by_the_next_tracker_is_the_same_commit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker dies when the nodes have committed, and the journal does not know."""
    world.begin(NODES)

    class Killed(BaseException):
        pass

    def die(event: str, **fields: Any) -> None:
        raise Killed

    monkeypatch.setattr(world.tracker._saves, "_record", die)
    with pytest.raises(Killed):
        world.save(10)
    world.tracker = world.new_tracker()
    assert world.save(10)
    assert [e["step"] for e in world.events("commit")] == [10]
    assert not world.events("save_failed")


def test_what_is_to_be_kept_once_it_is_durable_outlives_the_tracker(world: World) -> None:
    world.begin(NODES)
    world.fleet.stuck = {(node, "promote") for node in NODES}
    committed(world, 10)
    world.tracker._places.keep("step-00000010-g1", "the way back")
    committed(world, 15)
    world.fleet.stuck = set()
    world.tracker = world.new_tracker()
    world.settle()
    assert world.durable("step-00000010-g1")
    assert [(e["name"], e["reason"]) for e in world.events("pin")] == [
        ("step-00000010-g1", "the way back")
    ]
    assert world.tracker.memory.to_keep == {}


def test_what_must_become_durable_does_although_a_newer_one_got_there_first(world: World) -> None:
    world.begin(NODES)
    committed(world, 10)
    world.fleet.stuck = {(node, "promote") for node in NODES}
    committed(world, 15)
    committed(world, 40)  # it is due, and under way
    world.tracker._places.keep("step-00000015-g1", "the way back")
    world.fleet.stuck = set()
    committed(world, 45)
    assert world.durable("step-00000040-g1")
    assert world.durable("step-00000015-g1")
    assert world.events("pin")[-1]["name"] == "step-00000015-g1"


def test_what_must_become_durable_stays_in_memory_until_it_is(world: World) -> None:
    world.begin(NODES)
    committed(world, 10)
    world.fleet.stuck = {(node, "promote") for node in NODES}
    committed(world, 15)
    world.tracker._places.keep("step-00000015-g1", "the way back")
    for step in (40, 45, 50, 55):  # memory has room for two
        committed(world, step)
    assert "step-00000015-g1" in held(world, "a")
    world.fleet.stuck = set()
    world.settle()
    assert world.durable("step-00000015-g1")


def test_a_holder_that_hangs_is_replaced_and_one_that_is_slow_is_not(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path / "nodes", MEMORY, tmp_path / "run")
    fleet.gather(["a", "b"])
    fleet.stuck = {("a", "promote"), ("b", "promote"), ("b", "alive")}
    health, before, now_s, hung = Health(fleet), dict(fleet.holders), 0.0, list[str]()
    while now_s < 4 * (ASK_AFTER_S + ANSWER_S) and not hung:
        hung = health.look(["a", "b"], now_s)
        now_s += 5.0
    assert hung == ["b"]
    assert now_s <= ASK_AFTER_S + ANSWER_S + 10
    assert "b" not in fleet.holders
    assert fleet.holders["a"] is before["a"]
    assert fleet.mend(["a", "b"]) == ["b"]
    assert health.look([], now_s) == []
    fleet.close(drop_memory=False, generation=0)


def test_a_node_whose_holder_hangs_gets_another_one_and_copies_go_on(world: World) -> None:
    world.begin(NODES)
    now_s = [0.0]
    desk = world.tracker._places.desk  # type: ignore[attr-defined]
    desk._clock = lambda: now_s[0]
    world.fleet.stuck = {("c", "verify"), ("c", "replicate"), ("c", "alive")}
    assert world.save(10)
    first = world.fleet.holders["c"]
    for _ in range(40):
        now_s[0] += 5.0
        world.tracker.advance()
        if world.fleet.holders.get("c") is not first:
            world.fleet.stuck = set()
    assert any("does not answer" in e["problem"] for e in world.events("alert"))
    assert [(e["step"], e["copies"]) for e in world.events("replicated")] == [(10, 3)]


def test_a_drop_is_asked_for_until_it_is_done_and_a_commit_of_the_name_waits_for_it(
    tmp_path: Path,
) -> None:
    fleet = LocalFleet(tmp_path / "nodes", MEMORY, tmp_path / "run")
    fleet.gather(["a"])
    now_s = [0.0]
    drops = Drops(fleet, lambda: 1, lambda: now_s[0])
    folder = fleet.root("a") / CHECKPOINTS_DIR / "step-00000010-g1"
    folder.mkdir(parents=True)
    arm("depot.drop=eio")
    drops.start("a", "memory", folder.name)
    drops.advance(["a"])
    assert folder.exists()
    assert "still has to delete" in drops.in_the_way(folder.name)
    now_s[0] = 60.0
    drops.advance(["a"])
    assert not folder.exists()
    drops.advance(["a"])
    assert drops.in_the_way(folder.name) == ""
    fleet.stuck = {("a", "drop")}
    drops.start("a", "memory", folder.name)
    assert drops.in_the_way(folder.name)
    assert drops.owing == {"a"}
    drops.clear()
    drops.advance([])
    arm("")
    fleet.close(drop_memory=False, generation=1)


def test_a_dead_holder_does_not_make_a_restore_fall_back_to_an_older_one(world: World) -> None:
    world.begin(NODES)
    committed(world, 10)
    assert world.save(15)  # no replicas yet
    attempt = world.begin(NODES)
    world.fleet.renew("b")
    name = attempt.plan.name
    assert world.provided(attempt.plan, "a") is None
    plan = world.tracker.not_gathered(world.generation, name, "the holder of b is gone")
    assert plan is not None
    assert plan.name == name == "step-00000015-g1"
    assert plan.sources
    folder = world.provided(plan, "a")
    assert folder is not None
    assert verify_files(folder, plan.manifest) == []
    assert not world.events("bad_copy"), "a node that was not reached has no bad copy"


# ---- the past ---------------------------------------------------------------------------------------


def test_calls_of_attempts_that_are_over_change_nothing(world: World) -> None:
    world.begin(NODES)
    name = committed(world, 10)
    manifest = read_manifest(world.fleet.root("a") / CHECKPOINTS_DIR / name)
    entry = manifest.files[0]
    world.begin(NODES)
    zombie = world.fleet.holders["a"]
    # Another process on the same folder knows no more than the folder does.
    world.fleet.renew("a")
    world.fleet.gather(["a"])
    before = _listing(world.base)
    for holder in (zombie, world.fleet.holders["a"]):
        for method, arguments in {
            "commit": ("memory", manifest, [entry.path]),
            "verify": ("memory", name, [entry.path]),
            "replicate": (manifest, {}, "memory"),
            "promote": (manifest, [entry.path], "durable"),
            "provide": (manifest, {}),
            "has": ("memory", name, entry),
            "drop": ("memory", name),
            "forget": ("memory",),
            "sweep": ([],),
        }.items():
            with pytest.raises(StaleGenerationError, match="attempt 2 has taken its place"):
                getattr(holder, method)(*arguments, generation=1)
    assert _listing(world.base) == before


def test_every_call_of_a_holder_that_changes_something_names_its_attempt() -> None:
    import inspect

    from ray_ckpt.tiers.holder import Holder

    free = {"address", "first", "alive", "inventory", "close"}
    for name, method in vars(Holder).items():
        if not name.startswith("_") and name not in free:
            assert "generation" in inspect.signature(method).parameters, name


def test_a_copy_that_was_under_way_when_its_attempt_ended_is_not_committed(world: World) -> None:
    world.begin(["a", "b"])
    assert world.save(10)
    name = "step-00000010-g1"
    manifest = read_manifest(world.fleet.root("a") / CHECKPOINTS_DIR / name)
    sources = world.tracker._places.desk.sources(name)  # type: ignore[attr-defined]
    pulls = {path: each for path, each in sources.items() if each[0].place.node == "a"}
    world.fleet.gather(["c"])
    target = world.fleet.holders["c"]
    real = target._pull

    def frozen(*arguments: Any) -> None:
        real(*arguments)
        Fence(world.fleet.root("c")).check(2)  # meanwhile another attempt began

    target._pull = frozen  # type: ignore[method-assign]
    report = target.replicate(manifest, pulls, "memory", generation=1)
    assert not report.done
    assert all("attempt 2 has taken its place" in text for text in report.problems.values())
    assert not (world.fleet.root("c") / CHECKPOINTS_DIR / name / MANIFEST_NAME).exists()


def test_a_fence_never_goes_back_whatever_happens_to_its_note(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "root")
    for generation in (1, 3, 12):
        fence.check(generation)
    assert Fence(tmp_path / "root").newest == 12
    (tmp_path / "root" / FENCE_NAME).write_bytes(b"\0garbage")
    with pytest.raises(StaleGenerationError):
        fence.check(11)
    assert Fence(tmp_path / "root").newest == 0  # a damaged note is none
    fence.check(13)
    assert Fence(tmp_path / "root").newest == 13


def test_a_run_that_has_lost_its_journal_is_not_locked_out_by_its_own_nodes(world: World) -> None:
    for _ in range(3):
        world.begin(NODES)
    assert world.generation == 3
    for path in world.run_dir.iterdir():
        if path.is_file():
            path.unlink()
    world.tracker = world.new_tracker()
    world.begin(NODES)
    assert world.generation == 4
    assert world.save(10)


def test_a_tracker_that_was_replaced_moves_nothing_any_more(world: World) -> None:
    world.begin(NODES)
    assert world.save(10)
    zombie = world.tracker
    world.tracker = world.new_tracker()
    world.begin(NODES)
    before = _listing(world.base)
    for _ in range(10):
        zombie.advance()
    assert zombie._places._seal(zombie._places.desk.known("step-00000010-g1")) is not None  # type: ignore[attr-defined]
    assert _listing(world.base) == before


# ---- copies that are not what they seem -------------------------------------------------------------


def test_a_copy_that_cannot_be_read_now_is_not_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.begin(NODES)
    name = committed(world, 10)
    path = world.fleet.root("b") / CHECKPOINTS_DIR / name / "__1_0.distcp"
    manifest = read_manifest(path.parent)
    entry = next(entry for entry in manifest.files if entry.path == path.name)

    def failing(*arguments: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("ray_ckpt.checkpoint.verify.hash_file", failing)
        assert not world.fleet.holders["b"].has("memory", name, entry, 1)
        report = world.fleet.holders["b"].verify("memory", name, [path.name], 1)
        assert report.problems
        assert not report.bad
    assert path.exists()
    assert world.fleet.holders["b"].has("memory", name, entry, 1)
    path.write_bytes(b"x" * entry.bytes)
    assert not world.fleet.holders["b"].has("memory", name, entry, 1)
    assert not path.exists()


def test_a_file_that_vanished_is_found_when_its_node_reads_back(tmp_path: Path) -> None:
    world = World(tmp_path, Stack(use=("memory", "durable"), replicas=0), {"durable": 20})
    world.begin(NODES)
    world.fleet.stuck = {(node, "promote") for node in NODES}  # nobody else looks
    assert world.save(10)
    (world.fleet.root("b") / CHECKPOINTS_DIR / "step-00000010-g1" / "__1_0.distcp").unlink()
    world.settle()
    assert {e["path"] for e in world.events("bad_copy")} == {"__1_0.distcp"}
    assert not world.events("replicated")
    assert world.begin(NODES).plan is None
    world.fleet.close(drop_memory=False, generation=2)


@pytest.mark.parametrize("first", [True, False])
def test_one_node_with_another_or_a_bad_manifest_spoils_nothing(world: World, first: bool) -> None:
    world.begin(NODES)
    name = committed(world, 10)
    node = "a" if first else "d"
    place = world.fleet.root(node) / CHECKPOINTS_DIR / name / MANIFEST_NAME
    good = place.read_bytes()
    other = next(each for each in NODES if each != node)
    place.unlink()
    manifest = read_manifest(world.fleet.root(other) / CHECKPOINTS_DIR / name)
    from dataclasses import replace

    from ray_ckpt.checkpoint.manifest import write_manifest

    write_manifest(place.parent, replace(manifest, committed_at=1.0))
    attempt = world.begin(NODES)
    assert attempt.plan.manifest == manifest
    folder = world.provided(attempt.plan, node)
    assert folder is not None
    assert read_manifest(folder) == manifest
    place.write_bytes(good[:-9])
    attempt = world.begin(NODES)
    assert world.provided(attempt.plan, node) is not None


def test_a_checkpoint_whose_durable_copy_is_bad_is_not_put_there_again_and_the_next_goes_at_once(
    world: World,
) -> None:
    world.begin(NODES)
    name = committed(world, 10)
    plan = world.begin(NODES).plan
    again = world.tracker.reject(
        world.generation, name, [Fault("__0_0.distcp", "checksum differs")]
    )
    assert again is not None
    assert again.sources, "what the nodes have is good"
    world.tracker.restored(world.generation, plan.manifest.step, 0.1, name, "r")
    world.settle()
    assert [e["step"] for e in world.events("promote")] == [10]
    assert committed(world, 12)
    assert [e["step"] for e in world.events("promote")] == [10, 12], (
        "it is due: nothing good is there"
    )


def test_a_restore_from_nodes_is_no_proof_of_the_durable_copy(world: World) -> None:
    world.begin(NODES)
    name = committed(world, 10)
    plan = world.begin(NODES).plan
    assert plan.sources
    world.tracker.memory.verified.clear()
    world.tracker.restored(world.generation, 10, 0.1, name, "r")
    assert name not in world.tracker.memory.verified


def test_a_copy_that_breaks_off_is_no_evidence_against_its_source(world: World) -> None:
    world.begin(NODES)
    assert world.save(10)
    arm("wire.receive@1+=eio")
    world.settle()
    arm("")
    assert not world.events("bad_copy")
    assert issubclass(CutOffError, StorageError)


# ---- space, and the lack of it ------------------------------------------------------------------------


def test_a_long_attempt_does_not_grow(world: World) -> None:
    world.begin(["a", "b"])
    sizes = []
    for step in range(1, 41):
        committed(world, step)
        desk = world.tracker._places.desk  # type: ignore[attr-defined]
        book, state = desk._book, desk._state
        sizes.append(
            sum(
                len(each)
                for each in (
                    book._manifests, book._copies, state.verified, state.settled, state.forced,
                    state.given_up, state.unproved, desk._evidence._waiting, desk._copying.transfers,
                    desk._holders._late, desk._holders._greeted,
                    desk._drops._tickets, desk._drops._waiting,
                )
            )
        )  # fmt: skip
        assert len(held(world, "a")) <= 4
    assert max(sizes[20:]) <= max(sizes[:20])


def test_an_older_one_with_replicas_stays_until_a_newer_one_has_them(tmp_path: Path) -> None:
    stack = Stack(use=("memory", "durable"), replicas=2, memory_keep=1)
    world = World(tmp_path, stack, {"durable": 1000})
    world.begin(NODES)
    committed(world, 10)
    world.fleet.stuck = {(node, "replicate") for node in NODES}
    for step in (15, 20, 25):
        committed(world, step)
        holding = [node for node in NODES if "step-00000010-g1" in held(world, node)]
        assert holding == NODES, "any two of them may be lost"
    world.fleet.stuck = set()
    world.settle()
    assert held(world, "a") == {"step-00000025-g1"}, "what was skipped goes with it"
    world.fleet.close(drop_memory=False, generation=1)


def test_a_full_memory_fails_the_save_keeps_the_one_before_and_is_used_again(world: World) -> None:
    world.begin(NODES)
    committed(world, 10)
    assert not world.save(15, error="rank 1: the tier is full")
    assert all("step-00000015-g1" not in held(world, node) for node in NODES)
    arm("commit.temporary@1=enospc")  # of the manifest of one node
    assert not world.save(17)
    arm("")
    world.settle()
    assert all("step-00000017-g1" not in held(world, node) for node in NODES)
    assert committed(world, 20)
    assert world.begin(NODES).plan.name == "step-00000020-g1"


POINTS = [
    "depot.piece",
    "depot.name",
    "wire.send",
    "wire.receive",
    "durable.put",
    "durable.seal",
]


@pytest.mark.parametrize("error", ["eio", "enospc"])
@pytest.mark.parametrize("point", POINTS)
def test_a_disk_that_fails_at_any_write_of_a_copy_delays_that_tier_and_it_catches_up(
    tmp_path: Path, point: str, error: str
) -> None:
    world = World(tmp_path, THREE, {"local": 5, "durable": 10})
    desk = world.tracker._places.desk  # type: ignore[attr-defined]
    now_s = [0.0]
    desk._clock = lambda: now_s[0]
    world.begin(NODES)
    arm(f"{point}@1+={error}")
    for step in (10, 20, 30):
        assert world.save(step), "training and saving go on"
        for _ in range(12):
            now_s[0] += 10.0
            world.tracker.advance()
    assert world.events("promote_failed"), "it is told"
    arm("")
    for step in (40, 50):
        assert world.save(step)
        for _ in range(12):
            now_s[0] += 10.0
            world.tracker.advance()
    assert {(e["tier"], e["step"]) for e in world.events("promote")} >= {
        ("local", 50),
        ("durable", 50),
    }
    assert world.events("replicated")[-1]["step"] == 50
    assert world.durable("step-00000050-g1")
    assert world.begin(NODES).plan.name == "step-00000050-g1"
    for node in NODES:
        for tier in ("memory", "local"):
            assert len(held(world, node, tier)) <= 3
    world.fleet.close(drop_memory=False, generation=1)


class Slow(DurableFolder):
    """A durable tier that does not answer."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.go_on = threading.Event()

    def put(self, name: str, entry: FileEntry, source: Path, throttle: Throttle) -> None:
        assert self.go_on.wait(10)
        super().put(name, entry, source, throttle)


def test_a_durable_tier_that_hangs_does_not_hold_up_the_local_one(tmp_path: Path) -> None:
    world = World(tmp_path, THREE, {"local": 1, "durable": 1})
    world.begin(["a"])
    slow = Slow(world.run_dir)
    holder = world.fleet.holders["a"]
    holder._durable = slow
    assert world.save(10)
    manifest = read_manifest(world.fleet.root("a") / CHECKPOINTS_DIR / "step-00000010-g1")
    paths = [entry.path for entry in manifest.files]
    hanging = [
        threading.Thread(target=holder.promote, args=(manifest, paths, "durable", 1))
        for _ in range(3)
    ]
    for thread in hanging:
        thread.start()
    began_s = time.monotonic()
    report = holder.promote(manifest, paths, "local", generation=1)
    assert set(report.done) == set(paths)
    assert time.monotonic() - began_s < 5
    slow.go_on.set()
    for thread in hanging:
        thread.join(20)
    world.fleet.close(drop_memory=False, generation=1)


def test_a_commit_in_the_durable_tier_that_hangs_holds_up_neither_saves_nor_other_tiers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.begin(NODES)
    desk = world.tracker._places.desk  # type: ignore[attr-defined]
    desk._copying._aside, go_on = Thread("seal"), threading.Event()
    real = world.tracker._house.seal
    monkeypatch.setattr(world.tracker._house, "seal", lambda m: go_on.wait(20) and real(m))
    for step in (10, 15, 20):
        committed(world, step)
    assert [e["step"] for e in world.events("replicated")] == [10, 15, 20]
    assert not world.events("promote")
    go_on.set()
    desk._copying._aside.wait(20)
    world.settle()
    assert world.events("promote")[0]["step"] == 10
    assert world.durable("step-00000010-g1")


def test_the_end_of_a_run_leaves_in_memory_what_is_nowhere_else(world: World) -> None:
    world.begin(NODES)
    world.fleet.stuck = {(node, "promote") for node in NODES}
    name = committed(world, 10)
    world.tracker.finished(world.generation, 10)
    assert name in held(world, "a")
    assert any(name == e["name"] for e in world.events("alert"))


def test_what_lies_where_a_former_attempt_had_workers_is_found_by_the_next_tracker(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Stack(use=("memory", "durable"), replicas=0), {"durable": 1000})
    world.begin(NODES)
    committed(world, 10)
    committed(world, 15)
    world.tracker.interruption("worker_error", "a worker died", group="g1")
    for node in NODES:
        world.fleet.renew(node)
    world.tracker = world.new_tracker()
    assert not world.fleet.holders, "no attempt is open that goes on"
    assert world.begin(["a", "b"]).plan.name == "step-00000015-g1"
    world.fleet.close(drop_memory=False, generation=2)


def test_parts_whose_rest_is_lost_go_when_the_run_has_gone_on_without_them(world: World) -> None:
    world.begin(NODES)
    committed(world, 10)
    assert world.save(15)  # no replicas yet
    world.fleet.kill("b")
    attempt = world.begin(["a", "c", "d"])
    assert attempt.plan.name == "step-00000010-g1"
    assert "step-00000015-g1" in held(world, "a")
    world.tracker.restored(world.generation, 10, 0.1, attempt.plan.name, "r")
    world.settle()
    assert all("step-00000015-g1" not in held(world, node) for node in ("a", "c", "d"))


def test_of_two_manifests_the_one_that_makes_a_checkpoint_whole_counts(tmp_path: Path) -> None:
    """Whatever the nodes are called."""
    from dataclasses import replace

    from making import manifest_of

    files = tuple(FileEntry(path, 1, f"{number:032x}") for number, path in enumerate("xy"))
    good = manifest_of(run="demo", step=10, files=files)
    odd = replace(good, committed_at=2e9)
    for odd_one in "ab":
        nodes: dict[str, Inventory] = {}
        for node, path in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")):
            depot = Depot(tmp_path / f"{odd_one}{node}", sync=False)
            manifest: Manifest = odd if node == odd_one else good
            folder = depot.folder(good.name)
            folder.mkdir(parents=True)
            (folder / path).write_bytes(b"1")
            assert depot.keep(manifest, [path]) is None
            nodes[node] = Inventory(
                address=("", 1), identity=node, holdings={"memory": tuple(depot.inventory())}
            )
        book = CopyBook(tmp_path)
        assert len(book.take(nodes)) == 1
        assert book.manifest(good.name) == good
        assert book.complete(good.name)


def _listing(base: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(base)): path.read_bytes()
        for path in sorted(base.rglob("*"))
        if path.is_file() and path.name != FENCE_NAME and "janitor" not in path.name
    }
