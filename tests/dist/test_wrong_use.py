"""Wrong use of a session ends with a clear error, and never waits for ever.

Mistakes of one rank are tried in a world of one. Those between ranks are tried in worlds of two that run beside each
other: in all of them somebody waits in vain, for as long as ``--saving.timeout-s`` says.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from killing import World
from worlds import make_config, make_core, make_data, run_world

import ray_ckpt
from ray_ckpt.config import Config
from ray_ckpt.errors import ConfigError, RayCkptError, StateError
from ray_ckpt.trainer import _check_finished

pytestmark = pytest.mark.dist

WAIT_S = 2.0  # --saving.timeout-s here
BOUND_S = 20.0  # beside the wait: starting a process, leaving word, and five worlds on two cores


def config_in(folder: Path, **changes: Any) -> Config:
    base = make_config(folder, steps=6, workers="1:2", **changes)
    return replace(base, saving=replace(base.saving, timeout_s=WAIT_S))


def open_session(rank: int, config: Config, wide: int = 8) -> tuple[Any, Any]:
    """A session with a small model that is spread, and its state; nothing restored yet."""
    import torch

    from ray_ckpt.session import Session
    from ray_ckpt.tracker.client import LocalTracker

    tracker = LocalTracker(make_core(config)) if rank == 0 else None
    session = Session(config, tracker=tracker, device=torch.device("cpu"))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(31, wide), torch.nn.Linear(wide, 31))
    model = session.spread(net, torch.zeros(1, 8, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session, ray_ckpt.TrainState(model=model, optimizer=optimizer)


def passes(state: Any, batch: Any) -> None:
    for micro in batch:
        batch.backward(micro, state.model(micro.tokens[:, :-1]).square().mean())


def train(session: Any, state: Any, stop: int = 99) -> None:
    """Steps as they should be, until the run's last or ``stop``."""
    for batch in session.batches():
        passes(state, batch)
        state.optimizer.step()
        session.step_end(lr=0.1)
        session._saving.wait(9)  # each save is committed before the next step
        if state.progress.step == stop:
            return


# ---- one rank -----------------------------------------------------------------------------------


def restored(folder: Path, **changes: Any) -> tuple[Any, Any]:
    session, state = open_session(0, config_in(folder, **changes))
    session.restore(state)
    return session, state


def ended_twice(folder: Path) -> None:
    session, state = restored(folder)
    train(session, state, stop=1)
    session.step_end(lr=0.1)


def not_ended(folder: Path) -> None:
    session, state = restored(folder)
    for batch in session.batches():
        passes(state, batch)


def ended_between_passes(folder: Path) -> None:
    session, state = restored(folder)
    batch = next(session.batches())
    for micro in batch:
        batch.backward(micro, state.model(micro.tokens[:, :-1]).square().mean())
        session.step_end(lr=0.1)


def restored_twice(folder: Path) -> None:
    session, state = restored(folder)
    session.restore(state)


def batches_before_restore(folder: Path) -> None:
    session, _ = open_session(0, config_in(folder))
    next(session.batches())


def closed_before_restore(folder: Path) -> None:
    open_session(0, config_in(folder))[0].close()


def validated_after_restore(folder: Path) -> None:
    session, _ = restored(folder)
    session.validate_with(lambda model, tokens: model(tokens).mean())


def spread_twice(folder: Path) -> None:
    import torch

    session, _ = open_session(0, config_in(folder))
    session.spread(torch.nn.Linear(2, 2), torch.ones(1, 2))


def restored_another_model(folder: Path) -> None:
    import torch

    session, _ = open_session(0, config_in(folder))
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.restore(ray_ckpt.TrainState(model=net, optimizer=optimizer))


def no_optimizer(folder: Path) -> None:
    session, state = open_session(0, config_in(folder))
    session.restore(ray_ckpt.TrainState(model=state.model, optimizer=None))  # type: ignore[arg-type]


def stepped_another_optimizer(folder: Path) -> None:
    import torch

    session, state = restored(folder)
    mine = torch.optim.SGD(state.model.parameters(), lr=0.1)
    for batch in session.batches():
        passes(state, batch)
        mine.step()
        session.step_end(lr=0.1)


def replaced_a_layer(folder: Path) -> None:
    import torch

    session, state = restored(folder)
    state.model.module[1] = torch.nn.Linear(8, 31)
    train(session, state)


def converted_the_model(folder: Path) -> None:
    session, state = restored(folder)
    train(session, state, stop=1)
    state.model.double()
    train(session, state)


def other_shapes_than_saved(folder: Path) -> None:
    session, state = restored(folder)
    train(session, state, stop=3)  # the first save is at step 3
    session, state = open_session(0, config_in(folder), wide=9)
    session.restore(state)


def a_loader_beside_data(folder: Path) -> None:
    session, _ = restored(folder)
    next(session.batches(loader=list))


