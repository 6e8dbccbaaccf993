"""Trackers, holders and whole nodes that are killed anywhere in a commit, a copy or a drop, again and again.

Real processes, real sockets, real files, and other nodes each time; no Ray and no torch.distributed, so that a life of
a run is tenths of a second and hundreds of them can be killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from holding import Nodes, ProcessFleet, flip

from ray_ckpt.checkpoint.manifest import read_manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR, checkpoint_name
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.errors import StorageError
from ray_ckpt.fault_points import arm
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.policy.loops import LoopRule
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stack import Stack
from ray_ckpt.tracker.core import RunFacts, TrackerCore, TrackerOptions
from ray_ckpt.tracker.journal import JOURNAL_NAME, read_lines

pytestmark = pytest.mark.dist

REPLICAS, KEEP = 2, 2
MEMORY = Stack(use=("memory", "durable"), replicas=REPLICAS, memory_keep=KEEP, pause_s=0.01)
THREE = Stack(
    use=("memory", "local", "durable"),
    local_folder="/of/each/node",
    replicas=REPLICAS,
    memory_keep=KEEP,
    local_keep=KEEP,
    pause_s=0.01,
)

OF_TRACKER = [
    "desk.commit", "desk.committed", "desk.arrived", "desk.drop", "durable.seal", "durable.sealed", "commit.check",
    "commit.temporary", "commit.rename", "commit.renamed", "commit.placed", "commit.told", "journal.line",
    "journal.sync", "attempt.begin", "attempt.begun",
]  # fmt: skip
OF_HOLDER = [
    "holder.commit", "holder.committed", "holder.copied", "holder.provided", "depot.piece", "depot.name",
    "depot.named", "depot.drop", "depot.dropped", "wire.send", "wire.receive", "durable.put", "commit.temporary",
    "commit.rename", "commit.renamed",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill takes nothing from the page cache: only a power cut would, which no test can make."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Life:
    """One life of a tracker, and what the workers of its attempts do meanwhile.

    Args:
        nodes: the machines.
        pipe: where it is told what was promised.
        seed: of what happens.
        faults: of the tracker.
        of_node: node to the faults of its holder.
    """

    def __init__(
        self, nodes: Nodes, pipe: int, seed: str, faults: str, of_node: dict[str, str]
    ) -> None:
        self.nodes, self._pipe, self.chance = nodes, pipe, random.Random(seed)
        arm(faults)
        self.fleet = ProcessFleet(nodes, of_node)
        facts = RunFacts(
            run="demo",
            run_dir=str(nodes.run_dir),
            config_fingerprint="c",
            data_fingerprint="d",
            parallel="ddp",
            versions={},
        )
        options = TrackerOptions(
            limits=IntervalLimits(),
            prior_mtbf_s=3600.0,
            stack=nodes.stack,
            tier_steps={"local": 2, "durable": 5},
            retention=Rules(keep_newest=2, keep_every_s=0),
            max_fruitless=1000,
            loops=LoopRule(tries=1000),  # holders are killed, which says nothing of what they hold
        )
        self.core = TrackerCore(facts, options, fleet=self.fleet)
        self.settled = 0  # newest step with all its replicas

    def tell(self, **what: Any) -> None:
        os.write(self._pipe, json.dumps(what).encode() + b"\n")

    # ---- what workers do ---------------------------------------------------------------------------

    def go_on(self, generation: int, used: list[str], step: int, saves: int) -> None:
        """Workers whose tracker was killed: the last save is asked for again, and then come others."""
        self.generation, self.used, self.step = generation, used, step
        self.save(again=True)
        self.saves(saves)

    def begin(self, used: list[str]) -> None:
        """A worker group takes up the run."""
        before = self.nodes.recoverable()
        attempt = self.core.begin_attempt(len(used), used)
        self.generation, self.used, plan = attempt.generation, used, attempt.plan
        self.tell(generation=self.generation, nodes=used)
        while plan is not None:
            if not plan.sources:
                folder = self.nodes.run_dir / CHECKPOINTS_DIR / plan.name
                if not (faults := verify_files(folder, read_manifest(folder))):
                    break
                plan = self.core.reject(self.generation, plan.name, faults)
                continue
            problem, damaged = self._provided(plan)
            if not problem:
                break
            plan = self.core.not_gathered(self.generation, plan.name, problem, damaged)
        self.step = plan.manifest.step if plan else 0
        best = max(before.values(), default=0)
        assert plan is None or plan.name in before, f"{plan.name} is offered, and is not whole"
        assert self.step == best, f"step {self.step} is restored, and {best} is there"
        self.core.segment_at(
            self.generation,
            self.step,
            self.step,
            dict(plan.manifest.segment) if plan else None,
            plan.name if plan else "",
        )
        self.core.restored(self.generation, self.step, 0.1, plan.name if plan else "", "r")
        self.tell(restored=self.step)

    def _provided(self, plan: Any) -> tuple[str, tuple[str, ...]]:
        """Each worker asks the holder of its node; one that is gone has gone before the attempt began or after."""
        problem, damaged = "", set[str]()
        for node in self.used:
            try:
                ticket = self.fleet.post(
                    node,
                    "provide",
                    manifest=plan.manifest,
                    sources=plan.sources,
                    generation=self.generation,
                )
                done, report = self.fleet.take(ticket, 20.0)
                assert done, "a holder hangs"
            except StorageError as error:
                problem = str(error)
                continue
            if report.bad:
                self.core.bad_copies(self.generation, plan.name, list(report.bad))
            damaged |= set(report.damaged)
            for path, text in report.problems.items():
                problem = f"{path}: {text}"
            if not report.problems:
                folder = (
                    self.nodes.root(node, self.nodes.stack.use[0]) / CHECKPOINTS_DIR / plan.name
                )
                assert verify_files(folder, plan.manifest) == [], "bad bytes are served"
        return problem, tuple(sorted(damaged))

    def save(self, *, again: bool = False) -> bool:
        if not again:
            self.step += 1
        self.tell(step=self.step)
        save = self.nodes.write(self.used, self.step, self.generation)
        done = self.core.commit(self.generation, save)
        if done:
            self.tell(commit=self.step)
        return done

    def saves(self, count: int) -> None:
        for _ in range(count):
            self.save()
            for _ in range(self.chance.choice([0, 1, 3, 30])):
                self.look()

    def look(self) -> None:
        self.core.advance()
        time.sleep(0.001)

    def settle(self, step: int) -> None:
        """Until all replicas of a step are there, and it is durable if it is due."""
        name = checkpoint_name(step, self.generation)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self.look()
            desk = self.core._places.desk  # type: ignore[attr-defined]
            if (
                name in desk._state.settled
                and not desk._copying.transfers
                and not desk._drops.owing
            ):
                return
        raise AssertionError(f"{name} does not get its replicas: {desk._copying.transfers}")

    def settle_anything(self) -> None:
        """Until nothing is under way."""
        deadline = time.monotonic() + 30
        desk = self.core._places.desk  # type: ignore[attr-defined]
        while time.monotonic() < deadline:
            self.look()
            if not desk._copying.transfers and not desk._drops.owing and not desk._holders._greeted:
                return
        raise AssertionError(f"it does not come to rest: {desk._copying.transfers}")

    def lose(self, lost: list[str]) -> None:
        """Nodes die at once, and the attempt with them."""
        for node in lost:
            self.fleet.renew(node)
            self.nodes.lose(node)
        self.core.interruption("node_loss", f"{lost} died", group=f"g{self.generation}")


class WorkerError(Exception):
    """A worker fails, for a reason that is nobody's fault here."""


