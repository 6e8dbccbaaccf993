"""Weights out of a checkpoint and into a model: the same tensors, whole, or nothing at all."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from making import manifest_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ray_ckpt
from ray_ckpt import cli
from ray_ckpt.checkpoint import export as module
from ray_ckpt.checkpoint.export import _split, export_weights
from ray_ckpt.checkpoint.listing import CheckpointEntry, list_checkpoints
from ray_ckpt.checkpoint.manifest import write_manifest
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.checkpoint.restore import with_rng
from ray_ckpt.checkpoint.writer import ChecksumWriter
from ray_ckpt.config import Config
from ray_ckpt.errors import ConfigError, RestoreError, StorageError, WeightsError
from ray_ckpt.initial import INIT_FROM, check_unchanged, initial_weights
from ray_ckpt.segment import Segment
from ray_ckpt.state.train_state import TrainState
from ray_ckpt.state.weights import INDEX_NAME, load_weights, weights_fingerprint
from ray_ckpt.tracker.identity import check_identity, read_record, write_record


class Net(nn.Module):
    """Two layers, a buffer, a scalar, half precision, and one matrix under two names."""

    def __init__(self, *, tied: bool = True, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.inner = nn.Sequential(nn.Linear(width, 3), nn.LayerNorm(3))
        self.scale = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.register_buffer("seen", torch.tensor(3))
        self.output = nn.Linear(width, 7, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def get_extra_state(self) -> Any:
        return {"note": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        pass


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}


def save(run: Path, model: nn.Module, *, ema: Any = None, step: int = 12) -> CheckpointEntry:
    """A committed checkpoint, as a session of one rank makes it."""
    state = TrainState(
        model=model, optimizer=torch.optim.AdamW(dict(model.named_parameters()).values()), ema=ema
    )
    folder = run / "checkpoints" / f"step-{step:08d}-g1"
    folder.parent.mkdir(parents=True, exist_ok=True)
    writer = ChecksumWriter(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            with_rng(state.state_dict(), 0, torch.device("cpu")),
            storage_writer=writer,
            no_dist=True,
        )
    manifest = manifest_of(
        run=run.name,
        step=step,
        sample_offset=8 * step,
        tokens=64 * step,
        files=tuple(writer.entries),
        versions={"torch": torch.__version__},
    )
    write_manifest(folder, manifest)
    return list_checkpoints(run)[0]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """What plain safetensors reads."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "demo"


