"""The guard finds what is not finite wherever it is, and is silent in ordinary training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.checkpoint import scan as scan_module
from ray_ckpt.checkpoint.guard import (
    FEW_SAVES,
    GuardRule,
    is_nonfinite,
    judge,
    out_of_band,
    reason,
    report,
    with_step,
)
from ray_ckpt.checkpoint.scan import look, scan_state
from ray_ckpt.config import GuardConfig
from ray_ckpt.elastic.repeatable import Kernels, repeatable
from ray_ckpt.errors import ConfigError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2]
RULE = GuardRule()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks in a small tensor."""
    monkeypatch.setattr(scan_module, "CHUNK", 16)


def make_state() -> dict:
    return {
        "model": {
            "a.weight": torch.ones(7, 9),
            "a.bias": torch.ones(3),
            "count": torch.ones(2).int(),
        },
        "optimizer": {"state.a.weight.exp_avg": torch.zeros(7, 9), "state.step": torch.tensor(4.0)},
        "ema": {"a.weight": torch.ones(7, 9)},
        "mine": {"best": torch.tensor(math.inf)},
    }


# ---- looking --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    squares=st.booleans(),
    layout=st.sampled_from(["dense", "transposed", "strided"]),
    data=st.data(),
)
def test_one_bad_value_at_any_place_of_any_tensor_is_found(
    dtype, shape, bad, squares, layout, data
):
    base = torch.zeros([2 * n if layout == "strided" else n for n in shape])
    tensor = base[tuple(slice(None, None, 2) for _ in shape)] if layout == "strided" else base
    tensor = (
        tensor.permute(list(reversed(range(tensor.dim())))) if layout == "transposed" else tensor
    )
    assert look(tensor.to(dtype), squares=squares)[0] == 0
    place = data.draw(st.integers(0, tensor.numel() - 1))
    tensor[np.unravel_index(place, tensor.shape)] = bad
    cast = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype).copy_(tensor)
    assert look(cast, squares=squares)[0] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("squares", [False, True])
def test_the_largest_numbers_are_finite(dtype, squares):
    """Their sums and squares are not, which must not be held against them."""
    largest = torch.finfo(dtype).max
    assert look(torch.full((40,), largest, dtype=dtype), squares=squares)[0] == 0


