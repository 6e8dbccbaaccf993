"""Drills: what is saved by any world is restored to the same loss on one worker, and what is not is found."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import drilling
import pytest
import torch
from worlds import events, history, make_config, make_data, run_world

from ray_ckpt.checkpoint.drilled import read_drills
from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.tiers.pins import read_pins

pytestmark = pytest.mark.dist

NEWEST = "step-00000006-g1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run of a kind and a world size, trained once, and what its workers returned."""
    known: dict[Any, Any] = {}

    def get(parallel: str, world: int) -> Any:
        if (parallel, world) not in known:
            folder = tmp_path_factory.mktemp("trained")
            make_data(folder / "data", [16] * 12)
            config = make_config(folder, steps=6, parallel=parallel)
            known[parallel, world] = config, run_world(drilling.in_a_world, world, config)
        return known[parallel, world]

    return get


def _copied(config: Any, folder: Path) -> Any:
    shutil.copytree(config.run_dir, folder / config.run)
    return replace(config, storage=str(folder))


def _drill(rank: int, world: int, config: Any, changes: dict[str, Any], **more: Any) -> Any:
    """In a process of its own, as a drill is."""
    from ray_ckpt.drill import drill

    result = drill(config, partial(drilling.train, **changes), **more)
    return result and (result.name, result.drilled)


def _tree(folder: Path) -> dict[str, bytes]:
    """What a drill must not change."""
    own = {".drill.lock", ".lock", "DRILLED.json", "PINNED.json", "journal.jsonl"}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.name not in own}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_worker_finds_the_loss_of_any_world_to_the_bit(
    trained: Any, tmp_path: Path, parallel: str, world: int
) -> None:
    config = _copied(trained(parallel, world)[0], tmp_path)
    before = _tree(config.run_dir)
    name, drilled = run_world(_drill, 1, config, {})[0]
    assert (name, drilled.ok, drilled.problems) == (NEWEST, True, ())
    assert drilled.same_bits, f"{drilled.loss} is not {drilled.expected}"
    entry = usable(list_checkpoints(config.run_dir))[0]
    assert entry.manifest is not None
    assert drilled.expected == entry.manifest.metrics["validation_loss"]
    assert drilled.digest == entry.manifest.validation["digest"]
    assert drilled.bytes == entry.manifest.total_bytes
    assert min(drilled.verify_s, drilled.load_s) > 0
    # Nothing but the record is there afterwards, and the checkpoint is as whole as it was.
    assert _tree(config.run_dir) == before
    assert read_drills(entry.folder) == (drilled,)
    assert read_pins(entry.folder) == ()
    assert verify_files(entry.folder, entry.manifest) == []
    told = events(config, "drill")
    assert [(e["name"], e["step"], e["ok"], e["loss"]) for e in told] == [
        (NEWEST, 6, True, drilled.loss)
    ]
    assert events(config, "commit")[-1]["validation_s"] > 0


def _swap(state: dict[str, torch.Tensor]) -> None:
    """Weights of the same shape change places: every norm stays, and every value is finite."""
    first, second = (f"model.layers.{n}.attention.wq.weight" for n in (0, 1))
    state[first], state[second] = state[second], state[first]