class Story:
    """A run through many lives, on machines that come and go."""

    def __init__(self, base: Path, stack: Stack, seed: int) -> None:
        self.nodes, self.chance, self.seed = Nodes(base, stack), random.Random(seed), seed
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.count, self.lives, self.codes = 0, 0, Counter[int]()
        self.generation, self.used, self.step, self.promised = 0, list[str](), 0, 0
        self.replaced = 0  # holders that were killed, and others took their place
        self.has_workers = False  # of the newest attempt, which go on when their tracker is killed
        self.fresh(5)

    def fresh(self, wanted: int) -> None:
        """As many machines as are wanted, new ones among them."""
        (self.nodes.base / "nodes").mkdir(exist_ok=True)
        for _ in range(wanted - len(self.nodes.alive())):
            self.nodes.boot(f"n{self.count:03d}")
            self.count += 1

    def live(
        self, faults: str = "", of_node: dict[str, str] | None = None, *, on: bool = False
    ) -> int:
        """A life with faults.

        Args:
            faults: of the tracker.
            of_node: of holders.
            on: whether the workers of the last life live, and go on.
        """
        self.lives += 1
        seed, used = f"{self.seed} {self.lives}", self.pick()
        going = (self.generation, self.used, self.step) if on and self.has_workers else None
        self.has_workers = going is not None

        def life() -> None:
            me = Life(self.nodes, self.writer, seed, faults, of_node or {})
            try:
                if going and all(map(self.nodes.lives, going[1])):
                    me.go_on(*going, saves=4)
                else:
                    me.begin(used)
                    me.saves(8)
                me.tell(replaced=me.fleet.started - len(me.fleet.children))
            except WorkerError:
                me.core.interruption("worker_error", "a holder died", group=f"g{me.generation}")

        code = in_child(life)
        self.codes[code] += 1
        self.check(faults or str(of_node))
        return code

    def pick(self) -> list[str]:
        alive = self.nodes.alive()
        return self.chance.sample(alive, self.chance.randint(2, len(alive)))

    def check(self, what: str) -> None:
        """What must hold whenever a life ends, however it does."""
        for told in self.told():
            if "generation" in told:
                assert told["generation"] > self.generation, f"{what}: given out twice"
                self.generation, self.used = told["generation"], told["nodes"]
                self.has_workers = False
            self.step = told.get("step", self.step)
            self.replaced += told.get("replaced", 0)
            if "lost" in told:  # more than there were replicas for, so less may be there
                self.promised = min(self.promised, told["left"])
            if "restored" in told:
                assert told["restored"] >= self.promised, f"{what}: a commit is lost"
                self.step = self.promised = told["restored"]
                self.has_workers = True
            self.promised = max(self.promised, told.get("commit", 0))
        there = self.nodes.recoverable()
        best = max(there.values(), default=0)
        assert best >= self.promised, f"{what}: step {self.promised} was committed and is lost"
        self.promised = best  # a commit that nobody was told of counts as well

    def told(self) -> list[dict[str, Any]]:
        text = b""
        try:
            while data := os.read(self.reader, 1 << 16):
                text += data
        except BlockingIOError:
            pass
        return [json.loads(line) for line in text.splitlines()]

    def end(self) -> None:
        """A life without a fault gets on, and leaves no more than is to be kept."""

        def life() -> None:
            me = Life(self.nodes, self.writer, f"{self.seed} end", "", {})
            me.begin(self.nodes.alive())
            for _ in range(4):
                assert me.save()
                me.settle(me.step)
            me.settle(me.step)
            desk = me.core._places.desk  # type: ignore[attr-defined]
            assert len(desk._book.names()) <= 2 * KEEP + 3
            assert len(desk._state.verified) <= 2 * len(desk._book.names())
            assert not desk._drops._waiting

        assert in_child(life) == 0
        self.check("the end")
        for node in self.nodes.alive():
            for root in self.nodes.roots(node):
                held = [path.name for path in (root / CHECKPOINTS_DIR).glob("*")]
                assert len(held) <= KEEP + 2, f"{root} is not cleared: {held}"
                left = [path for path in root.rglob("*") if path.name.endswith(".copying")]
                assert left == [], "broken-off copies are not cleared"
        events = list(read_lines(self.nodes.run_dir / JOURNAL_NAME))
        generations = [event["generation"] for event in events]
        assert generations == sorted(generations)
        os.close(self.reader)
        os.close(self.writer)


