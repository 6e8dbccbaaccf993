"""One rank's part of a global batch: the passes to make, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ray_ckpt.data.feed import MicroBatch
from ray_ckpt.elastic.control import LOSS_BITS
from ray_ckpt.elastic.nested import to_device
from ray_ckpt.elastic.parallel import Reducer
from ray_ckpt.elastic.passclock import PassClock
from ray_ckpt.elastic.passes import passes
from ray_ckpt.elastic.whereabouts import HERE
from ray_ckpt.rollcall import RollCall


@dataclass(frozen=True, kw_only=True)
class MicroStep:
    """One forward and backward pass of this rank.

    Attributes:
        data: what to train on, on the session's device: int64 tokens [micro_batch, seq_len], or what the training
            function's own loader gave, with its tensors moved.
        company: whether the pass only keeps other ranks company: it adds nothing.
        last: whether it is the rank's last pass of the step.
        source: where the samples come from: ``index`` of the micro-batch in the global batch, ``rows`` and
            ``positions``, int64 [micro_batch].
    """

    data: Any
    company: bool
    last: bool
    source: MicroBatch

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [micro_batch, seq_len], of rows of token ids.

        Raises:
            RuntimeError: the samples come from the training function's own loader.
        """
        if self.has_tokens:
            assert isinstance(self.data, torch.Tensor)
            return self.data
        raise RuntimeError(
            "micro.tokens: the samples are those of batches(loader=...); use micro.data"
        )

    @property
    def has_tokens(self) -> bool:
        """Whether the samples are rows of token ids."""
        return self.source.tokens.size > 0


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
            data=to_device(
                torch.from_numpy(micro.tokens) if micro.data is None else micro.data, device
            ),
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
        micro_steps: the passes, in order.
        reducer: makes gradients of them.
        before: called before each pass.
        device: of this rank.
        roll: tells who does not come, where ranks wait for each other.
        step: of the run, for messages.
        clock: measures the first forward pass.
        exact: whether random numbers belong to micro-batches, so that the generator is looked at after each.
    """

    def __init__(
        self,
        micro_steps: list[MicroStep],
        reducer: Reducer,
        before: Callable[[MicroStep], None],
        device: torch.device,
        roll: RollCall,
        step: int,
        clock: PassClock | None = None,
        exact: bool = False,
    ) -> None:
        self._micro_steps, self._reducer, self._before = micro_steps, reducer, before
        # Of each pass, to be looked at when the step ends: small things that are done between two passes find the
        # processor's caches full of the model, and cost ten times what they cost together.
        self._losses: list[float | torch.Tensor] = []
        self._rng_states: list[tuple[int, torch.Tensor]] = []
        self._device, self._exact = device, exact
        self._roll, self._step = roll, step
        self._clock, self._left = clock or PassClock(device), len(micro_steps)
        self.num_tokens = 0
        self.finished = False

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches that are trained on."""
        return [micro.source for micro in self._micro_steps if not micro.company]

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
        """Digest of the torch generator; a sum over ranks, as the samples' digest.

        In exact mode it is a sum over micro-batches, of the generator after each. Otherwise a rank's numbers go on
        from one pass to the next, and the generator after the last one knows of all of them.
        """
        total = 0
        for index, state in self._rng_states:
            digest = xxhash.xxh3_64(int(index).to_bytes(8, "little"))
            digest.update(state.numpy().data)
            total += digest.intdigest()
        return total

    def __iter__(self) -> Iterator[MicroStep]:
        turns = passes(self._reducer, self._micro_steps, self._begin)
        while True:
            if not self._left:
                HERE.enter("reduce")
            try:
                # The reducer of exact mode waits for the other ranks here, after the last pass.
                micro = next(turns, None)
            except RuntimeError as error:
                self._roll.judge(error, f"the passes of step {self._step}", HERE.now.since_s)
                raise
            if micro is None:
                break
            self._left -= 1
            HERE.enter("forward", left=self._left)
            self._before(micro)
            yield micro
            if self._exact and not micro.company:
                self._rng_states.append((micro.source.index, self._rng_state()))
        if not self._exact:
            self._rng_states.append((self._micro_steps[0].source.index, self._rng_state()))
        self.finished = True
        HERE.enter("optimizer")

    def _begin(self) -> None:
        self._left = len(self._micro_steps)
        self._clock.begin()
        self._losses.clear()
        self._rng_states.clear()
        self.num_tokens = 0

    def backward(self, micro: MicroStep, loss: torch.Tensor, *, tokens: int | None = None) -> None:
        """Back-propagates the mean loss of a pass, scaled to its share, and adds it to the step's loss.

        Args:
            micro: the pass.
            loss: its mean loss, a scalar tensor.
            tokens: how many tokens gave a loss, for the record; of rows of token ids they are counted.

        Raises:
            OutOfStepError: other ranks did not come to this step, within ``--saving.timeout-s``.
        """
        self._clock.end()
        HERE.enter("backward", left=self._left)
        try:
            (loss * (0.0 if micro.company else self._reducer.scale)).backward()
        except RuntimeError as error:
            self._roll.judge(error, f"backward() of step {self._step}", HERE.now.since_s)
            raise
        if micro.company:
            return
        # A copy: a compiled model may put the next pass's loss into the same memory.
        cpu = loss.device.type == "cpu"
        self._losses.append(loss.item() if cpu else loss.detach().clone())
        if tokens is None:
            ids = micro.source.tokens  # the first of each row gives no loss
            tokens = ids.size - len(ids) if ids.size else 0
        self.num_tokens += tokens

    def _rng_state(self) -> torch.Tensor:
        """State of the torch generator, on the CPU."""
        cuda = self._device.type == "cuda"
        return torch.cuda.get_rng_state(self._device) if cuda else torch.get_rng_state()
