"""Two drivers on one run, and workers that freeze and wake up after the run has gone on without them."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from killing import LIMIT_S, World, check_restores, newest_good, run_struck, train_struck
from worlds import events, history, make_config, make_core, make_data, run_world, train

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.config import PolicyConfig
from ray_ckpt.tracker.journal import STEPS_NAME, read_lines

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", [16] * 12)
    return tmp_path


def config_of(folder: Path, run: str = "run") -> Any:
    return make_config(folder, run=run, exact=True, policy=PolicyConfig(interval_steps=2))


def traces(config: Any) -> list[tuple[Any, ...]]:
    keys = ("step", "loss_hex", "sample_offset", "sample_digest")
    return [tuple(line[key] for key in keys) for line in history(config).values()]


def until(what: Any, words: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, f"never: {words}"
        time.sleep(0.01)


# ---- two drivers ----------------------------------------------------------------------------------


def drive(rank: int, world: int, config: Any, faults: str) -> dict[str, Any]:
    """A driver and its only worker, with the lock that every driver takes."""
    from ray_ckpt.tracker.lock import RunLock

    lock = RunLock(config.run_dir, wait_s=0.5)
    try:
        return train_struck(rank, world, config, {0: faults})
    finally:
        lock.close()


@pytest.mark.parametrize("end", ["killed", "woken"])
def test_a_second_driver_is_refused_until_the_first_is_gone(folder: Path, end: str) -> None:
    run_world(train, 1, config_of(folder, "whole"))
    config = config_of(folder)
    first = World(drive, 1, config, "save.report@3=stop")
    try:
        until(lambda: first.is_frozen(0), "the first driver freezes")
        second = run_struck(drive, 1, config, "")
        assert second.seconds < 20
        assert "is being driven by another process" in second.errors[0]
        assert f'"pid": {first.processes[0].pid}' in second.errors[0]
        assert len(events(config, "attempt_started")) == 1, "the second changed something"
        if end == "killed":
            newest = newest_good(config.run_dir)
            assert newest == 4
            first.processes[0].kill()
            first.processes[0].join()
            assert run_struck(drive, 1, config, "").errors == []
            check_restores(config, newest, 1)
            assert [e["generation"] for e in events(config, "attempt_started")] == [1, 2]
        else:  # nobody took its place: it simply goes on
            os.kill(first.processes[0].pid or 0, signal.SIGCONT)
            assert first.end().errors == []
            assert [e["generation"] for e in events(config, "attempt_started")] == [1]
    finally:
        first.close()
    assert traces(config) == traces(config_of(folder, "whole"))
    assert newest_good(config.run_dir) == 12


# ---- a frozen worker ------------------------------------------------------------------------------


class Served:
    """A tracker in a process of its own, as an actor is: here this one; its callers come and go."""

    def __init__(self, config: Any, address: Path) -> None:
        self.core, self._turn = make_core(config), threading.Lock()
        self.refused: list[str] = []
        self._listener = Listener(str(address), "AF_UNIX")
        threading.Thread(target=self._accept, daemon=True).start()

    def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        with self._turn:
            return getattr(self.core, method)(**kwargs)

    def _accept(self) -> None:
        while True:
            try:
                caller = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: Connection) -> None:
        while True:
            try:
                method, kwargs = caller.recv()
            except (EOFError, OSError):
                return
            try:
                answer: tuple[bool, Any] = True, self.call(method, kwargs)
            except Exception as error:  # noqa: BLE001 - told to the caller
                answer = False, error
                self.refused.append(f"{method}: {type(error).__name__}")
            try:
                caller.send(answer)
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


class Caller:
    """A client of it."""

    def __init__(self, address: Path) -> None:
        self._line, self._turn = Client(str(address), "AF_UNIX"), threading.Lock()

    def call(self, method: str, **kwargs: Any) -> Any:
        with self._turn:
            self._line.send((method, kwargs))
            good, answer = self._line.recv()
        if not good:
            raise answer
        return answer

    post = call

    def poll(self, ticket: Any) -> tuple[bool, Any]:
        return True, ticket


def train_served(
    rank: int, world: int, config: Any, address: Path, faults: dict[int, str], *more: Any
) -> Any:
    """:func:`worlds.train` with the tracker of another process."""
    import worlds

    from ray_ckpt.tracker import client

    worlds.make_core = lambda config: None
    client.LocalTracker = lambda core: Caller(address)  # type: ignore[assignment,misc]
    return train_struck(rank, world, config, faults, *more)


@pytest.mark.parametrize(
    "point",
    ["save.report@2", "save.written@2", "save.file@70", "save.staged@2", "restore.loaded@1"],
)
def test_a_worker_that_wakes_after_the_run_went_on_changes_nothing(
    folder: Path, point: str
) -> None:
    """Its lines, its commit and whatever it still writes belong to an attempt that is over."""
    run_world(train, 1, config_of(folder, "whole"))
    config, address = config_of(folder), folder / "tracker"
    served = Served(config, address)
    frozen = World(train_served, 2, config, address, {0: f"{point}=stop"})
    try:
        until(lambda: frozen.is_frozen(0), "the worker freezes")
        newest = newest_good(config.run_dir)
        served.call("interruption", {"kind": "hang", "cause": "a worker does not answer"})
        stopped = run_struck(train_served, 1, config, address, {}, 9)
        assert stopped.errors == []
        check_restores(config, newest, 1)
        newest, refused_before = newest_good(config.run_dir), len(served.refused)
        assert newest == 8
        os.kill(frozen.processes[0].pid or 0, signal.SIGCONT)
        ended = frozen.end(grace_s=10.0)
        assert ended.seconds < LIMIT_S
        assert None not in ended.exits, "a worker of the old attempt waits for ever"
        assert "StaleGenerationError" in "".join(ended.errors)
        refused = served.refused[refused_before:]
        assert refused
        assert all("StaleGenerationError" in call for call in refused), refused
        # Nothing of the old attempt became part of the run.
        assert newest_good(config.run_dir) == newest
        began = [e["event"] for e in events(config)].index("interruption")
        assert all(e["generation"] == 2 for e in events(config)[began + 1 :])
        lines = [line["generation"] for line in read_lines(config.run_dir / STEPS_NAME)]
        assert lines == sorted(lines)
        late = [e for e in list_checkpoints(config.run_dir) if e.generation == 1 and e.step > 2]
        assert not any(entry.usable for entry in late)
        served.call("interruption", {"kind": "user_stop", "cause": "the test goes on"})
        again = run_struck(train_served, 2, config, address, {})
        assert again.errors == []
        check_restores(config, newest, 2)
    finally:
        frozen.close()
        served.close()
    assert traces(config) == traces(config_of(folder, "whole"))