@pytest.mark.parametrize("part", ["model", "optimizer", "ema"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_looks_at_every_tensor_of_model_optimizer_and_averages(part, rank):
    for name, tensor in make_state()[part].items():
        if not tensor.is_floating_point():
            continue
        state = make_state()
        state[part][name].view(-1)[-1] = math.nan
        scans = [scan_state(state if r == rank else make_state(), rank=r) for r in range(2)]
        found = report(scans)
        assert not found["ok"]
        assert [(f["tensor"], f["rank"]) for f in found["findings"]] == [(f"{part}.{name}", rank)]
        assert f"{part}.{name}: 1 of {tensor.numel()} values on rank {rank}" in reason(
            judge(found, [], RULE)
        )


def test_a_value_that_all_ranks_hold_counts_once_and_an_item_of_the_users_own_not_at_all():
    found = report([scan_state(make_state(), rank=rank) for rank in range(3)])
    assert found["ok"]
    assert found["param_norm"] == pytest.approx(math.sqrt(7 * 9 + 3))
    assert found["checked_tensors"] == 5


def test_a_tensor_that_may_hold_anything_is_passed_over_by_its_first_names():
    state = make_state()
    state["model"]["mask"] = torch.tensor([0.0, -math.inf])
    assert not report([scan_state(state, rank=0)])["ok"]
    assert report([scan_state(state, rank=0, ignore=["model.mask"])])["ok"]
    assert not report([scan_state(state, rank=0, ignore=["model.mas", "odel.mask"])])["ok"]


def test_looking_needs_no_copy_of_the_whole(monkeypatch):
    monkeypatch.setattr(scan_module, "CHUNK", 1 << 16)
    psutil = pytest.importorskip("psutil")
    state = {"model": {"w": torch.ones(1 << 20, 4).t()}, "optimizer": {"m": torch.ones(4 << 20)}}
    scan_state(state, rank=0)
    process, most = psutil.Process(), 0
    before = process.memory_info().rss
    dot = torch.dot

    def watched(a, b):
        nonlocal most
        most = max(most, process.memory_info().rss - before)
        return dot(a, b)

    monkeypatch.setattr(torch, "dot", watched)
    assert not scan_state(state, rank=0).bad
    assert most < 4 << 20, "a tensor has 16 MiB"


def test_a_report_names_a_few_of_many_tensors_and_counts_the_rest():
    state = {"model": {f"w{i}": torch.tensor([math.nan]) for i in range(50)}}
    found = report([scan_state(state, rank=0)])
    assert len(found["findings"]) + found["more_findings"] == 50
    assert "and 49 more" in reason(found["findings"], found["more_findings"])


# ---- judging --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    start=st.floats(1e-3, 1e3),
    moves=st.lists(st.floats(-0.15, 0.15), min_size=1, max_size=60),
    growth=st.floats(0.0, 0.15),
)
def test_a_norm_that_wanders_or_grows_as_in_training_is_let_pass(start, moves, growth):
    """Up to 35 % from save to save, also all in one direction, as in a warm-up."""
    norms = [start]
    for move in moves:
        norms.append(norms[-1] * math.exp(move + growth))
    for end in range(len(norms)):
        assert out_of_band(norms[end], norms[:end], RULE) is None


@settings(max_examples=100, deadline=None)
@given(
    norms=st.lists(st.floats(0.9, 1.1), min_size=FEW_SAVES, max_size=12),
    factor=st.sampled_from([0.0, 1e-300, 0.01, 0.1, 10.0, 1e6, 1e300]),
)
def test_weights_that_were_scaled_or_zeroed_are_refused(norms, factor):
    strange = out_of_band(factor, norms, RULE)
    assert strange is not None
    assert "--guard.band-factor 4" in strange.text
    assert not is_nonfinite(judge({"findings": [], "param_norm": factor}, norms, RULE))
    assert out_of_band(factor, norms[: FEW_SAVES - 1], RULE) is None, "too little is known"
    assert out_of_band(factor, norms, GuardRule(band_factor=0)) is None


@given(st.floats(5.0, 1e6), st.integers(FEW_SAVES, 20))
def test_a_level_that_stays_is_not_refused_forever(factor, saves):
    rule = GuardRule(band_saves=max(saves, FEW_SAVES))
    norms = [1.0] * saves
    while out_of_band(factor, norms, rule) is not None:
        norms.append(factor)
    assert 1 <= len(norms) - saves <= rule.band_saves // 2 + 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_step_that_is_not_finite_is_refused_and_one_without_numbers_is_not(name, value):
    found = report([scan_state(make_state(), rank=0)])
    silent = {"loss": None, "grad_norm": None}
    assert judge(with_step(found, **silent), [], RULE) == []
    assert judge(with_step(found, loss=1.0, grad_norm=0.0), [], RULE) == []
    findings = judge(with_step(found, **{**silent, name: value}), [], RULE)
    assert [f["kind"] for f in findings] == [name]
    assert is_nonfinite(findings)
    assert str(value) in reason(findings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"on_nonfinite": "hope"}, ["--guard.on-nonfinite", "rollback-and-skip"]),
        ({"max_rollbacks": 0}, ["--guard.max-rollbacks 0", "at least 1"]),
        ({"band_factor": 1.0}, ["--guard.band-factor 1.0", "more than 1"]),
        ({"band_factor": math.nan}, ["--guard.band-factor nan"]),
        ({"band_saves": 3}, ["--guard.band-saves 3", "at least 4"]),
        ({"ignore": ("",)}, ["--guard.ignore", "would ignore nothing"]),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(changes, words):
    with pytest.raises(ConfigError) as caught:
        GuardConfig(**changes)
    assert all(word in str(caught.value) for word in words)


# ---- repeating ------------------------------------------------------------------------------------

FIXED = Kernels(
    device="cuda", deterministic=True, benchmark=False, cublas_workspace=":4096:8", threads=1
)


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [
        ({}, True),
        ({"deterministic": False}, False),
        ({"benchmark": True}, False),
        ({"cublas_workspace": ""}, False),
        ({"device": "cpu", "deterministic": False, "cublas_workspace": ""}, True),
    ],
)
def test_bits_are_called_comparable_only_where_kernels_repeat_them(changes, repeats):
    import dataclasses

    found, why = repeatable(dataclasses.replace(FIXED, **changes))
    assert found is repeats
    assert why
