"""The loop that tutorials of Ray Train begin with, adopted: a small ResNet on ten kinds of images of 28 x 28.

    python jobs/example_ray_docs.py                                  two workers on this machine
    python jobs/example_ray_docs.py --workers 1:4 --micro-batch 64   the same batch on up to four

The images are drawn here, so that nothing is downloaded; any map-style dataset takes their place, such as
``torchvision.datasets.FashionMNIST``. What differs from the loop of a tutorial is marked with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ray_ckpt
from ray_ckpt.options import parse, run_main


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleConfig(ray_ckpt.Config):
    """Trains an image classifier on a dataset of its own."""

    run: str = "images"
    """Name of the run; the same name goes on where the run was left."""
    samples: int = 20_000
    """Images in the dataset; this is how the run knows it."""
    steps: int = 156
    """Optimizer steps of the whole run: two epochs of 78."""
    workers: str = "1:2"
    """Fewest and most training workers, MIN:MAX; one number is a fixed size."""
    global_batch: int = 256
    """Images per optimizer step, whatever the number of workers."""
    micro_batch: int = 128
    """Images per forward and backward pass."""
    lr: float = 1e-3
    """Learning rate of Adam."""


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of ten kinds: a pattern for each, noise on top; image i is the same on every machine.

    Args:
        count: of images.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        coarse = torch.randn(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
        self._patterns = nn.functional.interpolate(coarse, size=28, mode="bilinear")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        kind = index * 10 // self._count  # sorted by kind, as folders of images are
        noise = torch.randn(1, 28, 28, generator=torch.Generator().manual_seed(index))
        return self._patterns[kind] + 1.5 * noise, kind


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(narrow, wide, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.shortcut = nn.Conv2d(narrow, wide, 1, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images of half the size."""
        return torch.relu(self.body(x) + self.shortcut(x))


def build_model(seed: int) -> nn.Module:
    """The same on every worker and at every start."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(Block(1, 16), Block(16, 32), Block(32, 64)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def train(config: ExampleConfig) -> None:
    """The training function: runs on every worker, in every attempt."""
    images = Images(config.samples)

    def load(sampler: ray_ckpt.GlobalOrderSampler) -> DataLoader[tuple[torch.Tensor, int]]:
        return DataLoader(images, batch_sampler=sampler)  # [1] for batch_size=..., shuffle=True

    session = ray_ckpt.attach(config)  # [2]
    model = session.spread(build_model(config.seed), images[0][0][None])  # [3] for prepare_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    session.restore(ray_ckpt.TrainState(model=model, optimizer=optimizer))  # [4]
    for batch in session.batches(loader=load):  # [5] for the loop over epochs
        for micro in batch:  # [6]
            x, y = micro.data
            loss = nn.functional.cross_entropy(model(x), y)
            batch.backward(micro, loss)  # [7] for loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step_end(lr=config.lr)  # [8] for torch.save() and report()
    session.close()  # [9]


def main() -> int:
    """Parses the options and runs."""
    return ray_ckpt.run(
        ray_ckpt.resolve(parse(ExampleConfig)), train
    )  # [10] for TorchTrainer().fit()


if __name__ == "__main__":
    run_main(main)
