"""The pure parts of drills: the fixed rows, the judgement, the record, the hold, and where people read of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk import add_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from test_catalog import make_data
from test_collect import tidy
from test_keeper import KEEP_2
from test_tracker_core import Run

from ray_ckpt import cli
from ray_ckpt.checkpoint.drilled import KEPT, Drilled, add_drill, read_drills
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import Manifest, read_manifest
from ray_ckpt.checkpoint.names import DRILLS_NAME, checkpoint_name
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.data.catalog import load_data, parse_sources
from ray_ckpt.data.fixed import fixed_rows, token_digest
from ray_ckpt.data.index import DataError
from ray_ckpt.drill.job import load_job
from ray_ckpt.drill.judge import judge_loss, judge_state, tolerance_of
from ray_ckpt.drill.recorded import recorded_flags
from ray_ckpt.drill.rehearsal import expected_of
from ray_ckpt.errors import ConfigError, RestoreError
from ray_ckpt.options import parse
from ray_ckpt.tiers import pins
from ray_ckpt.tiers.hold import AUTHOR, drilling, held, release_dead
from ray_ckpt.tracker.identity import RunRecord, write_record
from ray_ckpt.validation import Validated, Validation
from ray_ckpt.view.story import tell

GOOD = Drilled(
    time=1e9,
    ok=True,
    loss=2.5,
    expected=2.5,
    difference=0.0,
    tolerance=2e-6,
    same_bits=True,
    verify_s=1.25,
    load_s=2.0,
    bytes=650,
    host="here",
)
BAD = replace(GOOD, time=2e9, ok=False, problems=("the validation loss is 3.0", "more"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(pins, "_BACK_S", 0.0)


@pytest.fixture
def run(tmp_path) -> Path:
    """Checkpoints at the steps 10 to 50."""
    for step in (10, 20, 30, 40, 50):
        add_checkpoint(tmp_path / "demo", step)
    return tmp_path / "demo"


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / checkpoint_name(step, 1)


# ---- the rows -----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=3), st.integers(0, 99), st.data())
def test_fixed_rows_are_rows_of_the_data_each_once_and_more_of_them_begin_alike(
    tmp_path_factory, rows, seed, data
):
    place = tmp_path_factory.mktemp("data")
    firsts = np.cumsum([0, *rows])
    paths = [
        f"s{i}={make_data(place / str(i), n, first=int(first))}:1"
        for i, (n, first) in enumerate(zip(rows, firsts, strict=False))
    ]
    index = load_data(parse_sources(paths))
    total, few = sum(rows), data.draw(st.integers(1, sum(rows)))
    everything = fixed_rows(index, seed, total + 5)
    # A row of this data is its number, over and over.
    assert everything.dtype == np.int64
    assert sorted(everything[:, 0].tolist()) == list(range(total))
    assert (everything == everything[:, :1]).all()
    some = fixed_rows(index, seed, few)
    assert (some == everything[:few]).all()
    # A source gives as many as the others, or all that it has.
    counts = np.bincount(np.searchsorted(firsts, some[:, 0], "right") - 1, minlength=len(rows))
    assert all(
        count >= min(size, max(counts) - 1) for count, size in zip(counts, rows, strict=True)
    )


def test_another_seed_gives_other_rows(tmp_path):
    index = load_data(parse_sources([make_data(tmp_path / "data", 40)]))
    digests = {token_digest(fixed_rows(index, seed, 4)) for seed in range(8)}
    assert len(digests) == 8


def test_a_digest_sees_every_token_and_the_shape_and_not_the_type():
    tokens = np.arange(12, dtype=np.int64).reshape(3, 4)
    other = tokens.copy()
    other[2, 3] += 1
    assert token_digest(tokens) == token_digest(tokens.astype(np.uint16))
    assert len({token_digest(tokens), token_digest(other), token_digest(tokens.reshape(4, 3))}) == 3


def test_damage_is_told_or_passed_over_as_the_options_say(tmp_path):
    make_data(tmp_path / "data", 10)
    index = load_data(parse_sources([str(tmp_path / "data")]))
    path = next((tmp_path / "data").glob("*.parquet"))
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)  # pages of the first row group
    path.write_bytes(data)
    with pytest.raises(DataError):
        fixed_rows(index, 0, 10)
    kept = fixed_rows(index, 0, 10, "replace")
    assert sorted(kept[:, 0].tolist()) == [5, 6, 7, 8, 9]


# ---- measuring ----------------------------------------------------------------------------------


def test_measuring_leaves_modes_and_generators_as_they_were_also_when_it_fails():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    model.train()
    model[0].eval()  # a frozen part
    seen: list[Any] = []

    def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        seen.append((model.training, torch.is_grad_enabled(), torch.rand(3)))
        if len(seen) > 2:
            raise TypeError("no")
        return model(tokens[:, :2].float()).mean()

    tokens = np.arange(6, dtype=np.int64).reshape(3, 2)
    validation = Validation(loss, tokens, rows_per_pass=2, device=torch.device("cpu"))
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    found = validation.measure(model)
    assert (found.rows, found.rows_per_pass, found.device) == (3, 2, "cpu")
    with pytest.raises(TypeError):
        validation.measure(model)
    assert [training for training, _, _ in seen] == [False] * 3
    assert not any(grad for _, grad, _ in seen)
    assert [part.training for part in model] == [False, True, True]
    assert model.training
    assert torch.equal(torch.rand(5), expected)


def test_the_loss_is_the_mean_over_rows_whatever_the_passes():
    tokens = np.arange(7, dtype=np.int64).reshape(7, 1)
    model = torch.nn.Linear(1, 1)

    def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.double().mean()

    for size in (1, 2, 3, 7, 9):
        found = Validation(loss, tokens, rows_per_pass=size, device=torch.device("cpu"))
        assert found.measure(model).loss == pytest.approx(3.0, rel=1e-15)


def test_a_function_that_gives_no_number_is_told_at_once():
    tokens = np.zeros((2, 2), dtype=np.int64)
    for wrong in (lambda m, t: t.float(), lambda m, t: 1.0):
        validation = Validation(wrong, tokens, rows_per_pass=2, device=torch.device("cpu"))
        with pytest.raises(ValueError, match="one number"):
            validation.measure(torch.nn.Linear(1, 1))


# ---- the judgement ------------------------------------------------------------------------------


def measured(loss: float, **more: Any) -> Validated:
    fields = {"digest": "d", "rows": 8, "rows_per_pass": 2, "device": "cpu", "seconds": 0.1}
    return Validated(loss=loss, **{**fields, **more})


@settings(max_examples=40)
@given(st.floats(1e-3, 1e3), st.floats(-3, 3), st.sampled_from([1e-6, 1e-5, 1e-2]))
def test_a_loss_passes_within_the_tolerance_and_not_beyond(loss, factor, tolerance):
    allowed = tolerance * max(1.0, loss)
    found = judge_loss(measured(loss), measured(loss + factor * allowed), tolerance)
    assert found.tolerance == allowed
    if abs(abs(factor) - 1) > 1e-3:  # not on the edge, where it is a matter of rounding
        assert bool(found.problems) == (abs(factor) > 1)
    assert found.same_bits == (loss == loss + factor * allowed)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_passes_only_for_itself(loss):
    assert judge_loss(measured(loss), measured(loss)).problems == ()
    assert judge_loss(measured(loss), measured(2.0)).problems
    assert judge_loss(measured(2.0), measured(loss)).problems
    assert judge_loss(measured(2.0), measured(loss), 1e9).problems


def test_what_cannot_be_compared_is_a_note_or_a_problem_and_never_silent():
    assert judge_loss(None, None).notes
    assert judge_loss(None, measured(1.0)).notes
    assert "no longer calls" in judge_loss(measured(1.0), None).problems[0]
    for other in ({"digest": "e"}, {"rows": 7}):
        found = judge_loss(measured(1.0), measured(1.0, **other))
        assert "rows to validate on are others" in found.problems[0]
        assert (found.difference, found.same_bits) == (None, None)


def test_a_device_of_another_kind_is_let_differ_more():
    values = [tolerance_of(*pair) for pair in (("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"))]
    assert values == sorted(set(values))


def test_what_is_not_finite_and_a_norm_that_differs_are_told():
    clean = {"findings": [], "param_norm": 2.0}
    assert judge_state({"param_norm": 2.0 * (1 + 1e-9)}, clean) == ()
    assert judge_state({}, clean) == ()
    assert judge_state({"param_norm": None}, clean) == ()
    assert "the norm of the parameters is 2.0" in judge_state({"param_norm": 2.1}, clean)[0]
    bad = {"findings": [{"text": "w: 1 of 2 values on rank 0 are not finite"}], "param_norm": None}
    assert judge_state({"param_norm": 2.0}, bad) == ("restored, w: 1 of 2 values are not finite",)


@settings(max_examples=30)
@given(st.floats())
def test_a_manifest_keeps_every_bit_of_the_loss(loss):
    from making import manifest_of

    from ray_ckpt.checkpoint.manifest import FileEntry

    said = measured(loss).to_json()
    manifest = manifest_of(
        run="r",
        step=1,
        files=(FileEntry("a", 0, "0" * 32),),
        metrics={"validation_loss": loss},
        validation=said,
    )
    read = Manifest.from_json(json.loads(json.dumps(manifest.to_json(), allow_nan=False)))
    found = expected_of(read)
    assert found is not None
    assert found.loss.hex() == loss.hex() == float(read.metrics["validation_loss"]).hex()
    assert replace(found, loss=0.0) == replace(measured(loss), loss=0.0)
    assert expected_of(replace(read, validation={})) is None
    with pytest.raises(RestoreError, match="cannot be understood"):
        expected_of(replace(read, validation={"loss_hex": "soon"}))


# ---- the record ---------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.none() | st.floats(), st.lists(st.text(max_size=5), max_size=3), st.booleans())
def test_a_record_reads_as_it_was_written(tmp_path_factory, loss, problems, ok):
    place = tmp_path_factory.mktemp("step") / "step"
    place.mkdir()
    drilled = replace(GOOD, loss=loss, difference=loss, problems=tuple(problems), ok=ok)
    add_drill(place, drilled)
    (found,) = read_drills(place)
    assert repr(found) == repr(drilled)  # NaN is not equal to itself
    assert found.words


def test_the_newest_drills_stay_and_the_checkpoint_is_as_whole_as_before(run):
    place = folder(run, 50)
    for number in range(KEPT + 3):
        add_drill(place, replace(GOOD, time=float(number)))
    assert [drill.time for drill in read_drills(place)] == [float(3 + n) for n in range(KEPT)]
    assert verify_files(place, read_manifest(place)) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '[{"time": "x", "ok": 1}]', "[{}]"])
def test_a_damaged_record_is_no_record_and_stands_in_nobodys_way(run, text):
    place = folder(run, 50)
    (place / DRILLS_NAME).write_text(text)
    assert read_drills(place) == ()
    add_drill(place, GOOD)
    assert read_drills(place) == (GOOD,)


# ---- the hold -----------------------------------------------------------------------------------


def test_what_is_drilled_cannot_be_deleted_until_it_is_done(run):
    with drilling(run), held(folder(run, 10)):
        found = tidy(run, keep=1)
        assert {e.step for e in list_checkpoints(run)} == {10, 50}
        (verdict,) = [v for v in found.verdicts if v.name == folder(run, 10).name]
        assert AUTHOR in verdict.reasons[0]
    assert pins.read_pins(folder(run, 10)) == ()
    tidy(run, keep=1)
    assert {e.step for e in list_checkpoints(run)} == {50}


def test_one_drill_at_a_time(run):
    with drilling(run):
        with pytest.raises(ConfigError, match=f'"pid": {os.getpid()}'):
            with drilling(run, wait_s=0.0):
                pass
    with drilling(run, wait_s=0.0):
        pass


def test_a_dead_drills_pin_goes_and_a_living_ones_and_a_persons_stay(run):
    script = (
        "import os, sys; from pathlib import Path; from ray_ckpt.tiers.hold import drilling, held\n"
        "run = Path(sys.argv[1])\n"
        "with drilling(run), held(run / 'checkpoints' / sys.argv[2]):\n"
        "    os.kill(os.getpid(), 9)"
    )
    pins.pin(folder(run, 20), "in the paper", author="me", time_s=1.0)
    done = subprocess.run(
        [sys.executable, "-c", script, str(run), folder(run, 20).name], check=False
    )
    assert done.returncode == -9
    assert [pin.author for pin in pins.read_pins(folder(run, 20))] == ["me", AUTHOR]
    tidy(run, keep=1)
    assert [pin.author for pin in pins.read_pins(folder(run, 20))] == ["me"]
    with drilling(run), held(folder(run, 50)):
        release_dead(run)
        tidy(run, keep=1)
        assert [pin.author for pin in pins.read_pins(folder(run, 50))] == [AUTHOR]
    assert {e.step for e in list_checkpoints(run)} == {20, 50}


def test_a_run_that_was_never_drilled_gets_no_lock_from_its_housekeeping(run):
    release_dead(run)
    tidy(run)
    assert not list(run.glob(".drill*"))


# ---- the journal --------------------------------------------------------------------------------


def test_a_tracker_takes_each_drill_on_record_once(tmp_path):
    run = Run(tmp_path / "demo", KEEP_2)
    run.begin()
    run.train(10)
    name = run.save()
    place = run.dir / "checkpoints" / name
    add_drill(place, GOOD)
    add_drill(place, BAD)
    for _ in range(3):
        run.train(10)
        run.save()
        if run.journal("drill"):
            break
    drills = run.journal("drill")
    assert [(e["name"], e["step"], e["ok"], e["drilled_at"]) for e in drills] == [
        (name, 10, True, 1e9),
        (name, 10, False, 2e9),
    ]
    (alert,) = run.journal("alert")
    assert alert["problem"] == "a drill failed: the validation loss is 3.0; more"
    assert alert["name"] == name
    run.open()  # another tracker, which knows what the first one wrote
    run.begin()
    run.train(10)
    run.save()
    assert len(run.journal("drill")) == 2
    assert (
        tell(drills[0])
        == f"drilled {name}: restored in 3.2s on here, loss 2.5000, the same bits as at its commit"
    )
    assert "DRILL FAILED" in (tell(drills[1]) or "")


def test_damage_that_a_drill_found_is_looked_for_again_before_older_ones_go(tmp_path):
    """The drill's word quarantines nothing; but a checkpoint is no longer trusted for having been read before."""
    run = Run(tmp_path / "demo", KEEP_2)
    run.begin()
    for _ in range(4):
        run.train(10)
        run.save()
    (name,) = [e["name"] for e in run.journal("verified")][-1:]
    assert name in run.core.memory.verified
    fault = {"path": "__0_0.distcp", "fault": "checksum differs"}
    add_drill(run.dir / "checkpoints" / name, replace(BAD, faults=(fault,)))
    run.core._keeper.after_save()
    assert run.journal("drill")[-1]["faults"] == [fault]
    assert not run.journal("quarantine")
    run.open()
    assert name not in run.core.memory.verified