def _double(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.ffn.up.weight"] *= 2


def _spoil(state: dict[str, torch.Tensor]) -> None:
    state["optimizer.state.norm.weight.exp_avg"][0] = float("nan")


def _other_step(state: dict[str, torch.Tensor]) -> None:
    state["progress.step"] += 1


def _flip(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _one_more(model: Any) -> None:
    model.extra = torch.nn.Linear(2, 2)


def _broken(model: Any) -> None:
    raise TypeError("this code is not finished")


# What is done to the checkpoint, to the training function, to the options; and what must be said of it.
CONTROLS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "another activation": (None, {"change": drilling.gelu}, {}, "the validation loss is"),
    "swapped weights": (_swap, {}, {}, "the validation loss is"),
    "changed weights": (_double, {}, {}, "the norm of the parameters is"),
    "not finite": (_spoil, {}, {}, "exp_avg: 1 of 16 values are not finite"),
    "another step": (_other_step, {}, {}, "the manifest is of step 6"),
    "other rows": (None, {}, {"seed": 1}, "the rows to validate on are others"),
    "other data": (None, {}, {"data": "other"}, "the rows to validate on are others"),
    "no function": (None, {"loss": None}, {}, "no longer calls validate_with()"),
    "another shape": (None, {"change": _one_more}, {}, "extra.weight"),
    "broken code": (None, {"change": _broken}, {}, "TypeError: this code is not finished"),
    "a flipped bit": (_flip, {}, {}, "checksum differs"),
}


def _controls(rank: int, world: int, config: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (name, (spoil, changes, options, _)) in enumerate(CONTROLS.items()):
        copy = _copied(config, folder / str(number))
        if "data" in options:
            options = {"data": str(folder / options["data"])}
        place = copy.run_dir / "checkpoints" / NEWEST
        if spoil is _flip:
            _flip(place)
        elif spoil is not None:
            drilling.reseal(place, spoil)
        before = _tree(copy.run_dir)
        drilled = _drill(rank, world, replace(copy, **options), changes)[1]
        kinds = [e["event"] for e in events(copy)]
        found[name] = drilled, _tree(copy.run_dir) == before, kinds[-2:], "quarantine" in kinds
    # The way to change a checkpoint is itself no change.
    copy = _copied(config, folder / "as it was")
    drilling.reseal(copy.run_dir / "checkpoints" / NEWEST, lambda state: None)
    found[""] = _drill(rank, world, copy, {})[1]
    return found


def test_what_no_restart_should_go_on_from_is_found_and_named(trained: Any, tmp_path: Path) -> None:
    config = trained("ddp", 2)[0]
    make_data(tmp_path / "other", [16] * 11)
    found = run_world(_controls, 1, config, tmp_path)[0]
    assert found.pop("").ok
    for name, (drilled, untouched, kinds, quarantined) in found.items():
        said = CONTROLS[name][3]
        assert not drilled.ok, name
        assert any(said in problem for problem in drilled.problems), (name, drilled.problems)
        # It is told, loudly; and the drill judges nothing but itself.
        assert kinds == ["drill", "alert"], name
        assert untouched, name
        assert not quarantined, name
    assert found["swapped weights"][0].problems[1:] == ()  # nothing but the loss sees it


def test_without_a_function_the_rest_is_drilled_and_that_is_said(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    config = make_config(tmp_path, steps=3)
    run_world(drilling.in_a_world, 1, config, None)
    _, drilled = run_world(_drill, 1, config, {"loss": None})[0]
    assert (drilled.ok, drilled.loss) == (True, None)
    assert drilled.load_s > 0
    assert "no validation loss was logged" in drilled.notes[0]


@pytest.mark.parametrize(("parallel", "world"), [("ddp", 2), ("fsdp", 2)])
def test_training_has_the_same_bits_with_and_without_it(
    trained: Any, tmp_path: Path, parallel: str, world: int
) -> None:
    """Also when the function draws random numbers: the model has dropout, whose next mask would be another."""
    config, at_end = trained(parallel, world)
    for name, loss in (("none", None), ("noisy", drilling.noisy)):
        other = replace(config, storage=str(tmp_path / name))
        assert run_world(drilling.in_a_world, world, other, loss) == at_end
        for step, line in history(config).items():
            same = ("loss_hex", "rng_digest", "sample_digest", "grad_norm")
            assert [history(other)[step][k] for k in same] == [line[k] for k in same]


def _kill(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _clean_up(rank: int, world: int, config: Any) -> tuple[list[str], list[str]]:
    from ray_ckpt.tiers.hold import release_dead

    folder = config.run_dir / "checkpoints" / NEWEST
    before = [pin.author for pin in read_pins(folder)]
    release_dead(config.run_dir)
    return before, [pin.author for pin in read_pins(folder)]


def test_a_drill_that_is_killed_leaves_the_run_as_it_was(trained: Any, tmp_path: Path) -> None:
    config = _copied(trained("ddp", 2)[0], tmp_path)
    before, journal = _tree(config.run_dir), events(config)
    with pytest.raises(AssertionError, match="no result"):
        run_world(_drill, 1, config, {"change": _kill})
    assert _tree(config.run_dir) == before
    assert events(config) == journal
    folder = config.run_dir / "checkpoints" / NEWEST
    assert [pin.author for pin in read_pins(folder)] == ["ray_ckpt drill"]
    # The next drill is kept from nothing, and takes the dead one's pin along with its own.
    assert run_world(_drill, 1, config, {})[0][1].ok
    assert read_pins(folder) == ()
    # So does whoever keeps house.
    with pytest.raises(AssertionError, match="no result"):
        run_world(_drill, 1, config, {"change": _kill})
    assert _clean_up(0, 1, config) == (["ray_ckpt drill"], [])


def _train_until_drilled(rank: int, world: int, config: Any) -> dict[str, str]:
    """Trains, and does not make the last steps before a drill was on record."""
    import time

    def on_step(session: Any) -> None:
        deadline = time.monotonic() + 60
        while session.progress.step == 5 and time.monotonic() < deadline:
            if any(read_drills(entry.folder) for entry in list_checkpoints(config.run_dir)):
                return
            time.sleep(0.05)

    return drilling.train(config, on_step=on_step)


def _keep_drilling(rank: int, world: int, config: Any) -> list[tuple[str, bool]]:
    from ray_ckpt.drill.schedule import drill_every

    told: list[tuple[str, bool]] = []
    config.run_dir.mkdir(parents=True, exist_ok=True)
    good = drill_every(
        config, drilling.train, 0.1, lambda result: told.append((result.name, result.drilled.ok))
    )
    assert good
    return told


def test_a_run_goes_on_while_it_is_drilled_and_takes_it_on_record(
    trained: Any, tmp_path: Path
) -> None:
    config, at_end = trained("ddp", 2)
    config = replace(config, storage=str(tmp_path))
    ends: list[Any] = []
    training = threading.Thread(
        target=lambda: ends.append(run_world(_train_until_drilled, 2, config))
    )
    training.start()
    told = run_world(_keep_drilling, 1, config)[0]
    training.join()
    assert ends == [at_end]  # not a bit of training is another one
    assert told == [("step-00000003-g1", True), (NEWEST, True)]
    kinds = [(e["event"], e.get("name")) for e in events(config)]
    # The tracker took the first on record; the second came when it was done.
    assert kinds.index(("drill", "step-00000003-g1")) < kinds.index(("finished", None))
    assert kinds.count(("drill", "step-00000003-g1")) == 1
    assert kinds[-1] == ("drill", NEWEST)
    assert not events(config, "interruption")
