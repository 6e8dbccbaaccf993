"""Workers that were cut off end by themselves, in a collective and in their own code, stopped or not."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from killing import LIMIT_S, World, newest_good, run_struck
from test_frozen import Caller, Served, train_served, until
from worlds import events, history, make_config, make_data, run_world, train

from ray_ckpt.config import ElasticConfig, PolicyConfig
from ray_ckpt.elastic.leash import EXIT_CODE

pytestmark = pytest.mark.dist

LEASH_S = 1.0


def train_leashed(
    rank: int, world: int, config: Any, address: Path, faults: dict[int, str], sleeps: int | None
) -> Any:
    """:func:`train_served` with a leash on every rank; one may fall asleep in its own code after step 4."""
    import worlds

    from ray_ckpt import session

    caller = Caller(address)
    check = lambda generation: caller.call("check", generation=generation)  # noqa: E731
    session.Session = functools.partial(session.Session, check=check)  # type: ignore[misc,assignment]
    inner = worlds.train

    def on_step(_: Any, step: int) -> None:
        if rank == sleeps and step == 4:
            time.sleep(1000)

    worlds.train = functools.partial(inner, on_step=on_step)
    import killing

    killing.train = worlds.train
    return train_served(rank, world, config, address, faults)


def ended(world: World, rank: int) -> int | None:
    process = world.processes[rank]
    process.join(LIMIT_S)
    return process.exitcode


@pytest.mark.parametrize("where", ["collective", "own code"])
def test_a_worker_that_was_cut_off_ends_by_itself(tmp_path: Path, where: str) -> None:
    make_data(tmp_path / "data", [16] * 12)
    base = {"exact": True, "policy": PolicyConfig(interval_steps=2)}
    config = make_config(tmp_path, elastic=ElasticConfig(leash_s=LEASH_S), **base)
    address = tmp_path / "tracker"
    served = Served(config, address)
    # Rank 0 is stopped, and the other waits for it in a collective; or it is the other that never comes.
    faults = {0: "save.report@2=stop"} if where == "collective" else {}
    cut = World(train_leashed, 2, config, address, faults, 1 if where == "own code" else None)
    try:
        if where == "collective":
            until(lambda: cut.is_frozen(0), "rank 0 freezes")
        else:
            until(lambda: newest_good(config.run_dir) == 4, "step 4")
        time.sleep(1.5 * LEASH_S)
        assert all(p.is_alive() for p in cut.processes), "a worker ended although nobody took over"
        served.call("interruption", {"kind": "hang", "cause": "a worker does not answer"})
        assert run_struck(train_served, 1, config, address, {}, 6).errors == []
        begun = time.monotonic()
        assert ended(cut, 1) == EXIT_CODE
        assert time.monotonic() - begun < 2 * LEASH_S + 5
        if where == "collective":
            assert cut.is_frozen(0)
            os.kill(cut.processes[0].pid or 0, signal.SIGCONT)
        # Woken, or left alone in a collective: by its leash, or by the error that its peer left behind.
        assert ended(cut, 0) in (1, EXIT_CODE)
        served.call("interruption", {"kind": "user_stop", "cause": "the test goes on"})
        assert run_struck(train_served, 2, config, address, {}).errors == []
    finally:
        cut.close()
        served.close()
    whole = make_config(tmp_path, run="whole", **base)
    run_world(train, 1, whole)
    keys = ("step", "loss_hex", "sample_digest")
    mine, reference = (
        [[line[k] for k in keys] for line in history(c).values()] for c in (config, whole)
    )
    assert mine == reference
    began = [e["event"] for e in events(config)].index("interruption")
    assert all(e["generation"] > 1 for e in events(config)[began + 1 :])
