"""One rank's part of a global batch: the passes to make, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import xxhash

from ray_ckpt.data.feed import MicroBatch
from ray_ckpt.elastic.control import LOSS_BITS
from ray_ckpt.elastic.parallel import Reducer

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


class Batch:
    """This rank's part of a global batch; iterate over it for the passes to make.

    ``for micro in batch`` may give all passes a second time: in exact mode, when the gradients did not fit the
    scale. What the first round added is forgotten.

    Args:
        passes: in order.
        reducer: makes gradients of them.
        before: called before each pass.
        device: of this rank.
    """

    def __init__(
        self,
        passes: list[MicroStep],
        reducer: Reducer,
        before: Callable[[MicroStep], None],
        device: torch.device,
    ) -> None:
        self._passes, self._reducer, self._before = passes, reducer, before
        # Of each pass, to be looked at when the step ends: small things that are done between two passes find the
        # processor's caches full of the model, and cost ten times what they cost together.
        self._losses: list[float | torch.Tensor] = []
        self._rng_states: list[tuple[int, torch.Tensor]] = []
        self._device = device
        self.num_tokens = 0
        self.finished = False

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches that are trained on."""
        return [micro.source for micro in self._passes if not micro.company]

    @property
    def loss(self) -> tuple[int, int]:
        """Sum of the micro-batches' mean losses in units of 2^-32, and how many were not finite."""
        losses = self._losses
        if losses and isinstance(
            losses[0], torch.Tensor
        ):  # on another device: one copy, one wait for it
            losses = torch.stack([torch.as_tensor(loss) for loss in losses]).double().tolist()
        scaled = [float(loss) * 2.0**LOSS_BITS for loss in losses]
        finite = [round(value) for value in scaled if math.isfinite(value)]
        return sum(finite), len(scaled) - len(finite)

    @property
    def rng_digest(self) -> int:
        """Digest of the torch generator after each pass; a sum over micro-batches, as the samples' digest."""
        total = 0
        for index, state in self._rng_states:
            digest = xxhash.xxh3_64(int(index).to_bytes(8, "little"))
            digest.update(state.numpy().data)
            total += digest.intdigest()
        return total

    def __iter__(self) -> Iterator[MicroStep]:
        for _ in range(MAX_REPEATS + 1):
            self._losses.clear()
            self._rng_states.clear()
            self.num_tokens = 0
            for micro in self._passes:
                self._before(micro)
                with self._reducer.one_pass(micro.last):
                    yield micro
                if not micro.company:
                    self._rng_states.append((micro.source.index, self._rng_state()))
            if self._reducer.finish():
                self.finished = True
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
        (loss * (0.0 if micro.company else self._reducer.scale)).backward()
        if micro.company:
            return
        # A copy: a compiled model may put the next pass's loss into the same memory.
        cpu = loss.device.type == "cpu"
        self._losses.append(loss.item() if cpu else loss.detach().clone())
        self.num_tokens += micro.tokens.shape[0] * (micro.tokens.shape[1] - 1)

    def _rng_state(self) -> torch.Tensor:
        """State of the torch generator, on the CPU."""
        cuda = self._device.type == "cuda"
        return torch.cuda.get_rng_state(self._device) if cuda else torch.get_rng_state()
