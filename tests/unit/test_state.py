"""The state table without processes: what can be saved, under which names, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

from ray_ckpt.errors import RestoreError, StateError
from ray_ckpt.state import rng
from ray_ckpt.state.codec import decode, encode, pack, tensor_paths, unpack
from ray_ckpt.state.fit import Allowed, Difference
from ray_ckpt.state.parts import Entry, ModulePart
from ray_ckpt.state.schedule import warmup_cosine
from ray_ckpt.state.train_state import TrainState

CPU = torch.device("cpu")


def through_storage(value: dict[str, Any]) -> Any:
    document, tensors = pack(value, "item")
    return unpack(decode(encode(document)), tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, all bits of floats included."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and repr(a.tolist()) == repr(b.tolist())  # NaN is NaN
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


# ---- nested values -----------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
)
keys = st.one_of(st.text(alphabet="ab~", max_size=2), st.integers(2, 5))
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(alphabet="ab~", min_size=1, max_size=2), nested, max_size=4))
def test_any_nested_state_comes_back_with_its_types(value: dict[str, Any]) -> None:
    assert same(through_storage(value), value)
    document, tensors = pack(value, "item")
    assert {path for path, _ in tensor_paths(document)} == set(tensors)


def test_kinds_of_dicts_and_special_numbers_come_back() -> None:
    value = {
        "counter": Counter({3: 2, 8: 1}),
        "ordered": OrderedDict([("z", 1), ("a", torch.arange(2))]),
        "numbers": [math.inf, -0.0, 1e-320, 2**70, True],
        "mixed": {1: "int", "x": None},
        "shape": torch.Size([2, 3]),
    }
    back = through_storage(value)
    assert same(back, {**value, "shape": (2, 3)})
    assert math.isnan(through_storage({"x": math.nan})["x"])
    assert list(back["counter"].elements()) == [3, 3, 8]
    assert same(
        through_storage({"n": np.float32(0.1), "i": np.int64(4)}),
        {"n": 0.10000000149011612, "i": 4},
    )


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": [1, lambda x: x]}}, ["item.a.b.1", "a function", "Leave functions out"]),
        ({"a": np.zeros(2)}, ["item.a", "torch.from_numpy"]),
        ({"a": {1, 2}}, ["item.a", "sorted"]),
        ({"a": b"x"}, ["item.a", "torch.frombuffer"]),
        ({"a": Pair(1, 2)}, ["item.a", "a Pair cannot be saved without pickle"]),
        ({"a": {(1, 2): 3}}, ["item.a.(1, 2)", "key of type tuple"]),
        ({"a": {True: 3}}, ["item.a.True", "key of type bool"]),
        ({"a": torch.eye(2).to_sparse()}, ["item.a", "dense"]),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ["item.a.b", "two tensors"]),
        ({"a": {1: torch.ones(1), "1": torch.ones(1)}}, ["item.a.1", "two tensors"]),
        ([1], ["item", "gave a list"]),
    ],
)
def test_what_needs_pickle_is_refused_with_its_path_and_the_way_out(
    value: Any, words: list[str]
) -> None:
    with pytest.raises(StateError) as caught:
        pack(value, "item")
    for word in words:
        assert word in str(caught.value)


def test_damaged_scalars_are_an_error() -> None:
    for text in (b"{", b"[1]", b"\xff"):
        with pytest.raises(RestoreError):
            decode(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    with pytest.raises(RestoreError, match="kind 'frozenset'"):
        unpack({"~": "frozenset", "of": []}, dict)


# ---- names and both sides ----------------------------------------------------------------------------


def test_wrappers_do_not_show_in_names() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"module": nn.Linear(2, 1)}))

    plain = ModulePart("model", net())
    names = set(plain.pack()[1])
    assert "1.module.weight" in names  # a user's own "module" is no wrapper
    inner = net()
    inner[0] = checkpoint_wrapper(inner[0])
    for wrapped in (nn.DataParallel(net()), inner):  # torch.compile, dear to import, in tests/dist
        part = ModulePart("model", wrapped)
        assert set(part.pack()[1]) == names
        assert set(part.parameter_names().values()) == names
        part.load({}, plain.pack()[1])
        for name, tensor in part.pack()[1].items():
            assert torch.equal(tensor, plain.pack()[1][name])
    assert set(ModulePart("ema", AveragedModel(net())).pack()[1]) == {*names, "n_averaged"}


def test_allowed_names_end_at_dots() -> None:
    allowed = Allowed(("model.head", "ema", "optimizer.groups.0."))
    assert all(n in allowed for n in ("model.head", "model.head.weight", "ema", "ema.x.y"))
    assert "optimizer.groups.0.lr" in allowed
    assert not any(n in allowed for n in ("model.header.weight", "model", "emas", "scaler"))


def test_the_error_lists_items_before_tensors_and_both_sides() -> None:
    difference = Difference(Allowed(("c",)))
    difference.compare("tensors and settings", ["model.x"], ["model.y", "c.z"])
    difference.compare("items", ["a", "b"], ["b", "c"])
    with pytest.raises(RestoreError) as caught:
        difference.settle("step-1")
    assert (
        "Not in the checkpoint: items: a; tensors and settings: model.x. Only in the checkpoint: items: nothing; "
        "tensors and settings: model.y."
    ) in str(caught.value)
    difference = Difference(Allowed())
    difference.compare_entry("w", Entry((2, 3), torch.float32), Entry((4,), torch.bfloat16))
    with pytest.raises(RestoreError, match=r"w is float32 \[2, 3\] here and bfloat16 \[4\] in"):
        difference.settle("step-1")


def test_names_of_items_are_checked() -> None:
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model=model, optimizer=opt)
    for name in ("", "a.b", "model", "rng", "per_rank", "scalars"):
        with pytest.raises(StateError, match="a name has letters"):
            state.register(name, opt)
    state.register("mine", opt)
    with pytest.raises(StateError, match="there is an item of this name"):
        state.register("mine", opt, per_rank=True)
    with pytest.raises(StateError, match=r"a dict has no state_dict\(\)"):
        state.register("other", {})  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(StateError, match=r"shape \[1, 2\] that the model does not have"):
        TrainState(model=model, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(StateError, match=r"optimizer.state.bias: two optimizers"):
        TrainState(model=model, optimizer=both)


def test_an_item_that_fails_to_load_is_named() -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"version": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("level")

    state, _ = small(torch.optim.SGD)
    state.register("picky", Picky())
    with pytest.raises(
        RestoreError, match=r"picky: load_state_dict\(\) failed .*KeyError: 'level'"
    ):
        state.load_state_dict(state.state_dict())


# ---- optimizers and schedulers -----------------------------------------------------------------------


def small(
    kind: Any, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[TrainState, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    return TrainState(model=model, optimizer=kind(model.parameters(), lr=0.1, **more)), model


def copied(state: TrainState) -> dict[str, Any]:
    """What storage gives back: new tensors."""
    return copy.deepcopy(state.state_dict())


def test_a_table_takes_no_hidden_step() -> None:
    """Adam's state is made early, as its first step would make it; nobody else's is."""
    seen = []
    for early in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True, eps=0.0)
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        if early:
            TrainState(model=model, optimizer=optimizer).state_dict()
            assert len(optimizer.state) == 2
        assert all(p.grad is None for p in model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        seen.append(
            (steps, [p.tolist() for p in model.parameters()], optimizer.state_dict()["state"])
        )
    assert seen[0][:2] == seen[1][:2]
    assert same(seen[0][2], seen[1][2])
    state, _ = small(torch.optim.SGD, momentum=0.9)
    assert "optimizer" not in state.state_dict()
    assert not state.optimizer.state


class Wide(torch.optim.SGD):
    """Keeps float32 state of bfloat16 parameters, words and nested values."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                wide = torch.full(p.shape, 1 / 3, dtype=torch.float32)
                self.state[p] |= {"wide": wide, "how": "so", "deep": {1: [wide + 1, (2, None)]}}


