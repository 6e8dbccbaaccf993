"""Half an hour of misfortune: a run on a local cluster through random events, and whether it came out whole.

    python jobs/soak.py                                   30 minutes on 4 nodes
    python jobs/soak.py --seed 7 --events 4 --nodes 3     the first four events of another seed
    python jobs/soak.py --kinds kill-node add             only these

Workers, nodes, tracker, controller and driver are killed, nodes are drained and added, workers and nodes freeze and
come back, the disk is slow: ``jobs/soak_schedule.py`` has the list. A seed decides what happens, to which node, and
after how many new steps; how long it takes is the machine's business. After each event the run must come to a new step.

At the end the run is stopped, goes on to a last step, and is judged (``jobs/soak_judge.py``): each sample once and in
order, the same bits for what was done twice, a cause for each end, a ledger that adds up, and nothing left behind. Exit
code 0 only if all of it holds. What went wrong keeps the run's folder.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tyro.conf import UseAppendAction

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from soak_events import (  # noqa: E402
    CONTROLLER,
    DRIVER,
    HOLDER,
    TRACKER,
    WORKER,
    Hands,
    slow_faults,
)
from soak_judge import (  # noqa: E402
    Finding,
    judge_causes,
    judge_history,
    judge_journal,
    judge_ledger,
    lost_by_kind,
)
from soak_remains import left_behind, look, ours  # noqa: E402
from soak_schedule import BREAKS, LOSES_NODE, Event, draw  # noqa: E402
from soak_story import SoakError, Story  # noqa: E402

from cluster.local import HealthCheck, LocalCluster, Settings  # noqa: E402
from ray_ckpt.config import Config  # noqa: E402
from ray_ckpt.errors import ConfigError  # noqa: E402
from ray_ckpt.facts import expected_digest, global_order, versions  # noqa: E402
from ray_ckpt.fault_points import FAULT_VARIABLE  # noqa: E402
from ray_ckpt.options import parse, run_main  # noqa: E402
from ray_ckpt.tracker.recall import read_ledger  # noqa: E402
from ray_ckpt.view.goodput import goodput_text  # noqa: E402

BATCH, MICRO, SEQ_LEN = 16, 2, 33
NEVER = 10_000_000  # steps of a run that is stopped before
LAST_STEPS = 20  # new ones after the stop
# Quick, but a machine that has other things to do is no dead node.
HEALTH = HealthCheck(period_s=1.0, timeout_s=4.0, failures=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakConfig:
    """Half an hour of misfortune."""

    minutes: float = 30.0
    """How long events happen; what goes on at its end is waited for."""
    events: int = 0
    """At most so many events; 0 for as many as there is time for."""
    seed: int = 14
    """Decides what happens, to which node, and after how many steps; the first 14 events of 14 are of all kinds."""
    nodes: int = 4
    """Nodes at the start, one worker each."""
    kinds: UseAppendAction[tuple[str, ...]] = ()
    """Only these kinds of events; repeatable. None is all of them."""
    patience_s: float = 300.0
    """Longest wait for a new step after an event, seconds."""
    storage: str = ""
    """Folder for the run, which stays; empty is a temporary one, which stays when something was wrong."""
    json: str = ""
    """File for the outcome as JSON."""

    def __post_init__(self) -> None:
        for name in ("minutes", "patience_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be more than 0"
                )
        if self.events < 0:
            raise ConfigError(f"--events {self.events}: must be 0 or more")
        draw(self.seed, self.nodes, self.kinds)


def write_data(folder: Path) -> None:
    """Rows of random tokens: nobody reads what the run has learnt."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(1)
    schema = pa.schema([("tokens", pa.list_(pa.uint16(), SEQ_LEN))])
    with pq.ParquetWriter(folder / "part-00000.parquet", schema) as writer:
        for _ in range(60):
            flat = pa.array(generator.integers(0, 257, 64 * SEQ_LEN).astype(np.uint16))
            rows = pa.table([pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN)], schema=schema)
            writer.write_table(rows, row_group_size=64)


def right_digests(data: Path) -> Callable[[int], str]:
    """Step to the digest of its samples, from the order alone."""
    config = Config(data=(str(data),), global_batch=BATCH, micro_batch=MICRO, seq_len=SEQ_LEN)
    order = global_order(config)

    def digest(step: int) -> str:
        return expected_digest(order, step - 1, global_batch=BATCH, micro_batch=MICRO)

    return digest


