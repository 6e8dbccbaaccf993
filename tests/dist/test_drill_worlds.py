"""Drills: what is saved by any world is restored to the same loss on one worker, and what is not is found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import drilling
import pytest
import torch
from worlds import JOBS, events, history, make_config, make_data, run_world

from ray_ckpt.checkpoint.drilled import read_drills
from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.config import PolicyConfig, SavingConfig
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
    make_data(tmp_path / "other", [16] * 12, vocab=29)
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
    assert "the data is another" in found["other data"][0].notes[0]
    assert found["swapped weights"][0].problems[1:] == ()  # nothing but the loss sees it


def test_without_a_function_the_rest_is_drilled_and_that_is_said(tmp_path: Path) -> None:
    make_data(tmp_path / "data", [16] * 12)
    config = make_config(tmp_path, steps=3)
    run_world(drilling.in_a_world, 1, config, None)
    _, drilled = run_world(_drill, 1, config, {"loss": None})[0]
    assert (drilled.ok, drilled.loss) == (True, None)
    assert drilled.load_s > 0
    assert "no validation loss was logged" in drilled.notes[0]


OVERLAPPED = SavingConfig(timeout_s=60.0, report_to_ray=False, staging="overlapped")


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": "ddp"},
        {"parallel": "fsdp", "saving": OVERLAPPED},
        {"parallel": "ddp", "exact": True},
        {"parallel": "fsdp", "exact": True},
    ],
    ids=["ddp", "fsdp-overlapped", "ddp-exact", "fsdp-exact"],
)
def test_training_has_the_same_bits_with_and_without_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Also when the function draws random numbers: the model has dropout, whose next mask would be another."""
    make_data(tmp_path / "data", [16] * 12)
    ends, steps = [], []
    for loss in (None, drilling.noisy):
        config = make_config(tmp_path, run=f"r{len(ends)}", steps=5, **options)
        config = replace(config, policy=PolicyConfig(interval_steps=2))
        ends.append(run_world(drilling.in_a_world, 2, config, loss))
        same = ("loss_hex", "rng_digest", "sample_digest", "grad_norm")
        steps.append([[line[k] for k in same] for line in history(config).values()])
    assert ends[0] == ends[1]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 5
    assert [e["validation_loss"] > 0 for e in events(config, "commit")] == [True] * 3


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


def _main_job(rank: int, world: int, folder: str) -> None:
    from pretrain import train

    from ray_ckpt.facts import check_run

    config, shape = main_config(folder)
    if rank == 0:
        check_run(config, shape)  # as the driver of the main job does, before there are workers
    torch.distributed.barrier()
    train(config)


def main_config(folder: str) -> tuple[Any, dict[str, Any]]:
    """Options of a small run of the main job, and what of them its driver puts on record."""
    from model import ModelConfig
    from pretrain import PretrainConfig

    from ray_ckpt.config import PolicyConfig

    model = ModelConfig(vocab_size=31, dim=16, num_layers=2, num_heads=2, num_kv_heads=1)
    config = PretrainConfig(
        run="mine",
        storage=f"{folder}/runs",
        data=(f"{folder}/data",),
        steps=4,
        global_batch=8,
        seq_len=9,
        seed=5,
        model=model,
        policy=PolicyConfig(interval_steps=2),
    )
    return config, {f"--model.{k.replace('_', '-')}": v for k, v in asdict(model).items()}


def test_the_main_job_is_drilled_from_its_record_by_the_command_and_by_the_job(
    tmp_path: Path,
) -> None:
    make_data(tmp_path / "data", [16] * 12)
    run_world(_main_job, 2, str(tmp_path))
    run = tmp_path / "runs" / "mine"

    def call(*argv: object) -> tuple[int, str]:
        words = [sys.executable, *map(str, argv)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=JOBS.parent)
        return done.returncode, done.stdout + done.stderr

    data = f"--data {tmp_path / 'data'}"
    code, said = call("-m", "ray_ckpt", "drill", run, "--options", data)
    assert code == 0, said
    assert "ok, " in said
    assert "loss" in said
    options = ["--storage", run.parent, "--run", "mine", *data.split(), "--json"]
    code, said = call(JOBS / "drill.py", *options, "--step", "2")
    assert code == 0, said
    told = json.loads(said.splitlines()[-1])
    assert (told["step"], told["ok"], told["problems"]) == (2, True, [])
    # The record of the run is believed, and what is said besides wins over it: here it is wrong.
    code, said = call("-m", "ray_ckpt", "drill", run, "--options", f"{data} --model.dim 32")
    assert code == 1, said
    assert "FAILED" in said