# ---- where people look --------------------------------------------------------------------------


def call(capsys, *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_ls_and_show_tell_of_the_newest_drill(run, capsys):
    assert "DRILLED" not in call(capsys, "ls", run)[1]
    add_drill(folder(run, 50), replace(GOOD, time=time.time() - 200))
    add_drill(folder(run, 40), replace(GOOD, time=1.0))
    add_drill(folder(run, 40), replace(BAD, time=time.time()))
    lines = call(capsys, "ls", run)[1].splitlines()
    assert "DRILLED" in lines[0]
    assert "ok in 3.2 s, 3m 20s ago" in lines[1]
    assert "FAILED" in lines[2]
    listed = json.loads(call(capsys, "ls", run, "--json")[1])
    assert [item["drilled"] and item["drilled"]["ok"] for item in listed[:3]] == [True, False, None]
    assert listed[0]["drilled"]["bytes_per_s"] == 200.0
    shown = call(capsys, "show", run, 50)[1]
    assert "drilled" in shown
    assert "ok, 3.2 s, loss 2.5, the same bits" in shown
    assert "FAILED: the validation loss is 3.0, and 1 more" in call(capsys, "show", run, 40)[1]


JOB = """
from ray_ckpt.config import Config
def job(run_dir, arguments):
    config = Config(run=run_dir.name, storage=str(run_dir.parent), data=("/nowhere",))
    return config, lambda config: None
def elsewhere(run_dir, arguments):
    return Config(run="other", storage=str(run_dir.parent)), lambda config: None
"""


def test_the_command_says_what_is_wrong_with_its_use(run, capsys, tmp_path):
    job = tmp_path / "my_job.py"
    job.write_text(JOB)
    young = tmp_path / "young"
    (young / "checkpoints").mkdir(parents=True)
    for wrong, said in (
        ([run, "--job", tmp_path / "no.py"], "there is no such file"),
        ([run, "--job", f"{job}:train"], "has no function train"),
        ([run, "--job", "no_such_module:f"], "cannot be imported"),
        ([run, "--job", f"{job}:elsewhere"], "it gave the options of"),
        ([run, "--job", job, "--step", "70"], "no checkpoint 70"),
        ([run, "--job", job, "--every-s", "-1"], "--every-s"),
        ([run, "--job", job, "--every-s", "5", "--step", "50"], "--every-s"),
        ([run, "--job", job], "--data"),
        ([young, "--job", job], "nothing to drill"),
        ([tmp_path / "none", "--job", job], "is not a run"),
    ):
        code, out, err = call(capsys, "drill", *wrong)
        assert (code, out) == (2, ""), wrong
        assert said in err, (wrong, err)
    # No drill was made: none is on record, and no pin stays.
    assert not list(tmp_path.glob("**/DRILLED.json"))
    assert not list(tmp_path.glob("**/PINNED.json"))


def test_help_states_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["drill", "--help"])
    text = capsys.readouterr().out
    assert "exit codes:" in text
    assert "a drill failed" in text