def job_command(storage: Path, data: Path, nodes: int) -> Callable[[int], list[str]]:
    """Number of steps to the command of a job."""
    options: dict[str, Any] = {
        "run": "soak",
        "storage": storage,
        "data": data,
        "workers": f"1:{nodes}",
        "global-batch": BATCH,
        "micro-batch": MICRO,
        "seq-len": SEQ_LEN,
        "model.dim": 32,
        "model.num-layers": 2,
        "model.dropout": 0.1,
        "optim.min-lr-ratio": 1,  # the same at each step, however many steps there will be
        "policy.interval-steps": 20,
        "tiers.durable-every-steps": 40,
        "retention.grace-s": 60,
        "elastic.resize-check-s": 2,
        "elastic.min-gain": 0,
        "elastic.cooldown-s": 0,
        "elastic.settle-s": 1,
        "elastic.drain-margin-s": 2,
        "elastic.hang-factor": 10,
        "elastic.hang-min-s": 30,
        "elastic.hang-long-s": 90,
        "elastic.leash-s": 5,
        "elastic.exclude-after": 0,
        # Misfortune comes thick here; that it comes again is no reason to give up.
        "elastic.max-fruitless-attempts": 20,
        "elastic.same-failure-tries": 20,
        "elastic.max-failures": "worker_error=0,hang=0",
        "saving.timeout-s": 120,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    words += ["--exact", "--tiers.use", "memory", "durable"]
    return lambda steps: [sys.executable, "jobs/pretrain.py", *words, "--steps", str(steps)]


class Soak:
    """One soak.

    Args:
        config: of it.
        folder: for data and run.
        name: of the cluster.
    """

    def __init__(self, config: SoakConfig, folder: Path, name: str) -> None:
        self._config, self._name = config, name
        self.run_dir, self._data = folder / "soak", folder / "data"
        self._switch = folder / "slow"
        self._began_s = time.monotonic()
        self.findings: list[Finding] = []
        self.happened: list[tuple[float, Event]] = []
        self.seen: set[tuple[int, int]] = set()  # processes of the cluster
        self.lost: set[str] = set()  # nodes, by none of the events
        self.jobs = 0

    def run(self) -> None:
        """Events, the end, and the judgement of what is on record.

        Raises:
            SoakError: the run does not get on.
        """
        write_data(self._data)
        settings = Settings(
            page=False,
            health=HEALTH,
            start_timeout_s=self._config.patience_s,
            extra_env={FAULT_VARIABLE: slow_faults(self._switch)},
        )
        cluster = LocalCluster(self._config.nodes, 1, name=self._name, settings=settings)
        cluster.up()
        try:
            command = job_command(self.run_dir.parent, self._data, self._config.nodes)
            story = Story(cluster, self.run_dir, command, ROOT, self._config.patience_s)
            story.submit(NEVER)
            try:
                self._events(story, Hands(cluster, self._switch, self._say))
                self._end(story, cluster)
            finally:
                self.seen |= ours(look(), [self._name])
                self.jobs = len(story.jobs)
        finally:
            cluster.down()
        self._judge(story)

    def _events(self, story: Story, hands: Hands) -> None:
        best = story.reach(1, "the start", NEVER)
        self._say(f"the run is at step {best}")
        alive = {f"node{i}" for i in range(self._config.nodes)}
        end_s = time.monotonic() + 60.0 * self._config.minutes
        may_end, beyond = False, 0
        for event in draw(self._config.seed, self._config.nodes, self._config.kinds):
            if time.monotonic() >= end_s or (
                self._config.events and event.number > self._config.events
            ):
                break
            if not event.at_once:
                why = f"after event {event.number - 1}"
                best = story.reach(
                    best + event.after_steps, why, NEVER, may_end=may_end, beyond=beyond
                )
                may_end = False
                self.lost.update(hands.mend(alive))
            time.sleep(event.after_s)
            best = story.best()
            self._say(f"{event.number}: step {best}, {event.words()}")
            self.seen |= ours(look(), [self._name])
            before = story.generation()
            self.happened.append((time.time(), event))
            self.findings += hands.do(event)
            if event.kind in LOSES_NODE:
                alive.discard(event.node)
            elif event.kind == "add":
                alive.add(event.node)
            if event.kind in BREAKS and not hands.missed:
                beyond = before
            may_end = may_end or event.kind == "kill-driver"
            best = story.best()
        best = story.reach(best + 1, "after the last event", NEVER, may_end=may_end, beyond=beyond)
        self._say(f"all events are over at step {best}")

    def _end(self, story: Story, cluster: LocalCluster) -> None:
        story.stop()
        steps = story.best() + LAST_STEPS
        self._say(
            f"stopped at step {story.best()}; the same command goes on to step {steps}, the last"
        )
        story.submit(steps)
        story.finish()
        self._steps = steps
        self.findings += self._idle(cluster)

    def _idle(self, cluster: LocalCluster) -> list[Finding]:
        """What a run that has finished still holds on a cluster that lives on."""
        words = (WORKER, TRACKER, CONTROLLER, HOLDER, DRIVER)
        hands = Hands(cluster, self._switch, self._say)
        nodes = [node.name for node in cluster.nodes() if node.alive]
        deadline = time.monotonic() + 60.0
        while True:
            held = [f"{node}: {word}" for node in nodes for word in words if hands.find(node, word)]
            shared = Path("/dev/shm").glob(f"rcl-*/{self._name}/*/data/**/checkpoints/*")
            held += [str(path) for path in shared]
            if not held:
                return []
            if time.monotonic() > deadline:
                return [
                    Finding(rule="a run that has ended holds nothing", text=text) for text in held
                ]
            time.sleep(1.0)

    def _judge(self, story: Story) -> None:
        ledger = read_ledger(self.run_dir)
        assert ledger is not None, self.run_dir
        self.findings += [
            *judge_history(story.rows, self._steps, BATCH, right_digests(self._data)),
            *judge_journal(story.events),
            *judge_causes(self.happened, story.events, self.lost),
            *judge_ledger(ledger.wall_s, ledger.buckets),
        ]
        print(f"\n{goodput_text(ledger)}\n")
        print(f"{'end of an attempt':<20}{'times':>6}{'steps lost':>12}")
        for kind, (times, lost) in lost_by_kind(story.events).items():
            print(f"{kind:<20}{times:>6}{lost:>12}")
        repeated = len(story.rows) - self._steps
        print(
            f"{self._steps} steps, {repeated} of them done again; {self.jobs} jobs, {len(self.happened)} events"
        )
        self.document = {
            "steps": self._steps,
            "done_again": repeated,
            "goodput": ledger.goodput,
            "lost_steps": ledger.lost_steps,
            "wall_s": ledger.wall_s,
            "buckets": dict(ledger.buckets),
            "ends": lost_by_kind(story.events),
        }

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)


