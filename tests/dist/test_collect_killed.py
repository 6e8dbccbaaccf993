"""A collector that is killed, at every touch of the file system: whole checkpoints, or none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import add_checkpoint, at_every_touch, whole

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers import pins
from ray_ckpt.tiers.collect import Gate, collect
from ray_ckpt.tiers.housekeeping import Round, keep_house
from ray_ckpt.tiers.retention import Verdict
from ray_ckpt.tiers.rules import Rules

pytestmark = pytest.mark.dist


def fresh(run: Path) -> Path:
    """Checkpoints 10 to 50: 20 pinned, 30 found bad, 50 read back; and what a dead attempt left."""
    for step in (10, 20, 30, 40, 50):
        add_checkpoint(run, step, 2)
    pins.pin(run / "checkpoints" / checkpoint_name(20, 2), "a paper", author="ada", time_s=1.0)
    write_quarantine(run / "checkpoints" / checkpoint_name(30, 2), "loss was NaN", time_s=1.0)
    add_checkpoint(run, 15, 1, commit=False)
    return run


def tidy(run: Path) -> None:
    task = Round(
        run_dir=run,
        rules=Rules(keep_newest=1),
        generation=2,
        newest_generation=lambda: 2,
        present_generation=2,
        verified={checkpoint_name(50, 2)},
        in_use={},
        read_back=None,
        gate=Gate(),
    )
    keep_house(task, now_s=time.time() + 1e6)


def killed_at(count: int, action: Callable[[], None]) -> bool:
    """Does something in a child that kills itself at its ``count``-th touch; whether it lived that long."""
    child = os.fork()
    if not child:
        seen = 0

        def kill(what: str) -> None:
            nonlocal seen
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with at_every_touch(kill):
                action()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - told by the exit code
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the round failed"
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_touch_leaves_whole_checkpoints_and_the_next_round_ends_the_work(tmp_path):
    kept = {checkpoint_name(step, 2) for step in (20, 30, 50)}
    gone = {checkpoint_name(step, 2) for step in (10, 40)}
    at, seen = 0, set()
    while True:
        at += 1
        run = fresh(tmp_path / f"run-{at}")
        killed = killed_at(at, lambda run=run: tidy(run))
        left = whole(run)  # each that is committed has every byte
        assert kept <= left <= kept | gone
        seen.add(frozenset(left - kept))
        tidy(run)
        assert whole(run) == kept
        half = [entry for entry in list_checkpoints(run) if not entry.committed]
        assert all(not list(entry.folder.iterdir()) for entry in half)
        if not killed:
            break
    # It was killed before the first went, between the two, and after the second.
    assert at > 40
    assert seen == {frozenset(), frozenset({checkpoint_name(40, 2)}), frozenset(gone)}


def test_pins_that_race_with_a_collector_hold_or_are_refused(tmp_path):
    """The same in two real threads, whose steps mix as they like."""
    held = 0
    for round_ in range(150):
        run = tmp_path / f"run-{round_}"
        folder, _ = add_checkpoint(run, 10), add_checkpoint(run, 20)
        start, refused = threading.Barrier(2), list[str]()

        def pin_it(folder=folder, start=start, refused=refused) -> None:
            start.wait()
            try:
                pins.pin(folder, "the best", author="bob", time_s=1.0)
            except ConfigError as error:
                refused.append(str(error))

        thread = threading.Thread(target=pin_it)
        thread.start()
        start.wait()
        time.sleep((round_ % 30) * 2e-4)
        verdict = Verdict(name=folder.name, keep=False, reasons=("of no use",))
        collect(run, [verdict], generation=1, newest_generation=lambda: 1, gate=Gate())
        thread.join()
        held += not refused
        assert (folder.name in whole(run)) == (not refused)
    print(f"{held} of 150 pins were in time")