def in_child(action: Any) -> int:
    """Exit code of a child that does something; minus the signal that ended it."""
    child = os.fork()
    if not child:
        code = 4
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - told, and the child ends
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("a life does not end")
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


STACKS = pytest.mark.parametrize("stack", [MEMORY, THREE], ids=["memory", "local"])


def seeds(few: int, many: int) -> Any:
    """A few runs by default, and many where there is time for them."""
    slow = pytest.param(range(few, many), marks=pytest.mark.slow, id="many")
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), slow])


@STACKS
@seeds(2, 30)
def test_trackers_and_holders_killed_anywhere_lose_no_commit(
    tmp_path: Path, stack: Stack, seeds: range
) -> None:
    codes, replaced, lives = Counter[int](), 0, 9
    for seed in seeds:
        story, on = Story(tmp_path / str(seed), stack, seed), False
        for _ in range(lives):
            faults, of_node = "", {}
            chance = story.chance
            if chance.random() < 0.5:
                faults = f"{chance.choice(OF_TRACKER)}@{chance.randint(1, 3)}=kill"
            else:
                for node in chance.sample(story.nodes.alive(), chance.randint(1, 3)):
                    of_node[node] = f"{chance.choice(OF_HOLDER)}@{chance.randint(1, 4)}=kill"
            code = story.live(faults, of_node, on=on)
            assert code in (0, -signal.SIGKILL), f"{faults} {of_node}: exit code {code}"
            on = code != 0 and chance.random() < 0.5
            story.fresh(chance.randint(4, 6))
        story.end()
        codes += story.codes
        replaced += story.replaced
    print(
        f"lives by how they ended: {dict(codes)}, and {replaced} holders were killed in those that went on"
    )
    assert codes[-signal.SIGKILL] > len(seeds)
    assert replaced > len(seeds)


