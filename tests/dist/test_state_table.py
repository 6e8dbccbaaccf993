"""Every row of the state table comes back, for every kind of optimizer, and into every kind of world."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from making import manifest_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from worlds import make_config, make_data, open_session, run_world, train

from ray_ckpt.checkpoint.digest import state_digest
from ray_ckpt.checkpoint.manifest import FileEntry, Manifest
from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.checkpoint.restore import load, with_rng
from ray_ckpt.checkpoint.verify import hash_file
from ray_ckpt.checkpoint.writer import ChecksumWriter
from ray_ckpt.config import SavingConfig
from ray_ckpt.errors import RestoreError
from ray_ckpt.state import rng
from ray_ckpt.state.parts import ModulePart
from ray_ckpt.state.train_state import PER_RANK, Progress, TrainState

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
LATE = 3  # the step from which a layer has gradients


# ---- a small run that uses every row -----------------------------------------------------------------


class Net(nn.Module):
    """Tied weights, a frozen layer, a buffer, dropout, and a layer without gradients until a step."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.frozen = nn.Linear(width, width)
        self.hidden = nn.Linear(width, width)
        self.late = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.calls = nn.Buffer(torch.tensor(0))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        self.calls += 1
        x = self.hidden(self.frozen(self.embed(tokens)))
        if step >= LATE:
            x = x + self.late(x)
        return self.head(self.norm(nn.functional.dropout(x, 0.2)))


def legacy_numpy() -> float:
    """A number of NumPy's global generator, which users' code still draws from; the second of a pair is cached."""
    return float(np.random.standard_normal())  # noqa: NPY002


class Curriculum:
    """A user's object: numbers, words, tensors and a tensor that is sharded where the model is."""

    def __init__(self, sharded: bool) -> None:
        whole = torch.zeros(5, 3)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
        self.table = distribute_tensor(whole, mesh, [Shard(0)]) if mesh else whole
        self.levels: dict[int, Any] = {}
        self.losses = torch.zeros(0)

    def see(self, step: int, loss: float) -> None:
        self.table = self.table + loss * 1e-3
        self.losses = torch.cat([self.losses, torch.tensor([loss])])
        self.levels[step] = (f"level {step}", [loss, None, step > 1])

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table, "levels": self.levels, "nested": {"losses": [self.losses]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table, self.levels = state["table"], state["levels"]
        self.losses = state["nested"]["losses"][0]


class Noise:
    """A user's object that differs from rank to rank."""

    def __init__(self) -> None:
        self.value, self.buffer = 0.0, torch.zeros(2)

    def see(self, loss: float) -> None:
        self.value += loss * (dist.get_rank() + 1)
        self.buffer += self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.buffer = state["value"], state["buffer"]


def spread(net: nn.Module, parallel: str) -> nn.Module:
    if parallel == "fsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return DistributedDataParallel(net, find_unused_parameters=True)


def groups(model: nn.Module, wrong: bool) -> list[dict[str, Any]]:
    """Groups with settings of their own: all parameters, one that is frozen, and none at all."""
    worse = 3.0 if wrong else 1.0
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() > 1 and "frozen" not in n]
    vectors = [p for n, p in named.items() if p.dim() == 1 and "frozen" not in n]
    frozen = [p for n, p in named.items() if n.endswith("frozen.bias")]
    return [
        {"params": matrices, "lr": 1e-2 * worse, "weight_decay": 0.1 * worse},
        {"params": vectors, "lr": 3e-3 * worse},
        {"params": frozen, "lr": 1e-3 * worse},
        {"params": [], "lr": 5e-3 * worse},
    ]


Make = Callable[[list[dict[str, Any]]], Any]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda g: torch.optim.SGD(g),
    "momentum": lambda g: torch.optim.SGD(g, momentum=0.9, dampening=0.3),
    "nesterov": lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True),
    "adamw": lambda g: torch.optim.AdamW(g),
    "amsgrad": lambda g: torch.optim.Adam(g, amsgrad=True, betas=(0.8, 0.9)),
    "tensor-lr": lambda g: torch.optim.AdamW(
        [{**each, "lr": torch.tensor(each["lr"])} for each in g], foreach=False
    ),
    "adagrad": lambda g: torch.optim.Adagrad(g, initial_accumulator_value=0.1),
    "rmsprop": lambda g: torch.optim.RMSprop(g, centered=True, momentum=0.5),
    "nadam": lambda g: torch.optim.NAdam(g),
    "radam": lambda g: torch.optim.RAdam(g),
    "adamax": lambda g: torch.optim.Adamax(g),
    "adadelta": lambda g: torch.optim.Adadelta(g),
    "asgd": lambda g: torch.optim.ASGD(g),
    "several": lambda g: [torch.optim.AdamW(g[:1]), torch.optim.SGD(g[1:], momentum=0.9)],
}
# These do not run on DTensors in torch itself.
ONLY_DDP: dict[str, Make] = {
    "adafactor": lambda g: torch.optim.Adafactor(g),
    "rprop": lambda g: torch.optim.Rprop(
        [{k: v for k, v in e.items() if k != "weight_decay"} for e in g]
    ),
}


