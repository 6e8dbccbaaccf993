"""One rank's part of a global batch: the passes to make, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ray_ckpt.data.feed import MicroBatch
from ray_ckpt.elastic.control import LOSS_BITS
from ray_ckpt.elastic.parallel import Reducer
from ray_ckpt.elastic.passclock import PassClock
from ray_ckpt.elastic.whereabouts import HERE

MAX_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class MicroStep:
    """One forward and backward pass of this rank.

    Attributes:
        tokens: int64 [micro_batch, seq_len], on the session's device.
        company: whether the pass only keeps other ranks company: it adds nothing.
        last: whether it is the rank's last pass of the step.
        source: where the samples come from.
    """

    tokens: torch.Tensor
    company: bool
    last: bool
    source: MicroBatch


def passes_of(
    micro_batches: Sequence[MicroBatch], count: int, device: torch.device
) -> list[MicroStep]:
    """The passes that train on some micro-batches, and after them those that keep other ranks company.

    Args:
        micro_batches: of this rank, at least one.
        count: passes in all.
        device: of this rank.
    """
    padded = [*micro_batches, *[micro_batches[-1]] * (count - len(micro_batches))]
    return [
        MicroStep(
            tokens=torch.from_numpy(micro.tokens).to(device, non_blocking=True),
            company=i >= len(micro_batches),
            last=i == count - 1,
            source=micro,
        )
        for i, micro in enumerate(padded)
    ]


class Batch:
    """This rank's part of a global batch; iterate over it for the passes to make.

    ``for micro in batch`` may give all passes a second time: in exact mode, when the gradients did not fit the
    scale. What the first round added is forgotten.

    Args:
        passes: in order.
        reducer: makes gradients of them.
        before: called before each pass.
        device: of this rank.
        clock: measures the first forward pass.
    """

    def __init__(
        self,
        passes: list[MicroStep],
        reducer: Reducer,
        before: Callable[[MicroStep], None],
        device: torch.device,
        clock: PassClock | None = None,
    ) -> None:
        self._passes, self._reducer, self._before = passes, reducer, before
        self._clock = clock or PassClock(device)
        self._loss = torch.zeros(2, dtype=torch.int64, device=device)  # sum, number of non-finite
        self._device = device
        self.num_tokens = 0
        self.rng_digest = 0
        self.finished = False

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches that are trained on."""
        return [micro.source for micro in self._passes if not micro.company]

    @property
    def loss(self) -> tuple[int, int]:
        """Sum of the micro-batches' mean losses in units of 2^-32, and how many were not finite."""
        total, bad = self._loss.tolist()
        return total, bad

    def __iter__(self) -> Iterator[MicroStep]:
        for _ in range(MAX_REPEATS + 1):
            self._loss.zero_()
            self.num_tokens = self.rng_digest = 0
            self._clock.begin()
            for left, micro in zip(reversed(range(len(self._passes))), self._passes, strict=True):
                HERE.enter("forward", left=left)
                self._before(micro)
                with self._reducer.one_pass(micro.last):
                    yield micro
                if not micro.company:
                    self.rng_digest += self._look_at_rng(micro)
            HERE.enter("reduce")
            if self._reducer.finish():
                self.finished = True
                HERE.enter("optimizer")
                return
        raise RuntimeError(
            f"the gradients of a step did not fit their own scale {MAX_REPEATS} times: they are not the same when "
            "a pass is made again. Exact mode needs kernels that give the same bits each time."
        )

    def backward(self, micro: MicroStep, loss: torch.Tensor) -> None:
        """Back-propagates the mean loss of a pass, scaled to its share, and adds it to the step's loss.

        Args:
            micro: the pass.
            loss: its mean loss, a scalar.
        """
        self._clock.end()
        HERE.enter("backward", left=HERE.now.left)
        (loss * (0.0 if micro.company else self._reducer.scale)).backward()
        if micro.company:
            return
        value = loss.detach().double() * 2.0**LOSS_BITS
        finite = torch.isfinite(value)
        self._loss[0] += torch.where(finite, value, 0.0).round().to(torch.int64)
        self._loss[1] += (~finite).to(torch.int64)
        self.num_tokens += micro.tokens.shape[0] * (micro.tokens.shape[1] - 1)

    def _look_at_rng(self, micro: MicroStep) -> int:
        """Digest of the torch generator after a pass; a sum over micro-batches, as the samples' digest."""
        cuda = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if cuda else torch.get_rng_state()
        head = int(micro.source.index).to_bytes(8, "little")
        return xxhash.xxh3_64(head + state.numpy().tobytes()).intdigest()