def main() -> int:
    """Soaks, and tells what came of it."""
    config = parse(SoakConfig)
    temporary = not config.storage
    folder = (
        Path(tempfile.mkdtemp(prefix="soak-")) if temporary else Path(config.storage).absolute()
    )
    if (folder / "soak").exists() or (folder / "data").exists():
        raise ConfigError(
            f"--storage {folder}: there is a soak in it; a new one needs an empty folder"
        )
    name = f"soak-{secrets.token_hex(4)}"
    before = look()
    soak = Soak(config, folder, name)
    try:
        soak.run()
    except SoakError as error:
        soak.findings.append(Finding(rule="after each event comes a new step", text=str(error)))
    marks = [name, str(folder)]
    soak.findings += left_behind(before, look(), marks, soak.seen, kept=[str(folder)])
    for finding in soak.findings:
        print(f"BROKEN: {finding.rule}: {finding.text}", flush=True)
    if config.json:
        document = {
            "options": asdict(config),
            "events": [{"time": at, **asdict(event)} for at, event in soak.happened],
            "findings": [asdict(finding) for finding in soak.findings],
            "versions": versions(),
            **getattr(soak, "document", {}),
        }
        Path(config.json).write_text(json.dumps(document, indent=1))
    if soak.findings:
        print(
            f"seed {config.seed}: {len(soak.findings)} rules broken; look at {folder}", flush=True
        )
        return 1
    if temporary:
        shutil.rmtree(folder)
    print(
        f"seed {config.seed}: whole. Each sample once and in order, nothing left behind.",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    run_main(main)
