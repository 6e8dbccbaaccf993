"""Weights that leave one run and begin another: the same bits, whatever the world that saved them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from making import manifest_of
from worlds import events, make_config, make_data, open_session, run_world, train

from ray_ckpt.checkpoint.export import export_weights
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import check_run
from ray_ckpt.state.weights import weights_fingerprint
from ray_ckpt.tracker.identity import read_record

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", [16] * 12)
    return tmp_path


def _initial(rank: int, world: int, config: Any, seed: int, changes: str = "") -> dict[str, str]:
    """Digest of the model that a run begins with; ``changes`` does when the driver has looked at it."""
    from safetensors.torch import load_file, save_file

    from ray_ckpt.checkpoint.digest import state_digest

    session, state, _ = open_session(rank, config, seed=seed)
    if changes and rank == 0:  # the others wait for its call of the tracker
        save_file({n: v + 1 for n, v in load_file(changes).items()}, changes)
    session.restore(state)
    return {"model": state_digest(state)["model"], "step": str(state.progress.step)}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_weights_of_two_workers_begin_another_run_on_any_number(
    folder: Path, parallel: Any
) -> None:
    """Export of a checkpoint of W=2, import into DDP and FSDP at W=1 and 2: the digest is the same."""
    config = make_config(folder, parallel=parallel, steps=4)
    trained = run_world(train, 2, config)[0]["at_end"]["model"]
    export_weights(list_checkpoints(config.run_dir)[0], folder / "out", file_bytes=4096)
    for number, (world, kind) in enumerate([(1, "ddp"), (2, "ddp"), (2, "fsdp")]):
        new = make_config(folder, run=f"new{number}", parallel=kind, init_from=str(folder / "out"))
        check_run(new, {})
        for found in run_world(_initial, world, new, 99):
            assert found == {"model": trained, "step": "0"}
    assert events(new, "restored")[0]["reason"].endswith(f"weights of {folder / 'out'}")


def test_a_run_with_checkpoints_ignores_the_weights_even_when_they_are_gone(
    folder: Path, capsys
) -> None:
    config = make_config(folder, steps=4)
    run_world(train, 1, config)
    export_weights(list_checkpoints(config.run_dir)[0], folder / "out")
    new = make_config(folder, run="new", steps=6, init_from=str(folder / "out"))
    first = check_run(new, {})
    run_world(train, 1, new, 3)
    (folder / "out" / "model.safetensors").unlink()
    capsys.readouterr()
    assert check_run(new, {}).config_fingerprint == first.config_fingerprint
    assert capsys.readouterr().out.count("--init-from is ignored") == 1
    assert run_world(train, 2, new)[0]["started"] == 3


def test_weights_that_change_before_the_first_checkpoint_are_refused(folder: Path) -> None:
    """By the driver, and by the workers when it happens behind its back."""
    from safetensors.torch import load_file, save_file

    config = make_config(folder, steps=4)
    run_world(train, 1, config)
    export_weights(list_checkpoints(config.run_dir)[0], folder / "out")
    new = make_config(folder, run="new", init_from=str(folder / "out"))
    check_run(new, {})
    recorded = read_record(new.run_dir)
    assert recorded is not None
    assert weights_fingerprint(folder / "out") in recorded.fixed.values()
    file = folder / "out" / "model.safetensors"
    original = file.read_bytes()
    save_file({n: v + 1 for n, v in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="--init-from"):
        check_run(new, {})
    with pytest.raises(ConfigError, match="--init-from"):
        check_run(make_config(folder, run="new"), {})
    file.write_bytes(original)
    check_run(new, {})  # the old ones are back
    with pytest.raises(AssertionError, match="the run began with weights of fingerprint"):
        run_world(_initial, 2, new, 99, str(file))
    assert list_checkpoints(new.run_dir) == []


def test_the_command_needs_no_ray(folder: Path) -> None:
    config = make_config(folder, steps=3)
    run_world(train, 1, config)
    script = "import sys; sys.modules['ray'] = None; from ray_ckpt.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["export", str(config.run_dir), "3", "--to", str(folder / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["step"], report["folder"]) == (3, str(folder / "out"))
    size = (folder / "out" / "model.safetensors").stat().st_size
    assert report["files"] == {"model.safetensors": size}


def _save_large(rank: int, world: int, run: Path, layers: int) -> None:
    """A committed checkpoint of ``layers`` matrices of 4 MiB."""
    import torch.distributed.checkpoint as dcp

    from ray_ckpt.checkpoint.manifest import write_manifest
    from ray_ckpt.checkpoint.names import checkpoint_name
    from ray_ckpt.checkpoint.writer import ChecksumWriter
    from ray_ckpt.state.codec import encode

    folder = run / "checkpoints" / checkpoint_name(1, 1)
    folder.mkdir(parents=True)
    writer = ChecksumWriter(folder)
    weights = {f"layers.{i}": torch.full((1024, 1024), float(i)) for i in range(layers)}
    state = {"model": weights, "scalars": encode({"model": {}})}
    dcp.save(state, storage_writer=writer)
    manifest = manifest_of(
        run=run.name,
        step=1,
        files=tuple(writer.entries),
    )
    write_manifest(folder, manifest)


def _export_large(rank: int, world: int, run: Path, to: Path, file_bytes: int) -> int:
    """Growth of this process's peak memory during an export, bytes."""
    export_weights(list_checkpoints(run)[0], to / "warm", file_bytes=1 << 22)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = psutil.Process().memory_info().rss
    export_weights(list_checkpoints(run)[0], to / "out", file_bytes=file_bytes)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * peak - before


def test_an_export_does_not_take_the_memory_of_the_model(tmp_path: Path) -> None:
    """256 MiB of weights in files of 16 MiB: two files and a tensor, and what the allocator keeps (43 to 71 MiB)."""
    run_world(_save_large, 1, tmp_path / "run", 64)
    growth = run_world(_export_large, 1, tmp_path / "run", tmp_path, 16 << 20)[0]
    assert growth < 128 << 20, f"{growth >> 20} MiB"