@STACKS
@seeds(3, 40)
def test_as_many_nodes_as_replicas_lost_at_once_lose_nothing_that_has_them(
    tmp_path: Path, stack: Stack, seeds: range
) -> None:
    lost_nodes = 0
    for seed in seeds:
        story = Story(tmp_path / str(seed), stack, seed)
        for number in range(4):
            used, seed_of_life = story.pick(), f"{seed} {number}"

            def life(used: list[str] = used, seed: str = seed_of_life, story: Any = story) -> None:
                me = Life(story.nodes, story.writer, seed, "", {})
                me.begin(used)
                me.saves(me.chance.randint(1, 4))
                me.save()
                me.settle(safe := me.step)
                me.saves(me.chance.randint(0, 2))
                holding = sorted(me.fleet.children)
                copies = min(REPLICAS, len(holding) - 1)
                me.lose(lost := me.chance.sample(holding, copies))
                left = max(story.nodes.recoverable().values(), default=0)
                assert left >= safe, f"step {safe} had {copies} replicas, and is lost with {lost}"
                me.tell(lost=lost, left=left)
                if me.chance.random() < 0.5:  # the same tracker goes on, or the next one
                    me.begin(story.nodes.alive())
                    me.saves(2)

            code = in_child(life)
            assert code == 0
            story.check(f"life {number}")
            lost_nodes += 6 - len(story.nodes.alive())
            story.fresh(6)
        story.end()
    assert lost_nodes > len(seeds)


@STACKS
@seeds(3, 40)
def test_bad_bytes_anywhere_are_never_served_and_the_next_good_copy_is(
    tmp_path: Path, stack: Stack, seeds: range
) -> None:
    """Begin() compares what each worker gets, and which checkpoint, with what is good on the disks."""
    hit = Counter[str]()
    for seed in seeds:
        story = Story(tmp_path / str(seed), stack, seed)
        for _ in range(6):
            assert story.live() == 0
            name = max(there := story.nodes.recoverable(), key=lambda name: there[name])
            files = story.nodes.copies(name)
            kind = story.chance.choice(["one", "nodes", "file", "reboot", "manifest"])
            victim = story.chance.choice(files).name
            same = [path for path in files if path.name == victim]
            if kind == "one":
                flip(story.chance.choice(same), story.chance)
            elif kind == "nodes":
                for path in same:
                    if story.nodes.run_dir not in path.parents:
                        flip(path, story.chance)
            elif kind == "file":
                for path in same:
                    flip(path, story.chance)
            elif kind == "manifest":
                manifests = {path.with_name("COMMITTED.json") for path in files}
                flip(story.chance.choice(sorted(filter(Path.exists, manifests))), story.chance)
            else:
                for node in story.nodes.alive():
                    story.nodes.reboot(node)
            hit[kind] += 1
            story.promised = max(story.nodes.recoverable().values(), default=0)
        story.end()
    print(dict(hit))
