"""Each room of the package alone, by the very lines that README.md shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from worlds import run_world

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.cli import main

pytestmark = pytest.mark.dist

README = Path(__file__).resolve().parents[2] / "README.md"


def lines_of(first: str) -> str:
    """The block of code in README.md that begins with this line."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(first)]
    assert 5 <= len(found.splitlines()) <= 15
    return found


CHECKPOINTS = "from ray_ckpt import Checkpoints, TrainState"
POLICY = "from ray_ckpt.policy import"
ORDER = "from ray_ckpt.data import BatchPlan"
REDUCTION = "from ray_ckpt.elastic.exact import"


def only_checkpoints(rank: int, world: int, folder: str, stop: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained: list[int] = []

    def train_one_step() -> None:
        if len(trained) == stop:
            raise KeyboardInterrupt  # a program that is killed between two saves
        trained.append(len(trained))
        model(torch.ones(1, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "folder": folder,
        "train_one_step": train_one_step,
    }
    try:
        exec(lines_of(CHECKPOINTS), names)
    except KeyboardInterrupt:
        names["checkpoints"].close()
    faults = [(fault.path, fault.fault) for fault in names["checkpoints"].verify(4)]
    return {"first": names["first"], "weights": model.weight.tolist(), "faults": faults}


def test_checkpoints_alone_go_on_from_the_newest_that_is_whole(tmp_path, capsys):
    whole = run_world(only_checkpoints, 1, str(tmp_path / "whole"), 99)[0]
    folder = tmp_path / "mine"
    first, again = run_world(only_checkpoints, 2, str(folder), 9)
    assert (first["first"], first["faults"], again["faults"]) == (0, [], [])
    assert sorted(entry.step for entry in list_checkpoints(folder)) == [4, 8]
    newest = list_checkpoints(folder)[0]
    damaged = next(newest.folder.glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    resumed = run_world(only_checkpoints, 3, str(folder), 99)
    assert [result["first"] for result in resumed] == [4, 4, 4], (
        "step 8 is damaged, and passed over"
    )
    assert all(result["weights"] == whole["weights"] for result in resumed)
    capsys.readouterr()
    assert main(["ls", str(folder)]) == 0
    assert "3 of 4 usable, newest step 12" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 1, "of step 8"
    assert list_checkpoints(folder)[-2].quarantined


def on_a_full_disk(rank: int, world: int, folder: str) -> list[Any]:
    import torch

    from ray_ckpt import Checkpoints, TrainState
    from ray_ckpt.errors import StorageError
    from ray_ckpt.fault_points import arm

    model = torch.nn.Linear(2, 2)
    state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints = Checkpoints(folder)
    arm("save.file@1=enospc" if rank == 1 else "")
    checkpoints.save(1, state)
    told: list[Any] = []
    try:
        checkpoints.wait()
    except StorageError as error:
        told.append(str(error))
    checkpoints.save(2, state, {"loss": 0.5})
    told.append(checkpoints.wait())
    checkpoints.close()
    return told


def test_a_save_that_fails_on_one_rank_is_told_on_all_and_the_next_one_counts(tmp_path):
    first, second = run_world(on_a_full_disk, 2, str(tmp_path / "mine"))
    assert first == second
    assert "No space left" in first[0]
    assert first[1] == 2
    (entry,) = [entry for entry in list_checkpoints(tmp_path / "mine") if entry.usable]
    assert entry.step == 2
    assert entry.manifest is not None
    assert entry.manifest.metrics["loss"] == 0.5


def test_checkpoints_alone_need_a_process_group_and_say_so(tmp_path):
    from ray_ckpt import Checkpoints

    with pytest.raises(RuntimeError, match="init_process_group"):
        Checkpoints(tmp_path)


def test_the_interval_alone_is_what_the_readme_says():
    names: dict[str, Any] = {}
    exec(lines_of(POLICY), names)
    assert round(names["interval"]) == 461
    assert round(names["habit"]) == 465
    assert round(names["goodput"], 3) == 0.971


def samples_of(rank: int, world_size: int, offset: int) -> tuple[list[list[int]], int]:
    trained: list[list[int]] = []
    names: dict[str, Any] = {
        "dataset": range(100),
        "world_size": world_size,
        "rank": rank,
        "offset": offset,
        "train_on": lambda samples: trained.append(samples.tolist()),
    }
    exec(lines_of(ORDER), names)
    return trained, names["offset"]


def test_the_order_alone_is_the_same_for_any_workers_and_from_any_offset():
    whole, end = samples_of(0, 1, 0)
    assert end == 72
    assert len({sample for micro in whole for sample in micro}) == 72
    halves = [samples_of(rank, 2, 36)[0] for rank in range(2)]
    steps = [halves[rank][2 * step : 2 * step + 2] for step in range(3) for rank in range(2)]
    assert [micro for part in steps for micro in part] == whole[12:]


def only_the_reduction(rank: int, world: int) -> list[str]:
    import torch

    from ray_ckpt.data import BatchPlan

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(16, 1)
    )
    data = torch.randn(4, 5, 6)
    names: dict[str, Any] = {
        "model": model,
        "plan": BatchPlan(global_batch=20, micro_batch=5, world_size=world, rank=rank),
        "loss_of": lambda model, number: model(data[number]).square().mean(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
    }
    exec(lines_of(REDUCTION), names)
    return [number.hex() for p in model.parameters() for number in p.flatten().tolist()]


def test_the_reduction_alone_gives_the_same_bits_for_any_workers():
    found = [run_world(only_the_reduction, world) for world in (1, 3)]
    assert all(bits == found[0][0] for world in found for bits in world)


# ---- a training function of one's own ------------------------------------------------------------


def block_with(words: str) -> str:
    """The block of code in README.md that has these words in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return found


def adopted(rank: int, world: int, folder: str, words: str) -> dict[str, Any]:
    """Runs a training function as README.md shows it, in this world instead of below Ray."""
    import torch
    from torch.nn.functional import cross_entropy

    import ray_ckpt
    from ray_ckpt.view.summary import surviving_steps

    torch.manual_seed(0)
    images = [(torch.randn(1, 4, 4), number % 10) for number in range(40)]
    small: dict[str, Any] = {"steps": 4, "global_batch": 8, "micro_batch": 4, "storage": folder}
    own = {"samples": len(images)}
    found: dict[str, Any] = {}
    real = ray_ckpt.Config

    def make_config(**options: Any) -> ray_ckpt.Config:
        data = {"data": f"{folder}/data", "seq_len": 9} if "data" in options else own
        found["config"] = config = real(**(options | small | data))
        return config

    def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens[:, :-1]).square().mean()

    names: dict[str, Any] = {
        "ray_ckpt": ray_ckpt,
        "torch": torch,
        "build_model": lambda: torch.nn.Embedding(31, 4),
        "example_input": torch.zeros(1, 8, dtype=torch.int64),
        "loss_of": loss_of,
        "ResNet": lambda: torch.nn.Sequential(
            torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10)
        ),
        "FashionMNIST": lambda folder, transform: images,
        "ToTensor": lambda: None,
        "cross_entropy": cross_entropy,
        "Adam": torch.optim.Adam,
        "DataLoader": torch.utils.data.DataLoader,
        "TrainState": ray_ckpt.TrainState,
        "Config": make_config,
        "resolve": ray_ckpt.resolve,
        "run": lambda config, train: train(config),
    }
    # In this process alone, which ends with the function.
    vars(ray_ckpt).update(Config=make_config, run=names["run"])
    exec(block_with(words), names)
    torch.distributed.barrier()
    return {
        step: row["sample_digest"] for step, row in surviving_steps(found["config"].run_dir).items()
    }


@pytest.mark.parametrize(
    "words", ["model = session.spread(build_model()", "session.spread(ResNet()"]
)
def test_a_training_function_as_the_readme_shows_it_trains_to_its_last_step(tmp_path, words):
    from worlds import make_data

    make_data(tmp_path / "data", [20, 20])
    first, second = run_world(adopted, 2, str(tmp_path), words)
    assert first == second
    assert len(set(first.values())) == 4
