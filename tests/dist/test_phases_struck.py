"""Killed, terminated or drained in each phase: the run is the run that was not, and nothing that was planned is lost.

The kinds that need Ray, and all of them together, are in tests/cluster/test_each_phase.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import held
import pytest
from killing import newest_good, run_struck
from worlds import events, history, make_core, make_data

from ray_ckpt.config import ElasticConfig, PolicyConfig, ReadingConfig, SavingConfig
from ray_ckpt.tracker.recall import read_ledger

pytestmark = pytest.mark.dist

STEPS = 30  # enough for what is asked for in the middle to be heard: half a second, about
KINDS = {"kill": "lost", "sigterm": "preempted", "drain": "drain"}


def config_of(folder: Path, phase: str, run: str = "r") -> Any:
    return held.HeldConfig(
        run=run,
        storage=str(folder),
        data=(str(folder / "data"),),
        marks=str(folder),
        phase=phase,  # type: ignore[arg-type]
        steps=STEPS,
        workers="1:2",
        global_batch=8,
        micro_batch=2,
        seq_len=9,
        exact=True,
        reading=ReadingConfig(feed="local"),
        policy=PolicyConfig(interval_steps=3),
        elastic=ElasticConfig(drain_margin_s=0.2, max_fruitless_attempts=50, backoff_s=0),
        saving=SavingConfig(timeout_s=60.0, report_to_ray=False),
    )


def attempt(rank: int, world: int, config: Any, number: int, kind: str) -> str:
    """One attempt, that is struck when its ranks stand still."""
    import torch

    from ray_ckpt.elastic import sigterm
    from ray_ckpt.errors import LeavingError
    from ray_ckpt.joining import standing_in
    from ray_ckpt.session import Session
    from ray_ckpt.tracker.client import LocalTracker

    sigterm.listen()  # below Ray Train this is done when the group is up
    tracker = LocalTracker(make_core(config)) if rank == 0 else None
    nodes = [f"node{r}" for r in range(world)]
    device = torch.device("cpu")
    session = Session(config, tracker=tracker, device=device, nodes=nodes, node=nodes[rank])
    threading.Thread(target=strike, args=(rank, config, number, kind, tracker), daemon=True).start()
    try:
        with standing_in(session):
            held.train(config)
    except LeavingError as error:
        return str(error)
    return "done"


def strike(rank: int, config: Any, number: int, kind: str, tracker: Any) -> None:
    from ray_ckpt.tracker.departures import Drain

    marks = Path(config.marks)
    while not (marks / f"held-{number}").exists():
        time.sleep(0.005)
    if kind == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sigterm" and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "drain" and rank == 0:
        # Nobody says when: they leave at once, and not after the last of these few steps.
        tracker.call("draining", drains=[Drain(node="node1", name="node1", deadline=None)])

        def tick() -> None:  # as the tracker's actor does
            while True:
                tracker.call("advance")
                time.sleep(0.05)

        threading.Thread(target=tick, daemon=True).start()
    if kind != "kill":
        time.sleep(1.0 if kind == "drain" else 0.1)
        (marks / f"go-{number}").touch()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    make_data(folder / "data", [16] * 8)
    config = config_of(folder, "none")
    assert run_struck(attempt, 1, config, 1, "nothing").errors == []
    return history(config)


@pytest.mark.parametrize(
    "phase",
    [
        *("save", "evaluation", "restore", "last step"),
        *(pytest.param(phase, marks=pytest.mark.slow) for phase in ("start", "compile")),
    ],
)
def test_a_run_that_is_struck_in_a_phase_is_the_run_that_was_not(
    tmp_path: Path, whole: dict[int, Any], phase: str
) -> None:
    make_data(tmp_path / "data", [16] * 8)
    config = config_of(tmp_path, phase)
    for number, kind in enumerate(KINDS, 1):
        kept = newest_good(config.run_dir)
        ending = run_struck(attempt, 2, config, number, kind, grace_s=0.0)
        assert ending.struck == (kind == "kill"), (kind, ending)
        assert newest_good(config.run_dir) >= kept
        if kind != "kill":
            assert ending.errors == [], ending.errors[0]
            if phase == "last step":  # there is nothing to leave for: it is complete
                assert ending.results == ["done", "done"]
                break
            assert all("which is safe" in text for text in ending.results), ending.results
    else:
        (tmp_path / "go-all").touch()
        assert run_struck(attempt, 2, config, 9, "nothing").results == ["done", "done"]
    rows = history(config)
    names = ("loss_hex", "sample_offset", "sample_digest", "rng_digest")
    assert list(rows) == list(range(1, STEPS + 1))
    assert [[r[n] for n in names] for r in rows.values()] == [
        [r[n] for n in names] for r in whole.values()
    ]
    ends = events(config, "interruption")
    told = [KINDS[kind] for kind in KINDS][: len(ends)]
    assert [end["kind"] for end in ends] == told
    assert len(ends) == (1 if phase == "last step" else 3)
    assert all(end["lost_steps"] == 0 for end in ends if end["kind"] != "lost")
    assert events(config, "finished")
    ledger = read_ledger(config.run_dir)
    assert ledger is not None
    assert sum(ledger.buckets.values()) == pytest.approx(ledger.wall_s, rel=1e-3)
    assert all(each.complete for each in ledger.restarts)