def test_a_job_is_found_by_file_and_by_module(tmp_path, monkeypatch):
    (tmp_path / "some_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for text in ("some_job.py", "some_job.py:job", "some_job:job", str(tmp_path / "some_job.py")):
        assert load_job(text)(tmp_path / "mine", [])[0].run == "mine"
    with contextlib.suppress(KeyError):
        del sys.modules["some_job"]


def test_what_a_run_has_on_record_are_options_of_the_main_job(tmp_path):
    from pretrain import PretrainConfig

    recorded = {
        "--global-batch": 48,
        "--micro-batch": 4,
        "--seq-len": 64,
        "--seed": 7,
        "--exact": True,
        "--reading.window-groups": 2,
        "--data (fingerprint of its content)": "abc",
        "--init-from (fingerprint of its content)": "",
        "--model.dim": 32,
        "--model.hidden-dim": None,
        "--model.tied-embeddings": False,
        "--model.ffn-multiple": 8 / 3,
    }
    write_record(tmp_path, RunRecord.of(recorded))
    config = parse(PretrainConfig, recorded_flags(tmp_path))
    assert (config.global_batch, config.micro_batch, config.seq_len) == (48, 4, 64)
    assert (config.seed, config.exact, config.reading.window_groups) == (7, True, 2)
    assert (config.model.dim, config.model.hidden_dim) == (32, None)
    assert (config.model.tied_embeddings, config.model.ffn_multiple) == (False, 8 / 3)
    with pytest.raises(ConfigError, match="never started"):
        recorded_flags(tmp_path / "none")
