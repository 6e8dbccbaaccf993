"""Pre-trains a small Llama-style model on a Ray cluster, through whatever happens to it.

    python jobs/pretrain.py                                          on this machine
    RAY_ADDRESS=... python jobs/pretrain.py --workers 1:8            on a cluster
    ray job submit --working-dir . -- python jobs/pretrain.py ...    as a job

The same command again goes on where the run was left.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

import model as model_module
import prepare as prepare_module
import torch
from model import ModelConfig, Transformer
from ray import cloudpickle
from torch.nn.functional import cross_entropy

import ray_ckpt
from ray_ckpt.options import parse, run_main
from ray_ckpt.state.schedule import warmup_cosine
from ray_ckpt.state.train_state import TrainState

# Workers get these two by value: they need not find this folder on their own machines.
cloudpickle.register_pickle_by_value(model_module)
cloudpickle.register_pickle_by_value(prepare_module)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 2e-3
    """Highest learning rate."""
    warmup_steps: int = 20
    """Steps until the highest learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step, as a share of the highest."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(ray_ckpt.Config):
    """Pre-trains a language model on a Ray cluster, elastically, with measured checkpoint intervals."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of rows of tokens: that of training, and the one that drills compare."""
    device = tokens.device.type
    with torch.autocast(device, torch.bfloat16, device == "cuda"):
        logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(config: PretrainConfig) -> None:
    """The training function: runs on every worker, in every attempt."""
    session = ray_ckpt.attach(config)
    optim = config.optim
    shape = replace(config.model, vocab_size=session.index.vocab_size or config.model.vocab_size)
    net = Transformer(shape)
    net.init_weights(config.seed)
    model = session.spread(net, torch.zeros(1, config.seq_len - 1, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay)
    scheduler = warmup_cosine(optimizer, optim.warmup_steps, config.steps, optim.min_lr_ratio)
    session.validate_with(loss_of)
    session.restore(TrainState(model=model, optimizer=optimizer, scheduler=scheduler))
    for batch in session.batches():
        lr = float(scheduler.get_last_lr()[0])
        for micro in batch:
            batch.backward(micro, loss_of(model, micro.tokens))
        norm = session.clip_grad_norm(optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.step_end(lr=lr, grad_norm=norm)
    session.close()


def make_data(config: PretrainConfig) -> None:
    """Prepares the default text when the data folder is empty."""
    options = prepare_module.PrepareOptions(output=config.sources[0].path, seq_len=config.seq_len)
    prepare_module.prepare(options)


def main() -> int:
    """Parses the options and runs."""
    config = ray_ckpt.resolve(parse(PretrainConfig))
    shape = {f"--model.{k.replace('_', '-')}": v for k, v in asdict(config.model).items()}
    return ray_ckpt.run(config, train, identity=shape, prepare=make_data)


if __name__ == "__main__":
    run_main(main)
