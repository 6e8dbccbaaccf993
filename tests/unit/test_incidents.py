"""What a run met, as the page shows it: who leaves and whether the save made it, hangs, limits, sizes, readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_departures import OPTIONS, drain
from test_tracker_core import Run

from ray_ckpt.policy.loops import LoopRule
from ray_ckpt.policy.resize import ResizeRules
from ray_ckpt.tracker.departures import Drain
from ray_ckpt.view.run_view import RunView

BOOM = "rank 1: ValueError: bad row 17"
RULE = LoopRule(tries=9, budgets={"worker_error": 20, "hang": 0}, window_s=60.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that knows how long its steps and its saves take: half a second, and 4 s."""
    run = Run(tmp_path / "run", replace(OPTIONS, loops=RULE, resize=ResizeRules(settle_s=0.0)))
    run.begin()
    run.train(10)
    run.save(stall_s=1.0, upload_s=3.0)
    run.train(10)
    return run


def shown(run: Run) -> dict[str, Any]:
    view = RunView(run.dir, clock=lambda: run.clock.now)
    view.update()
    found: dict[str, Any] = view.detail()["incidents"]
    return found


def newest(run: Run) -> dict[str, Any]:
    leaving: dict[str, Any] = shown(run)["leaving"][0]
    return leaving


def saved_and_left(run: Run) -> None:
    drain(run, 8.0)
    assert run.train(1).leave is not None
    run.save()
    assert run.core.obstacle(run.generation, run.step) == ""


def end(
    run: Run, kind: str = "worker_error", cause: str = "rank 0: LeavingError: the attempt ends"
) -> None:
    run.core.interruption(kind, cause, group=f"{kind} of {run.generation}")


def test_a_notice_is_there_before_anything_follows_with_its_deadline(run: Run) -> None:
    drain(run, 600.0)
    run.train(1)
    leaving = newest(run)
    assert (leaving["nodes"], leaving["saves"], leaving["level"]) == (["spot-7"], None, "attention")
    assert leaving["deadline"] == pytest.approx(run.clock.now + 600.0, abs=3.0)
    assert (
        leaving["line"]
        == "node spot-7 will be taken away: the workers train on until it is time to save"
    )


def test_a_save_that_made_it_says_by_how_much(run: Run) -> None:
    saved_and_left(run)
    leaving = newest(run)
    assert (leaving["step"], leaving["level"]) == (run.step, "ok")
    assert f"step {run.step} was safe, " in leaving["line"]
    assert leaving["line"].endswith(" before the deadline")
    end(run)
    assert newest(run)["line"].endswith(" before the deadline; no step lost")
    run.begin()
    assert len(shown(run)["leaving"]) == 1, "the next attempt has none of its own"


def no_time(run: Run) -> None:
    drain(run, 5.0)
    run.train(1)
    end(run, "node_loss", "node spot-7 died")


def not_committed(run: Run) -> None:
    drain(run, 8.0)
    run.train(1)
    end(run, "node_loss", "node spot-7 died")


def gone_before(run: Run) -> None:
    drain(run, 600.0)
    run.train(1)
    end(run, "node_loss", "node spot-7 died")


def signalled(run: Run) -> None:
    run.core.terminated(run.generation, run.step, {1: "node-a"})
    run.save()
    assert run.core.obstacle(run.generation, run.step) == ""
    end(run)


@pytest.mark.parametrize(
    ("what", "level", "words"),
    [
        (no_time, "attention", "node spot-7 will be taken away: no save was begun: "),
        (no_time, "attention", "the last committed checkpoint stands; 11 steps lost"),
        (not_committed, "failing", "the attempt ended (drain) before the save was known to be safe; 11 steps lost"),
        (gone_before, "attention", "the attempt ended before it was time to save (node_loss); 11 steps lost"),
        (signalled, "ok", "the process of rank 1 got SIGTERM at step 20: step 20 was safe; no step lost"),
    ],
)  # fmt: skip
def test_how_it_ended_is_told(
    run: Run, what: Callable[[Run], None], level: str, words: str
) -> None:
    what(run)
    leaving = newest(run)
    assert words in leaving["line"]
    assert leaving["level"] == level