class Run:
    """Everything that a training function has.

    Args:
        parallel: "ddp" or "fsdp".
        kind: of the optimizer.
        fresh: made for a restore: with other weights and settings, all of which the restore must replace.
        full: with scheduler, scaler, averaged weights and items.
    """

    def __init__(
        self, parallel: str, kind: str = "adamw", *, fresh: bool = False, full: bool = False
    ) -> None:
        torch.manual_seed(9 if fresh else 1)
        net = Net()
        twin = copy.deepcopy(net)
        self.model = spread(net, parallel)
        make = {**OPTIMIZERS, **ONLY_DDP}[kind]
        self.optimizer = make(groups(self.model, fresh))
        several = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        self.optimizers: list[torch.optim.Optimizer] = several
        self.full = full
        self.steps = 0
        self.losses: list[float] = []
        if full:
            halves = [
                torch.optim.lr_scheduler.LinearLR(several[0], 0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(several[0], 9),
            ]
            self.scheduler = torch.optim.lr_scheduler.SequentialLR(several[0], halves, [2])
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            average = get_ema_multi_avg_fn(0.7)
            if parallel == "fsdp":
                self.ema = AveragedModel(twin, multi_avg_fn=average)
                fully_shard(self.ema, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            else:
                self.ema = AveragedModel(self.model, multi_avg_fn=average)
            self.curriculum, self.noise = Curriculum(parallel == "fsdp"), Noise()
        rng.seed_all(5 if fresh else 2, 0, dist.get_rank())
        self.state: TrainState | None = None

    def table(self) -> TrainState:
        """The state table; made late, so that a run that never saves has none."""
        if self.state is None:
            if not self.full:
                self.state = TrainState(model=self.model, optimizer=self.optimizer)
            else:
                self.state = TrainState(
                    model=self.model,
                    optimizer=self.optimizer,
                    scheduler=self.scheduler,
                    scaler=self.scaler,
                    ema=self.ema,
                )
                self.state.register("curriculum", self.curriculum)
                self.state.register("noise", self.noise, per_rank=True)
        self.state.progress = Progress(
            step=self.steps, samples=4 * self.steps, tokens=5 * self.steps
        )
        return self.state

    def train(self, until: int) -> Run:
        while self.steps < until:
            tokens = (torch.arange(4) + self.steps + 2 * dist.get_rank()) % 7
            weight = 1 + random.gauss(0, 0.1) + random.random() + 0.1 * legacy_numpy()
            loss = nn.functional.cross_entropy(self.model(tokens, self.steps), (tokens + 1) % 7)
            loss = loss * weight
            (self.scaler.scale(loss) if self.full else loss).backward()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer) if self.full else optimizer.step()
                optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
            self.steps += 1
            if self.full:
                self.scaler.update()
                self.scheduler.step()
                self.ema.update_parameters(self.model)
                shared = torch.tensor(self.losses[-1])
                dist.all_reduce(shared)
                self.curriculum.see(self.steps, float(shared))
                self.noise.see(self.losses[-1])
        return self

    def save(self, folder: Path) -> Run:
        state = with_rng(self.table().state_dict(), dist.get_rank(), CPU)
        dcp_save(state, storage_writer=ChecksumWriter(folder))
        return self

    def restore(self, folder: Path, world: int | None = None, allow: tuple[str, ...] = ()) -> Run:
        world = dist.get_world_size() if world is None else world
        load(self.table(), folder, manifest(folder, world), dist.group.WORLD, CPU, allow)
        self.steps = self.state.progress.step
        return self

    def digest(self) -> dict[str, Any]:
        """All that is known of the run at its end; of this rank."""
        own = [self.noise.value, self.noise.buffer.tolist()] if self.full else []
        generators = {k: v.tolist() for k, v in rng.capture(CPU).items()}
        parts = {k: v for k, v in state_digest(self.table()).items() if k != PER_RANK}
        return {**parts, "own": own, "rng": generators}


def manifest(folder: Path, world: int) -> Manifest:
    """Of the files that are there: what a manifest does not name is not read."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return manifest_of(
        run="run",
        step=1,
        world_size=world,
        files=tuple(FileEntry(path.name, *hash_file(path)) for path in files),
    )


def kinds_of_values(folder: Path) -> set[type]:
    """What DCP's metadata says of the values in a checkpoint."""
    return {type(e) for e in FileSystemReader(folder).read_metadata().state_dict_metadata.values()}


def raises(call: Callable[[], Any]) -> str:
    try:
        call()
    except RestoreError as error:
        return str(error)
    return "nothing was raised"


# ---- the optimizer matrix ----------------------------------------------------------------------------


def _matrix(rank: int, world: int, parallel: str, base: Path) -> dict[str, list[str]]:
    """Names of what differs between an uninterrupted run and one that was resumed twice, by optimizer."""
    differs = {}
    for kind in OPTIMIZERS if parallel == "fsdp" else {**OPTIMIZERS, **ONLY_DDP}:
        whole = Run(parallel, kind).train(6).digest()
        folder = base / kind
        # Before and after the step in which a layer gets its first gradient.
        Run(parallel, kind).train(2).save(folder / "a")
        second = Run(parallel, kind, fresh=True).restore(folder / "a").train(4).save(folder / "b")
        third = Run(parallel, kind, fresh=True).restore(folder / "b")
        back = second.digest()
        differs[kind] = [f"restored {k}" for k, v in third.digest().items() if v != back[k]]
        found = third.train(6).digest()
        differs[kind] += [key for key in whole if found[key] != whole[key]]
        if kinds_of_values(folder / "b") != {TensorStorageMetadata}:
            differs[kind].append("pickled values")
    return differs


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_optimizer_resumes_twice_bit_for_bit(tmp_path: Path, parallel: str) -> None:
    """Several groups, settings of their own, frozen, tied, gradient-less parameters, and an empty group.

    pytorch#192202, pytorch#143828, pytorch#192225; and the run that never saved has not taken a hidden step.
    """
    for found in run_world(_matrix, 2, parallel, tmp_path):
        assert found == {kind: [] for kind in found}
        assert len(found) >= len(OPTIMIZERS)


# ---- every row ---------------------------------------------------------------------------------------

ROWS = ["model", "optimizer", "scheduler", "scaler", "ema", "curriculum", "noise", "progress"]
GENERATORS = ["python", "numpy", "gauss", "torch"]


def _forget(run: Run, fresh: Run, fresh_rng: dict[str, torch.Tensor], row: str) -> None:
    """Puts one row back to what it was before the restore: as if it had not been restored."""
    if row in GENERATORS:
        rng.apply({**rng.capture(CPU), row: fresh_rng[row]}, CPU)
    elif row == "progress":
        run.steps = 0
    elif row in ("model", "ema"):
        getattr(run, row).load_state_dict(getattr(fresh, row).state_dict())
    else:
        getattr(run, row).load_state_dict(copy.deepcopy(getattr(fresh, row).state_dict()))


def _rows(rank: int, world: int, parallel: str, folder: Path) -> dict[str, list[str]]:
    """What differs at the end, for each row that was left out of a restore."""
    whole = Run(parallel, full=True).train(6).digest()
    Run(parallel, full=True).train(3).save(folder)
    differs = {"pickled": sorted(str(k) for k in kinds_of_values(folder))}
    for row in ["nothing", *ROWS, *GENERATORS]:
        fresh = Run(parallel, full=True, fresh=True)
        fresh_rng = rng.capture(CPU)
        run = Run(parallel, full=True, fresh=True).restore(folder)
        if row != "nothing":
            _forget(run, fresh, fresh_rng, row)
        found = run.train(6 if row != "progress" else 3).digest()
        differs[row] = [key for key in whole if found[key] != whole[key]]
    return differs


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_row_that_is_not_restored_is_found(tmp_path: Path, parallel: str) -> None:
    """torchtitan#1194: with all rows the resumed run is the uninterrupted one, without any one it is not."""
    for found in run_world(_rows, 2, parallel, tmp_path / "c"):
        assert found.pop("pickled") == [str(TensorStorageMetadata)]
        assert found.pop("nothing") == []
        for row, differs in found.items():
            assert differs, f"nobody noticed that {row} was not restored"


# ---- other worlds ------------------------------------------------------------------------------------


def _reshard(
    rank: int, world: int, parallel: str, source: tuple[Path, int] | None, out: Path
) -> dict[str, Any]:
    if source is None:
        run = Run(parallel, full=True)
    else:
        run = Run(parallel, full=True, fresh=True)
        before = {k: v.clone() for k, v in rng.capture(CPU).items()}
        run.restore(*source)
        # No rank to give them to: not restored, and derived by who knows seed, step and micro-batch.
        assert all(torch.equal(v, before[k]) for k, v in rng.capture(CPU).items())
        assert run.noise.value == 0.0
        assert isinstance(run.curriculum.table, DTensor) == (parallel == "fsdp")
    at_start = state_digest(run.table())
    at_end = state_digest(run.train(run.steps + 2).save(out).table())
    return {"at_start": at_start, "at_end": at_end}


def test_averages_and_user_tensors_reshard(tmp_path: Path) -> None:
    """FSDP on 2, DDP on 1, FSDP on 3: the same tensors, momenta, averages and user's tensors, by digest."""
    source: tuple[Path, int] | None = None
    ends: dict[str, Any] = {}
    for parallel, world in (("fsdp", 2), ("ddp", 1), ("fsdp", 3)):
        out = tmp_path / f"{parallel}{world}"
        found = run_world(_reshard, world, parallel, source, out)[0]
        for part in ("model", "optimizer", "ema", "curriculum", "progress", "scalars"):
            assert source is None or found["at_start"][part] == ends[part], part
        source, ends = (out, world), found["at_end"]


# ---- both sides --------------------------------------------------------------------------------------


def _state(net: nn.Module, **more: Any) -> TrainState:
    kind = more.pop("kind", torch.optim.AdamW)
    return TrainState(model=net, optimizer=kind(net.parameters(), lr=0.1), **more)


class Lazy:
    """Makes its state when it is first used, as optimizers and loaders do."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.data

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data = state


def _both_sides(rank: int, world: int, base: Path) -> dict[str, Any]:
    def save(state: TrainState, name: str) -> None:
        dcp_save(with_rng(state.state_dict(), 0, CPU), storage_writer=ChecksumWriter(base / name))

    def restore(state: TrainState, name: str, *allow: str) -> TrainState:
        load(state, base / name, manifest(base / name, 1), dist.group.WORLD, CPU, allow)
        return state

    def net(width: int = 2, head: bool = False) -> nn.Module:
        parts = {"body": nn.Linear(2, width), **({"head": nn.Linear(width, 1)} if head else {})}
        return nn.ModuleDict(parts)

    out: dict[str, Any] = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    first = _state(net(), scaler=scaler)
    first.progress.step = 3
    nn.init.constant_(first.model["body"].weight, 0.5)  # type: ignore[index]
    save(first, "plain")

    def with_ema() -> TrainState:
        return _state(net(head=True), ema=net(head=True))

    out["items"] = raises(lambda: restore(with_ema(), "plain"))
    allowed = ("ema", "scaler", "model.head")
    state = restore(with_ema(), "plain", *allowed)
    out["weight"] = state.model["body"].weight.tolist()  # type: ignore[index]
    out["step"] = state.progress.step
    out["tensors"] = raises(lambda: restore(_state(net(head=True), scaler=scaler), "plain"))
    out["surplus"] = raises(lambda: restore(_state(nn.ModuleDict(), kind=_none), "plain", "scaler"))
    out["shape"] = raises(lambda: restore(_state(net(3), scaler=scaler), "plain"))
    half = _state(net().to(torch.bfloat16), scaler=scaler)
    out["dtype"] = raises(lambda: restore(half, "plain"))
    other = torch.optim.Adagrad
    out["kind"] = raises(lambda: restore(_state(net(), scaler=scaler, kind=other), "plain"))
    state = restore(_state(net(), scaler=scaler, kind=other), "plain", "optimizer")
    out["kept"] = [v["step"].item() for v in state.optimizer.state.values()]

    lazy = Lazy()
    lazy.data = {"data": {"a": "b", 7: (1.5, None)}, "seen": torch.arange(3)}
    second = _state(net())
    second.register("lazy", lazy)
    save(second, "lazy")
    fresh = Lazy()
    third = _state(net())
    third.register("lazy", fresh)
    restore(third, "lazy")
    out["lazy"] = {**fresh.data, "seen": fresh.data["seen"].tolist()}
    dcp_save({"model": {"w": torch.ones(2)}, "step": 3}, checkpoint_id=base / "foreign")
    out["pickled"] = raises(lambda: restore(_state(net()), "foreign"))
    return out


def _none(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD([{"params": [], "lr": lr}])


def test_both_sides_are_listed_and_allowed_ones_start_fresh(tmp_path: Path) -> None:
    """pytorch#125528, pytorch#126881: numbers come back, also of objects that make their state lazily."""
    found = run_world(_both_sides, 1, tmp_path)[0]
    missing, surplus = found["items"].split("Only in the checkpoint")
    assert "Not in the checkpoint: items: ema; tensors and settings: model.head.bias" in missing
    assert "items: scaler" in surplus
    assert "--saving.allow-missing" in surplus
    assert found["weight"] == [[0.5, 0.5], [0.5, 0.5]]
    assert found["step"] == 3
    assert "items:" not in found["tensors"]
    assert "model.head.weight" in found["tensors"].split("Only in the checkpoint")[0]
    assert "model.body.bias" in found["surplus"].split("Only in the checkpoint")[1]
    assert "model.body.weight is float32 [3, 2] here and float32 [2, 2]" in found["shape"]
    assert "is bfloat16 [2] here and float32 [2] in the checkpoint" in found["dtype"]
    missing, surplus = found["kind"].split("Only in the checkpoint")
    assert "optimizer.groups.0.lr_decay" in missing
    assert "optimizer.groups.0.betas" in surplus
    assert found["kept"] == [0.0, 0.0]
    assert found["lazy"] == {"data": {"a": "b", 7: (1.5, None)}, "seen": [0, 1, 2]}
    assert "pickled objects (step)" in found["pickled"]


# ---- through the session -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", [16] * 8)
    return tmp_path


def _restore_with_extra(rank: int, world: int, config: Any) -> tuple[str, list[Any]]:
    """Restores with an item that the run did not have; what was raised, and the generators after it."""
    session, state, _ = open_session(rank, config)
    extra = Lazy()
    extra.data = {"fresh": True}
    state.register("extra", extra)
    message = raises(lambda: session.restore(state))
    assert extra.data == {"fresh": True}
    return message, [random.random(), legacy_numpy(), float(torch.rand(1))]


def test_allowed_names_reach_the_restore_and_another_world_derives_its_numbers(
    folder: Path,
) -> None:
    config = make_config(folder, steps=6)
    run_world(train, 2, config, 4)
    assert (config.run_dir / CHECKPOINTS_DIR / "step-00000003-g1").is_dir()
    message, _ = run_world(_restore_with_extra, 1, config)[0]
    assert "items: extra" in message
    saving = SavingConfig(timeout_s=60.0, report_to_ray=False, allow_missing=("extra",))
    allowing = make_config(folder, steps=6, saving=saving)
    message, numbers = run_world(_restore_with_extra, 1, allowing)[0]
    assert message == "nothing was raised"
    rng.seed_all(config.seed, 3, 0)
    assert numbers == [random.random(), legacy_numpy(), float(torch.rand(1))]


def _draws(rank: int, world: int, config: Any, stop: int) -> dict[tuple[int, int], list[float]]:
    """Numbers of every generator in each pass, by step and micro-batch."""
    session, state, model = open_session(rank, config)
    session.restore(state)
    seen = {}
    for batch in session.batches():
        step = state.progress.step
        for micro in batch:
            numbers = [random.random(), legacy_numpy(), float(torch.rand(1))]
            seen[step, micro.source.index] = numbers
            batch.backward(micro, model(micro.tokens[:, :-1]).square().mean())
        state.optimizer.step()
        state.optimizer.zero_grad()
        session.step_end(lr=0.0)
        session._saving.wait(60)
        if state.progress.step == stop:
            break
    session._steward.exchange(flush=True)
    return seen


def test_in_exact_mode_numbers_are_derived_in_every_attempt(folder: Path) -> None:
    """The same world, too: a pass of an interrupted run draws what the uninterrupted run drew."""
    whole = run_world(_draws, 1, make_config(folder, run="whole", exact=True), 5)[0]
    config = make_config(folder, run="broken", exact=True)
    found: dict[tuple[int, int], list[float]] = {}
    for world, stop in ((2, 4), (2, 5)):
        for numbers in run_world(_draws, world, config, stop):
            for place, drawn in numbers.items():
                assert drawn == whole[place], place
            found |= numbers
    assert found.keys() == whole.keys()
    assert len({str(numbers) for numbers in found.values()}) == len(found)


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"module": nn.Linear(2, 1)}))

    plain, inner = ModulePart("model", net()), net()
    names = set(plain.pack()[1])
    inner[0] = checkpoint_wrapper(inner[0])
    for wrapped in (torch.compile(net()), torch.compile(inner)):
        part = ModulePart("model", wrapped)
        assert set(part.pack()[1]) == names
        assert set(part.parameter_names().values()) == names
        part.load({}, plain.pack()[1])
        for name, tensor in part.pack()[1].items():
            assert torch.equal(tensor, plain.pack()[1][name])
