"""Ray Train as its documentation has it, for jobs/bench_restart.py to compare with; submitted as a job.

The main job's model, batch and data, elastic scaling with Ray's defaults, a checkpoint of rank 0's state by
``ray.train.report`` every so many steps, and the dataset's shards from ``get_dataset_shard``. The only thing that is
ours is a line for each step, with the names that a run of ours uses.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import model as model_module
import ray
import ray.train
import torch
from model import ModelConfig, Transformer
from ray import cloudpickle
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn.functional import cross_entropy

cloudpickle.register_pickle_by_value(model_module)

STATE = "state.pt"


def train(config: dict[str, Any]) -> None:
    """The training function."""
    context = ray.train.get_context()
    world, rank = context.get_world_size(), context.get_world_rank()
    net = Transformer(ModelConfig(vocab_size=config["vocab_size"]))
    net.init_weights(0)
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step, began = 0, time.time()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / STATE, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    lines = Path(config["lines"])
    shard = ray.train.get_dataset_shard("train")
    per_worker = max(1, config["global_batch"] // world)
    while True:
        for batch in shard.iter_torch_batches(batch_size=per_worker, drop_last=True):
            tokens = batch["tokens"].long()
            logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if rank == 0:
                line = {"step": step, "world_size": world, "began": began, "time": time.time()}
                with lines.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if step % config["every"] == 0:
                with tempfile.TemporaryDirectory() as folder:
                    saved = None
                    if rank == 0:
                        state = {
                            "model": net.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "step": step,
                        }
                        torch.save(state, Path(folder) / STATE)
                        saved = Checkpoint.from_directory(folder)
                    ray.train.report({"loss": float(loss)}, checkpoint=saved)


def main() -> int:
    """Trains until it is stopped."""
    config = json.loads(sys.argv[1])
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=(1, config["workers"]), resources_per_worker={"CPU": config["cpus"]}
        ),
        run_config=RunConfig(
            name="stock",
            storage_path=config["storage"],
            failure_config=FailureConfig(max_failures=-1),
        ),
        datasets={"train": ray.data.read_parquet(config["data"])},
    )
    trainer.fit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