def test_plain_safetensors_reads_what_was_saved(run: Path, tmp_path: Path) -> None:
    """Every parameter and buffer, bit for bit and of its type; the second name of a tied one is told."""
    model = Net()
    check_identity(run, {"--model.dim": 4, "--model.num-layers": 2, "--seed": 5})
    done = export_weights(save(run, model), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = values(model)
    del expected["output.weight"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype, name
    assert done.left_out == {
        "_extra_state.note": "extra state of a module, no weight",
        "output.weight": "the same parameter as embedding.weight",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dim"], config["num_layers"]) == (4, 2)
    assert (config["ray_ckpt"]["step"], config["ray_ckpt"]["options"]) == (12, {"--seed": 5})
    assert config["ray_ckpt"]["left_out"] == done.left_out
    assert names_in(tmp_path) == ["out", "runs"], "a temporary folder was left"


@pytest.mark.parametrize("file_bytes", [1, 100, 1 << 30])
@pytest.mark.parametrize("tied", [True, False])
def test_export_then_import_gives_the_same_tensors(
    run: Path, tmp_path: Path, tied: bool, file_bytes: int
) -> None:
    model, other = Net(tied=tied), Net(tied=tied)
    done = export_weights(save(run, model), tmp_path / "out", file_bytes=file_bytes)
    assert len(done.files) == {1: done.tensors, 1 << 30: 1}.get(file_bytes, len(done.files))
    assert (tmp_path / "out" / INDEX_NAME).exists() == (len(done.files) > 1)
    loaded = ray_ckpt.load_weights(other, tmp_path / "out")
    assert loaded.num_tensors == done.tensors
    expected = values(model)
    assert {n: v.tolist() for n, v in values(other).items()} == {
        n: v.tolist() for n, v in expected.items()
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_files_hold_every_tensor_once_in_order_and_keep_to_their_size(sizes, limit) -> None:
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    files = _split(named, limit)
    assert [name for names in files for name in names] == list(named)
    for names in files:
        assert len(names) == 1 or sum(named[name] for name in names) <= limit


def test_averaged_weights_are_exported_under_the_names_of_the_model(
    run: Path, tmp_path: Path
) -> None:
    model = Net(tied=False)
    ema = AveragedModel(model, multi_avg_fn=None)
    with torch.no_grad():
        for parameter in ema.module.parameters():
            parameter.add_(1.0)
    done = export_weights(save(run, model, ema=ema), tmp_path / "out", what="ema")
    assert done.left_out["n_averaged"] == "not a tensor of the model"
    other = Net(tied=False)
    load_weights(other, tmp_path / "out")
    for name, value in values(ema.module).items():
        assert torch.equal(values(other)[name], value), name


def test_averaged_weights_that_are_not_there_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--what ema: .* only those of: model"):
        export_weights(save(run, Net()), tmp_path / "out", what="ema")


def test_equal_tensors_that_are_not_tied_are_both_written(run: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3))
    assert export_weights(save(run, model), tmp_path / "out").left_out == {}
    assert len(load_folder(tmp_path / "out")) == 4


@pytest.mark.parametrize("victim", [".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_refused_with_the_file_and_nothing_is_left(
    run: Path, tmp_path: Path, victim: str
) -> None:
    entry = save(run, Net())
    content = bytearray((entry.folder / victim).read_bytes())
    content[len(content) // 2] ^= 1
    (entry.folder / victim).write_bytes(content)
    with pytest.raises(RestoreError, match=f"{victim}: checksum differs"):
        export_weights(entry, tmp_path / "out")
    assert names_in(tmp_path) == ["runs"]


def test_quarantined_uncommitted_and_stale_ones_are_refused_with_the_reason(
    run: Path, tmp_path: Path
) -> None:
    folder = save(run, Net()).folder
    write_quarantine(folder, "loss was NaN", time_s=1.0)
    with pytest.raises(RestoreError, match="loss was NaN"):
        export_weights(list_checkpoints(run)[0], tmp_path / "out")
    (folder / "QUARANTINED.json").unlink()
    (folder / "COMMITTED.json").unlink()
    with pytest.raises(RestoreError, match="never committed"):
        export_weights(list_checkpoints(run)[0], tmp_path / "out")


def test_only_an_empty_or_new_folder_outside_the_checkpoints_is_taken(
    run: Path, tmp_path: Path
) -> None:
    entry = save(run, Net())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("full", "link", "full/mine"):
        with pytest.raises(ConfigError, match="--to"):
            export_weights(entry, tmp_path / name)
    for place in (entry.folder / "out", entry.folder.parent / "out"):
        with pytest.raises(ConfigError, match="only checkpoints belong"):
            export_weights(entry, place)
    (tmp_path / "empty").mkdir()
    export_weights(entry, tmp_path / "empty")
    assert (tmp_path / "full" / "mine").read_text() == "x"


@pytest.mark.parametrize("moment", ["_load", "_sync"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_whatever_goes_wrong_nothing_half_written_stays(
    run: Path, tmp_path: Path, monkeypatch, moment: str, error: BaseException
) -> None:
    entry = save(run, Net())
    real, calls = getattr(module, moment), []

    def fail(*args: Any) -> None:
        calls.append(args)
        if moment == "_sync" or len(calls) == 4:  # after some files of weights
            raise error
        real(*args)

    monkeypatch.setattr(module, moment, fail)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        export_weights(entry, tmp_path / "out", file_bytes=1)
    assert names_in(tmp_path) == ["runs"]


def test_the_command_says_what_was_left_out(run: Path, tmp_path: Path, capsys) -> None:
    save(run, Net())
    assert cli.main(["export", str(run), "12", "--to", str(tmp_path / "out")]) == 0
    assert (
        "left out output.weight: the same parameter as embedding.weight" in capsys.readouterr().out
    )
    assert cli.main(["export", str(run), "12", "--to", str(tmp_path / "out")]) == cli.EXIT_USAGE
    assert "not empty" in capsys.readouterr().err


def test_without_the_package_its_name_is_said(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match="pip install safetensors"):
        export_weights(save(run, Net()), tmp_path / "out")
    with pytest.raises(ConfigError, match="pip install safetensors"):
        load_weights(Net(), tmp_path)


# ---- into a model ---------------------------------------------------------------------------------


def test_both_sides_of_a_difference_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    model = Net(tied=False)
    before = values(model)
    content = {n: v + 1 for n, v in before.items()}
    del content["scale"]
    content["foreign"] = torch.zeros(1)
    content["inner.0.weight"] = torch.zeros(2, 2)
    content["seen"] = torch.tensor(3.0)
    save_file(content, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_weights(model, tmp_path / "w.safetensors")
    said = str(caught.value)
    assert "Not in the file: scale." in said
    assert "Only in the file: foreign." in said
    assert "inner.0.weight is float32 [3, 4] here and float32 [2, 2] in the file" in said
    assert "seen is int64 [] here and float32 [] in the file" in said
    for name, value in values(model).items():
        assert torch.equal(value, before[name]), name


def test_what_is_allowed_keeps_its_values(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = values(model)
    save_file(
        {"1.weight": torch.ones(2, 2), "head.bias": torch.ones(1)}, tmp_path / "w.safetensors"
    )
    loaded = load_weights(model, tmp_path, allow_missing=["0", "1.bias", "head"])
    assert (loaded.kept, loaded.ignored) == (("0.bias", "0.weight", "1.bias"), ("head.bias",))
    after = values(model)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["1.weight"], torch.ones(2, 2))


def test_floating_point_types_are_converted(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_file(
        {n: v.to(torch.bfloat16) for n, v in values(model).items()}, tmp_path / "w.safetensors"
    )
    expected = values(model)["weight"].to(torch.bfloat16).to(torch.float32)
    load_weights(model, tmp_path)
    assert torch.equal(model.weight, expected)


def test_one_name_of_a_tied_parameter_is_enough_and_two_must_agree(tmp_path: Path) -> None:
    model = Net()
    content = {n: v + 1 for n, v in values(model).items() if "_extra_state" not in n}
    for present in ("embedding.weight", "output.weight"):
        absent = {"embedding.weight": "output.weight"}.get(present, "embedding.weight")
        save_file({n: v for n, v in content.items() if n != absent}, tmp_path / "w.safetensors")
        fresh = Net()
        load_weights(fresh, tmp_path / "w.safetensors")
        assert torch.equal(fresh.output.weight, content[present])
    content["output.weight"] = content["output.weight"] + 1
    save_file(content, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="one parameter of the model"):
        load_weights(Net(), tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "name", ["../w.safetensors", "/etc/passwd", "a/w.safetensors", "..", "", 7, "w.bin"]
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "in").mkdir()
    save_file({"weight": torch.ones(1)}, tmp_path / "w.safetensors")
    (tmp_path / "in" / INDEX_NAME).write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ConfigError, match="index"):
        load_weights(nn.Linear(1, 1, bias=False), tmp_path / "in")


def test_what_is_no_file_of_weights_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "none").mkdir()
    model = nn.Linear(1, 1)
    with pytest.raises(WeightsError, match=r"bad\.safetensors is damaged"):
        load_weights(model, tmp_path / "bad.safetensors")
    for name, said in (
        ("model.bin", "other formats"),
        ("none", "no .safetensors"),
        ("x", "not there"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_weights(model, tmp_path / name)


def test_a_name_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    for i in range(2):
        save_file({"weight": torch.full((1, 1), float(i))}, tmp_path / f"{i}.safetensors")
    with pytest.raises(WeightsError, match="which of them counts"):
        load_weights(nn.Linear(1, 1, bias=False), tmp_path)


def test_the_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    for folder, names in (("a", "xy"), ("b", "pq")):
        (tmp_path / folder).mkdir()
        for i, name in enumerate(names):
            save_file(
                {f"t{i}": torch.full((2,), float(i))}, tmp_path / folder / f"{name}.safetensors"
            )
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "b")
    before = weights_fingerprint(tmp_path / "a")
    content = bytearray((tmp_path / "a" / "x.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a" / "x.safetensors").write_bytes(content)
    assert weights_fingerprint(tmp_path / "a") != before


# ---- the weights that a run begins with -----------------------------------------------------------


def start(config: Config, batch: int = 8, change: str = "") -> str:
    names = {"--global-batch": batch, INIT_FROM: initial_weights(config)}
    return check_identity(config.run_dir, names, change)


def test_initial_weights_belong_to_the_run_and_to_no_segment(run: Path, tmp_path: Path) -> None:
    """Until the first checkpoint no declaration lets others in; after it they neither count nor change a segment."""
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(3)}, file)
    config = Config(storage=str(run.parent), run=run.name, init_from=str(file))
    start(config)
    check_unchanged(config)
    fingerprint = weights_fingerprint(file)
    save_file({"a": torch.zeros(3)}, file)
    none = Config(storage=str(run.parent), run=run.name)
    for other in (config, none):
        for change in ("", "other weights"):
            with pytest.raises(ConfigError, match="--init-from"):
                start(other, change=change)
    with pytest.raises(ConfigError, match="the run began with weights of fingerprint"):
        check_unchanged(config)
    save(run, Net())
    for other in (config, none):
        assert initial_weights(other) == fingerprint
        assert start(other) == ""
        # A declared change of something else is let pass, with this one unseen.
        assert start(other, batch=16, change="a larger batch") == ""
        assert "nothing is changed" in start(other, change="other weights")
    record = read_record(run)
    assert record is not None
    assert record.fixed[INIT_FROM] == fingerprint
    assert all(INIT_FROM not in segment.options for segment in record.segments)


def test_an_export_tells_the_options_of_the_segment_that_it_is_from(
    run: Path, tmp_path: Path
) -> None:
    check_identity(run, {"--model.dim": 4, "--global-batch": 8})
    record = read_record(run)
    assert record is not None
    later = Segment(number=1, start_step=50, reason="x", options={"--global-batch": 16})
    write_record(run, dataclasses.replace(record, segments=(*record.segments, later)))
    export_weights(save(run, Net()), tmp_path / "out")
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["dim"] == 4
    assert told["ray_ckpt"]["options"] == {"--global-batch": 8}
