"""A worker that gets SIGTERM, whenever that is, leaves with the step saved: 20 times of 20."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from worlds import events, history, make_config, make_core, make_data, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.config import PolicyConfig

TIMES = 20


def _terminate_later(seconds: float) -> None:
    """SIGTERM to this process, so long after it began to listen."""
    from ray_ckpt.elastic import sigterm

    def wait() -> None:
        while sigterm._mark.pid != os.getpid():
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _attempts(rank: int, world: int, config: Any, seed: int) -> list[str]:
    """Begins attempts one after the other; in each, one rank gets SIGTERM at some moment."""
    from ray_ckpt.errors import LeavingError

    chance = random.Random(seed)  # the same on all ranks
    ends = []

    def evaluate(session: Any, step: int) -> None:
        """Every third step is followed by work that takes longer than many steps."""
        if step % 3 == 0:
            for _ in range(4):
                time.sleep(0.02)
                session.pause_point()

    for _ in range(TIMES):
        victim, seconds = chance.randrange(world), chance.choice([0.0, 0.3]) * chance.random()
        if rank == victim:
            _terminate_later(seconds)
        try:
            train(rank, world, config, on_step=evaluate)
        except LeavingError as error:
            ends.append(str(error))
        time.sleep(0.01)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "it is heard while training only"
    return ends


def test_sigterm_at_any_moment_leaves_with_the_step_saved(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    make_data(tmp_path / "data", [40] * 4)
    # Nothing saves but SIGTERM.
    config = make_config(
        tmp_path, steps=100_000, policy=PolicyConfig(interval_steps=100_000), log_every=100_000
    )
    ends = run_world(_attempts, 2, config, seed)
    assert [len(each) for each in ends] == [TIMES, TIMES]
    assert all("which is safe" in text or "without a save" in text for text in ends[0])
    make_core(config).begin_attempt(1, [])
    told = [(end["kind"], end["lost_steps"]) for end in events(config, "interruption")]
    assert told == [("preempted", 0)] * TIMES
    done = [line["step"] for line in history(config).values()]
    assert done == list(range(1, len(done) + 1))
    [newest, *_] = usable(list_checkpoints(config.run_dir))
    assert newest.step == done[-1]


# Ends each new child of a process the moment that it is there: sooner than its parent could.
_EAGER = """
import os, sys
path, known = f"/proc/{sys.argv[1]}/task/{sys.argv[1]}/children", {str(os.getpid())}
print(flush=True)
while True:
    with open(path) as file:
        for pid in file.read().split():
            if pid not in known:
                known.add(pid)
                os.kill(int(pid), 15)
"""


def _children_and_parent(rank: int, world: int) -> tuple[set[int], bool, bool]:
    """Forked children of a listening process, ended in their first moment, and then the process itself."""
    from ray_ckpt.elastic import sigterm

    assert sigterm.listen()
    command = [sys.executable, "-S", "-c", _EAGER, str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as eager:
        assert eager.stdout is not None
        eager.stdout.readline()
        ends = set()
        for _ in range(100):
            child = os.fork()
            if child == 0:
                time.sleep(2)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            ends.add(os.WTERMSIG(status))
        eager.kill()
    heard = sigterm.terminated()
    os.kill(os.getpid(), signal.SIGTERM)
    return ends, heard, sigterm.terminated()


def test_a_child_of_a_listening_process_can_be_ended_at_any_moment() -> None:
    [(ends, before, after)] = run_world(_children_and_parent, 1)
    assert ends == {signal.SIGTERM}
    assert (before, after) == (False, True)


def _two_signals(rank: int, world: int, config: Any) -> str:
    """SIGTERM comes twice; and a tracker orders to leave on top of it."""
    from ray_ckpt.errors import LeavingError

    def twice(session: Any, step: int) -> None:
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(LeavingError, match="after step 6, which is safe"):
        train(rank, world, config, on_step=twice)
    return "left"


def test_the_step_that_runs_is_ended_and_further_signals_change_nothing(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [40] * 4)
    config = make_config(tmp_path, steps=1000, policy=PolicyConfig(interval_steps=100_000))
    assert run_world(_two_signals, 2, config) == ["left", "left"]
    [order] = events(config, "leave_requested")
    assert (order["kind"], order["saves"]) == ("preempted", True)
    assert [each["step"] for each in events(config, "commit")] == [6]


def _held(rank: int, world: int, config: Any) -> str:
    """Somebody asks for a save and to stand still, and then the workers are told to leave."""
    from ray_ckpt.errors import LeavingError

    def ask(session: Any, step: int) -> None:
        if step != 4 or rank != 0:
            return
        tracker, generation = session._talk.tracker, session._steward.generation
        number = tracker.call("request_save", reason="a node goes", hold_s=50.0)

        def order() -> None:
            while tracker.call("status")["settled_request"] < number:
                time.sleep(0.01)
            time.sleep(0.5)  # longer than many steps
            step = tracker.call("status")["last_commit_step"]
            tracker.call("terminated", generation=generation, step=step, ranks={1: ""})

        threading.Thread(target=order, daemon=True).start()

    try:
        train(rank, world, config, on_step=ask)
    except LeavingError as error:
        return str(error)
    return "trained on"


def test_workers_that_stand_still_leave_from_there(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [40] * 4)
    config = make_config(tmp_path, steps=1000, policy=PolicyConfig(interval_steps=100_000))
    ends = run_world(_held, 2, config)
    [commit] = events(config, "commit")
    assert ends == [f"the attempt ends as planned, after step {commit['step']}, which is safe"] * 2
    assert list(history(config)) == list(range(1, commit["step"] + 1)), "no step after the save"