def test_optimizer_state_keeps_its_types() -> None:
    """torch casts it to the parameter's type on load, and mangles words."""
    first, model = small(Wide, torch.bfloat16)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    first.optimizer.step()
    second, _ = small(Wide, torch.bfloat16)
    second.load_state_dict(copied(first))
    a, b = (s.optimizer.state_dict()["state"] for s in (first, second))
    assert same(a, b)
    assert b[0]["wide"].dtype == torch.float32


MAKE_SCHEDULER = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "warmup": lambda o: warmup_cosine(o, 3, 12, 0.1),
    "multi-step": lambda o: schedulers.MultiStepLR(o, [2, 4, 4, 7], gamma=0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "one-cycle": lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 3), schedulers.StepLR(o, 2, 0.9)], optimizer=o
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, cooldown=1),
}


@pytest.mark.parametrize("kind", MAKE_SCHEDULER)
def test_every_scheduler_goes_on_where_it_was(kind: str) -> None:
    metrics = [3.0, 2.0, 2.5, 2.6, 2.7, 2.7, 2.7, 2.8, 1.0, 1.1, 1.2, 1.3]

    def make() -> TrainState:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = MAKE_SCHEDULER[kind](optimizer)
        return TrainState(model=model, optimizer=optimizer, scheduler=scheduler)

    def run(state: TrainState, values: list[float]) -> list[float]:
        rates = []
        optimizer, scheduler = state.optimizer, state._parts["scheduler"]
        for value in values:
            optimizer.step()
            scheduler.step(value) if kind == "plateau" else scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    whole = run(make(), metrics)
    first, second, third = make(), make(), make()
    run(first, metrics[:4])
    second.load_state_dict(copied(first))
    run(second, metrics[4:6])
    third.load_state_dict(copied(second))
    assert run(third, metrics[6:]) == whole[6:]
    json.loads(first.state_dict()["scalars"].numpy().tobytes())


