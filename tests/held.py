"""A training program that stands still in one phase of each of its attempts until it is told to go on; for tests.

    python tests/held.py --run r --marks FOLDER --phase evaluation ...

In attempt N, rank 0 writes ``held-N`` into the folder of marks when the ranks stand still, and all go on when there is
a ``go-N``. A ``raise-N`` has the last rank raise an error. With ``go-all`` nobody stands still any more.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))

import model as model_module
import torch
import torch.distributed as dist
from model import ModelConfig, Transformer
from ray import cloudpickle
from torch.nn.functional import cross_entropy

import ray_ckpt
from ray_ckpt.options import parse, run_main
from ray_ckpt.state.train_state import TrainState

cloudpickle.register_pickle_by_value(model_module)

PATIENCE_S = 180.0

Phase = Literal["none", "start", "save", "evaluation", "compile", "restore", "last step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldConfig(ray_ckpt.Config):
    """Stands still in one phase of each attempt."""

    phase: Phase = "none"
    """Where."""
    marks: str = ""
    """Folder for what rank 0 says, and what the ranks are told."""


class Marks:
    """What the ranks say and are told in one attempt."""

    def __init__(self, config: HeldConfig, rank: int, world_size: int) -> None:
        self._folder = Path(config.marks)
        self._rank, self._last = rank, rank == world_size - 1
        journal = config.run_dir / "journal.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        self.attempt = 1 + sum(
            '"event":"attempt_started"' in line.replace(" ", "") for line in lines
        )
        self.held = False

    def say(self) -> None:
        """The ranks are in their phase."""
        self.held = True
        if self._rank == 0:
            (self._folder / f"held-{self.attempt}").touch()

    @property
    def told_to_go(self) -> bool:
        if self._last and (self._folder / f"raise-{self.attempt}").exists():
            raise RuntimeError("told to fail")
        return any((self._folder / name).exists() for name in (f"go-{self.attempt}", "go-all"))

    def stand(self) -> None:
        """Stands still until told to go on; a rank of its own accord, without the others."""
        if self.held or (self._folder / "go-all").exists():
            return
        self.say()
        deadline = time.monotonic() + PATIENCE_S
        while not self.told_to_go and time.monotonic() < deadline:
            time.sleep(0.05)

    def go_slowly(self) -> None:
        """Half a second for a step: what strikes meets a save, and not the end of the run."""
        if not (self._folder / "go-all").exists() and not self.told_to_go:
            time.sleep(0.5)

    def evaluate(self, session: Any) -> None:
        """The same between two steps, as an evaluation that may be left."""
        if self.held or (self._folder / "go-all").exists():
            return
        self.say()
        go = [False]
        deadline = time.monotonic() + PATIENCE_S
        while not go[0] and time.monotonic() < deadline:
            time.sleep(0.1)
            go = [self.told_to_go]
            dist.broadcast_object_list(go, src=0)
            session.pause_point()


def stand_in_restore(marks: Marks) -> None:
    """Has this process stand still in its restore, when the tensors are read and the rest is not."""
    from ray_ckpt.checkpoint import restore

    def come_by(name: str) -> None:
        if name == "restore.loading":
            marks.stand()

    restore.fault_point = come_by  # type: ignore[assignment]


def train(config: HeldConfig) -> None:
    """The training function."""
    from ray_ckpt.fault_points import arm

    if config.phase == "save":
        arm(
            "save.write@1+=sleep:2"
        )  # beside the steps: one save or another is under way nearly always
    marks = Marks(config, dist.get_rank(), dist.get_world_size())
    if config.phase == "restore":
        stand_in_restore(marks)
    session = ray_ckpt.attach(config)
    # Ray grants each worker one processor here, whatever kind of process it runs in.
    (Path(config.marks) / f"threads-{marks.attempt}-{session.rank}").write_text(
        str(torch.get_num_threads())
    )
    net = Transformer(
        ModelConfig(vocab_size=257, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, dropout=0.1)
    )
    net.init_weights(config.seed)
    model = session.spread(net, torch.zeros(1, config.seq_len - 1, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = TrainState(model=model, optimizer=optimizer)
    session.restore(state)
    began = session.progress.step
    if config.phase == "start":
        marks.stand()
    for batch in session.batches():
        step = session.progress.step + 1
        for micro in batch:
            if (config.phase == "compile" and step == began + 1) or (
                config.phase == "last step" and step == config.steps
            ):
                marks.stand()
            logits = model(micro.tokens[:, :-1])
            batch.backward(
                micro, cross_entropy(logits.flatten(0, 1), micro.tokens[:, 1:].flatten())
            )
        norm = session.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        saved = session.step_end(lr=1e-3, grad_norm=norm).save
        # Nothing can be restored before something is saved.
        first_of_restores = config.phase == "restore" and began == 0 and step >= 4
        if step % 3 == 0 and (config.phase == "evaluation" or first_of_restores):
            marks.evaluate(session)
        if config.phase == "save" and saved and not marks.held:
            marks.say()
        if config.phase == "save":
            marks.go_slowly()
        if config.phase == "restore":
            time.sleep(0.1)  # what is asked for meanwhile is heard before the last step
    session.close()


def main() -> int:
    """Runs; without Ray, in this process alone, where ``HELD_ALONE`` is set."""
    config = ray_ckpt.resolve(parse(HeldConfig))
    if not os.environ.get("HELD_ALONE"):
        return ray_ckpt.run(config, train)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config.run_dir.mkdir(parents=True)
    torch.set_num_threads(1)
    train(config)
    return 0


if __name__ == "__main__":
    run_main(main)
