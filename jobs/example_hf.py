"""A model of Hugging Face's transformers, trained on texts of any length: the loss comes from the model.

    pip install -e '.[hf]'
    python jobs/example_hf.py

The model is a tiny Llama with random weights, and the texts are lines of the source of Python's standard library, one
byte a token: nothing is downloaded. With a checkpoint of your own, ``LlamaForCausalLM.from_pretrained(FOLDER)`` takes
the place of ``build_model``; a restore wins over it from the first checkpoint of the run on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import ray_ckpt
from ray_ckpt.errors import ConfigError
from ray_ckpt.options import parse, run_main

PAD, FIRST_BYTE = 0, 1  # a byte b is the token b + 1
IGNORED = -100  # a label that gives no loss, as transformers have it
MAX_TOKENS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class HfConfig(ray_ckpt.Config):
    """Trains a small Llama of transformers on lines of text."""

    run: str = "hf"
    """Name of the run; the same name goes on where the run was left."""
    samples: int = 4096
    """Lines of text in the dataset."""
    steps: int = 100
    """Optimizer steps of the whole run."""
    workers: str = "1:2"
    """Fewest and most training workers, MIN:MAX; one number is a fixed size."""
    global_batch: int = 32
    """Lines per optimizer step."""
    micro_batch: int = 8
    """Lines per forward and backward pass."""
    lr: float = 3e-3
    """Learning rate of AdamW."""


class Lines:
    """The first lines of some length of the standard library's source, as token ids.

    Args:
        count: of lines.
    """

    def __init__(self, count: int) -> None:
        self._lines: list[bytes] = []
        for path in sorted(Path(os.__file__).parent.glob("*.py")):
            lines = (line.strip() for line in path.read_bytes().splitlines())
            self._lines += [line[:MAX_TOKENS] for line in lines if len(line) >= 24]
            if len(self._lines) >= count:
                break
        if len(self._lines) < count:
            raise ConfigError(
                f"--samples {count}: this machine has {len(self._lines)} lines of text"
            )
        del self._lines[count:]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> list[int]:
        return [byte + FIRST_BYTE for byte in self._lines[index]]


def collate(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pads the texts of a micro-batch to the longest of them."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
    mask = ids != PAD
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, IGNORED),
    }


def build_model(seed: int) -> torch.nn.Module:
    """The same on every worker and at every start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=256 + FIRST_BYTE,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=PAD,
        use_cache=False,
    )
    model: torch.nn.Module = LlamaForCausalLM(shape)
    return model


def train(config: HfConfig) -> None:
    """The training function: runs on every worker, in every attempt."""
    lines = Lines(config.samples)

    def load(sampler: ray_ckpt.GlobalOrderSampler) -> DataLoader[Any]:
        return DataLoader(lines, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]

    session = ray_ckpt.attach(config)
    plain = build_model(config.seed)
    blocks = [block for block in plain.modules() if type(block).__name__ == "LlamaDecoderLayer"]
    model = session.spread(plain, collate([lines[0]]), units=blocks)  # units: with --parallel fsdp
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    session.restore(ray_ckpt.TrainState(model=model, optimizer=optimizer))
    for batch in session.batches(loader=load):
        for micro in batch:
            loss = model(**micro.data).loss
            batch.backward(micro, loss, tokens=int(micro.data["attention_mask"].sum()))
        norm = session.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.step_end(lr=config.lr, grad_norm=norm)
    session.close()


def main() -> int:
    """Parses the options and runs."""
    return ray_ckpt.run(ray_ckpt.resolve(parse(HfConfig)), train)


if __name__ == "__main__":
    run_main(main)