def own_samples_without_a_loader(folder: Path) -> None:
    next(restored(folder, data=(), samples=50)[0].batches())


def own_samples_with_fixed_rows(folder: Path) -> None:
    session, _ = open_session(0, config_in(folder, data=(), samples=50))
    session.validate_with(lambda model, tokens: model(tokens).mean())


ALONE: dict[Callable[[Path], None], tuple[type[Exception], str]] = {
    ended_twice: (RuntimeError, "step_end() without a batch"),
    not_ended: (RuntimeError, "step_end() was not called for the last batch"),
    ended_between_passes: (RuntimeError, "step_end() before all passes of the batch"),
    restored_twice: (RuntimeError, "restore() was called before"),
    batches_before_restore: (RuntimeError, "call restore(state) first"),
    closed_before_restore: (RuntimeError, "call restore(state) first"),
    validated_after_restore: (RuntimeError, "after spread() and before restore()"),
    spread_twice: (RuntimeError, "spread() was called before"),
    restored_another_model: (StateError, "not the model that spread() gave"),
    no_optimizer: (StateError, "TrainState(optimizer=NoneType): give the optimizer"),
    stepped_another_optimizer: (RuntimeError, "step_end() of step 1: no optimizer of TrainState"),
    replaced_a_layer: (StateError, "1.weight is a new tensor, which the optimizer does not know"),
    converted_the_model: (StateError, "was float32 [31, 8] and is float64 [31, 8]"),
    other_shapes_than_saved: (ray_ckpt.errors.RestoreError, "[31, 9]"),
    a_loader_beside_data: (ConfigError, "the run reads --data"),
    own_samples_without_a_loader: (ConfigError, "batches(loader=lambda sampler"),
    own_samples_with_fixed_rows: (ConfigError, "validate_with() draws its rows from --data"),
}