# ---- random generators -------------------------------------------------------------------------------


def draw() -> dict[str, Any]:
    """Numbers of each generator; the second normal number of a pair comes from a cache."""
    legacy = np.random.standard_normal()  # noqa: NPY002
    return {
        "gauss": (random.gauss(0, 1), legacy),
        "python": random.random(),
        "numpy": np.random.randint(1 << 30),  # noqa: NPY002
        "torch": torch.rand(3).tolist(),
    }


@pytest.mark.parametrize("row", ["python", "numpy", "gauss", "torch", None])
def test_each_generator_is_restored_and_missed_when_it_is_not(row: str | None) -> None:
    rng.seed_all(1, 2, 3)
    draw()  # leaves half a pair of normal numbers in the caches
    state = {name: tensor.clone() for name, tensor in rng.capture(CPU).items()}
    assert set(state) == {"python", "numpy", "gauss", "torch"}
    expected = draw()
    rng.seed_all(4, 5, 6)
    others = rng.capture(CPU)
    rng.apply({**state, **({row: others[row]} if row else {})}, CPU)
    found = draw()
    if row is None:
        assert found == expected
    else:
        assert found[row] != expected[row]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_the_gpu_is_restored() -> None:
    device = torch.device("cuda", 0)
    rng.seed_all(1, 2, 3)
    torch.rand(2, device=device)
    state = rng.capture(device)
    expected = torch.rand(3, device=device).tolist()
    rng.seed_all(4, 5, 6)
    rng.apply({k: v for k, v in state.items() if k != "cuda"}, device)
    assert torch.rand(3, device=device).tolist() != expected
    rng.apply(state, device)
    assert torch.rand(3, device=device).tolist() == expected


def test_derived_numbers_depend_on_seed_step_and_micro_batch_alone() -> None:
    seen = {}
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        random.seed(), torch.seed()
        rng.seed_all(*key)
        seen[key] = draw()
        rng.seed_all(*key)
        assert draw() == seen[key]
    for part in ("python", "numpy", "torch"):
        assert len({str(numbers[part]) for numbers in seen.values()}) == len(seen)