def test_several_nodes_of_one_attempt_are_one_end_with_the_first_deadline(run: Run) -> None:
    now_s = run.clock.now
    run.core.memory.nodes = ("node-a", "node-b")
    run.core.draining(
        [
            Drain(node="node-a", name="spot-7", deadline=now_s + 600.0),
            Drain(node="node-b", name="spot-8", deadline=now_s + 300.0),
        ]
    )
    (leaving,) = shown(run)["leaving"]
    assert leaving["nodes"] == ["spot-7", "spot-8"]
    assert leaving["deadline"] == pytest.approx(now_s + 300.0, abs=3.0)


def test_a_hang_says_who_where_and_in_which_files(run: Run) -> None:
    run.core.hang(
        step=20, quiet_s=305.0, usual_s=0.5, suspects=[3], nodes=["0123456789abcdef"], names=["gpu-17"],
        reason="no step for 305 s after step 20: rank 3 is behind, on node gpu-17",
        where={"backward of step 21": [3], "all-reduce of step 21": [0, 1, 2]}, dumps="hangs/x-g1",
    )  # fmt: skip
    end(run, "hang", "no step for 305 s")
    (hang,) = shown(run)["hangs"]
    assert (hang["ranks"], hang["nodes"], hang["level"]) == ([3], ["gpu-17"], "failing")
    assert hang["dumps"] == f"{run.dir}/hangs/x-g1"
    assert hang["where"]["backward of step 21"] == [3]
    # Where a node was named once, it is named so everywhere.
    run.core.memory.excluded = ()
    run.core.exclude(["0123456789abcdef"], ["gpu-17"], [3])
    run.begin()
    run.train(1)
    view = RunView(run.dir, clock=lambda: run.clock.now)
    view.update()
    assert "left out after hangs: node gpu-17" in view.summary()["reasons"]
    assert [each["line"] for each in shown(run)["excluded"]] == [
        "EXCLUDED, as suspected too often: no workers on node gpu-17 (3 hangs)"
    ]
    run.core.exclude([], [], [])
    assert shown(run)["excluded"] == []


def test_limits_count_what_is_left_and_a_loop_says_what_was_done(run: Run) -> None:
    limits = shown(run)["limits"]
    assert limits["budgets"] == [{"kind": "worker_error", "count": 0, "most": 20}]
    for _ in range(3):
        end(run, cause=BOOM)
        run.begin()
        run.train(1)
    limits = shown(run)["limits"]
    assert limits["budgets"] == [{"kind": "worker_error", "count": 3, "most": 20}]
    assert limits["same"] == {"count": 3, "tries": 9, "then": "stop"}
    end(run, cause="rank 0: another one")
    assert shown(run)["limits"]["same"]["count"] == 1
    assert shown(run)["loops"] == []
    for _ in range(9):
        run.begin()
        run.core.memory.fruitless = 0
        end(run, cause=BOOM)
    (loop,) = shown(run)["loops"]
    assert loop["level"] == "failing"
    assert loop["line"].startswith("CRASH LOOP (stop): the same failure came 9 times in a row")


def test_the_limits_are_on_record_once_and_again_when_they_change(run: Run) -> None:
    end(run)
    run.begin()
    assert len(run.journal("limits")) == 1
    run.options = replace(run.options, loops=LoopRule())
    run.open()
    end(run)
    run.begin()
    assert [event["tries"] for event in run.journal("limits")] == [9, 3]
    assert shown(run)["limits"]["budgets"] == []


def test_slow_nodes_are_there_as_long_as_they_are_slow_and_sizes_with_their_reasons(
    run: Run,
) -> None:
    said = {"rank": 3, "factor": 1.8, "pace_s": 1.0, "others_s": 0.5, "saves": 3, "step": run.step}
    run.core._record("straggler", node="0123456789abcdef", **said)
    (slow,) = shown(run)["slow"]
    assert (slow["nodes"], slow["level"]) == (["0123456789ab"], "attention")
    run.core._record("straggler_over", node="0123456789abcdef", **said)
    assert shown(run)["slow"] == []
    run.core.resize(4, 2)
    (size,) = shown(run)["resizes"]
    assert size["line"].startswith("the cluster has room for 4 workers, the run ")


def test_a_run_that_met_nothing_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "quiet")
    run.begin()
    found = shown(run)
    limits = found.pop("limits")
    assert limits["same"] == {"count": 0, "tries": LoopRule().tries, "then": "stop"}
    assert all(each == [] for each in found.values())