def in_one_process(rank: int, world: int, folder: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for case in ALONE:
        make_data(folder / case.__name__ / "data", [20, 20, 20])
        try:
            case(folder / case.__name__)
            found[case.__name__] = "no error", ""
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[case.__name__] = type(error).__name__, str(error)
    return found


def test_a_mistake_of_one_rank_is_named_where_it_is_made(tmp_path):
    (found,) = run_world(in_one_process, 1, tmp_path)
    for case, (kind, words) in ALONE.items():
        name, text = found[case.__name__]
        assert (name, words in text) == (kind.__name__, True), f"{case.__name__}: {name}: {text}"


def forgotten(rank: int, world: int, folder: Path, closes: int) -> list[str]:
    """What is logged by a session that goes after the last step."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ray_ckpt.usage").addHandler(handler)
    session, state = restored(folder)
    train(session, state)
    for _ in range(closes):
        session.close()
    del session, state
    gc.collect()
    return told


def test_a_close_that_was_forgotten_is_told_and_a_second_one_does_no_harm(tmp_path):
    make_data(tmp_path / "data", [20, 20, 20])
    ((told,),) = run_world(forgotten, 1, tmp_path, 0)
    assert "close() was not called after the last step 6" in told
    with pytest.raises(
        RayCkptError, match=r"is of step 6 of 6\. It left the loop .* or did not call"
    ):
        _check_finished(config_in(tmp_path))  # what run() says when the training function has ended
    make_data(tmp_path / "other" / "data", [20, 20, 20])
    assert run_world(forgotten, 1, tmp_path / "other", 2) == [[]]
    _check_finished(config_in(tmp_path / "other"))


# ---- between ranks ------------------------------------------------------------------------------


def one_leaves(rank: int, world: int, folder: Path, case: str) -> None:
    """Rank 1 does something else than rank 0, from step 3 on."""
    config = config_in(folder, exact=case.startswith("exact"))
    session, state = open_session(rank, config)
    if case == "no restore" and rank == 1:
        time.sleep(60)
    session.restore(state)
    for batch in session.batches():
        if rank == 1 and state.progress.step == 2:
            if case == "leaves the loop":
                break
            if case == "raises":
                raise ValueError("the sample of rank 1 is bad")
            if case == "exact, asleep":
                time.sleep(60)
        passes(state, batch)
        state.optimizer.step()
        if rank == 1 and state.progress.step == 2 and case == "no step_end":
            time.sleep(60)
        session.step_end(lr=0.1)
    session.close()


BETWEEN = {
    "no step_end": "step_end() of step 3: rank 0 waited {late} s for the others; rank 1 did not come.",
    "leaves the loop": "backward() of step 3: rank 0 waited {late} s for the others; "
    "rank 1 waits in close() after step 2.",
    "raises": "backward() of step 3: rank 0 waited {soon} s for the others; rank 1 did not come, and a process is gone",
    "no restore": "restore(): rank 0 waited {late} s for the others; rank 1 did not come.",
    "exact, asleep": "the passes of step 3: rank 0 waited {late} s for the others; rank 1 did not come.",
}


def test_a_rank_that_does_something_else_ends_the_wait_of_the_others_with_its_name(tmp_path):
    started, worlds = time.monotonic(), {}
    for case in BETWEEN:
        folder = tmp_path / case
        make_data(folder / "data", [20, 20, 20])
        worlds[case] = World(one_leaves, 2, folder, case)
    # Who sleeps need not be waited for; the other two come to an end by themselves.
    awake = ("leaves the loop", "raises")
    endings = {c: w.end(grace_s=2 * WAIT_S + 4 if c in awake else 0) for c, w in worlds.items()}
    assert time.monotonic() - started < WAIT_S + BOUND_S
    for case, words in BETWEEN.items():
        errors = [error.splitlines()[-1] for error in endings[case].errors]
        (told,) = [error for error in errors if ": rank 0 waited" in error]
        assert told.startswith("ray_ckpt.errors.OutOfStepError: "), told
        call, rest = words.split(": rank 0 waited ", 1)
        assert told.split(": ", 1)[1].startswith(f"{call}: rank 0 waited "), told
        assert rest.split(" s for the others")[1] in told, told
        waited_s = float(told.partition("rank 0 waited ")[2].split()[0])
        assert (waited_s >= WAIT_S - 0.1) == ("{late}" in words), f"{case}: {waited_s}"
    assert any("bad" in error for error in endings["raises"].errors), "with the error that did it"
    (other,) = [e for e in endings["leaves the loop"].errors if "close() after step 2: rank 1" in e]
    assert "rank 0 waits in backward() of step 3" in other


def held(rank: int, world: int, folder: Path) -> float:
    """Rank 0 is asked to hold after a save for longer than the others may wait for it."""
    session, state = open_session(rank, config_in(folder))
    session.restore(state)
    if rank == 0:
        session._talk.tracker.call("request_save", reason="a test", hold_s=2 * WAIT_S)
    started = time.monotonic()
    train(session, state)
    session.close()
    return time.monotonic() - started


def test_ranks_that_hold_for_an_end_that_does_not_come_are_not_taken_for_gone(tmp_path):
    make_data(tmp_path / "data", [20, 20, 20])
    for seconds in run_world(held, 2, tmp_path):
        assert 2 * WAIT_S <= seconds < 2 * WAIT_S + BOUND_S


def unlike(rank: int, world: int, folder: Path) -> list[str]:
    """Ranks whose model, or state, is not the same."""
    import torch

    told = []
    for case in ("model", "state"):
        config = config_in(folder / case)
        make_data(folder / case / "data", [20, 20, 20]) if rank == 0 else time.sleep(0)
        torch.distributed.barrier()
        try:
            session, state = open_session(rank, config, wide=8 + rank * (case == "model"))
            if rank == 1:
                state.register("mine", torch.nn.Linear(1, 1))
            session.restore(state)
        except StateError as error:
            told.append(str(error))
    return told


def test_ranks_that_build_something_else_are_refused_on_every_rank_before_they_wait(tmp_path):
    first, second = run_world(unlike, 2, tmp_path)
    assert first == second, "every rank says the same"
    model, state = first
    assert "the model is not the same on every rank: rank 0 has 0.weight: float32 [31, 8]" in model
    assert "rank 1 has 0.weight: float32 [31, 9]" in model
    assert "the state of TrainState is not the same on every rank" in state
    assert "rank 1 has mine.weight: float32 [1, 1]" in state


# ---- before there are ranks ---------------------------------------------------------------------


@pytest.mark.parametrize("driver", [False, True])
def test_attach_outside_of_everything_says_where_it_belongs(tmp_path, monkeypatch, driver):
    monkeypatch.setattr("ray.is_initialized", lambda: driver)
    with pytest.raises(RuntimeError, match=r"ray_ckpt\.run\(config, train\), or call init_process"):
        ray_ckpt.attach(config_in(tmp_path))


@dataclass(frozen=True, kw_only=True, slots=True)
class WithLock(Config):
    """Options that cannot travel."""

    lock: Any = field(default_factory=threading.Lock)


def test_what_cannot_be_sent_is_refused_before_a_worker_is_waited_for(tmp_path):
    make_data(tmp_path / "data", [20, 20, 20])
    base = make_config(tmp_path)
    values = {name: getattr(base, name) for name in ("storage", "data", "seq_len", "global_batch")}
    values |= {"micro_batch": base.micro_batch}
    with pytest.raises(
        ConfigError, match=r"config\.lock cannot be sent to the workers \(TypeError"
    ):
        ray_ckpt.run(WithLock(**values), lambda config: None)
    lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"the training function .* cannot be sent to the workers"
    ):
        ray_ckpt.run(Config(**values), lambda config: lock.acquire() and None)
