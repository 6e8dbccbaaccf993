"""The passes of a step over a rank's micro-batches, as a reducer wants them made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ray_ckpt.elastic.parallel import Reducer

T = TypeVar("T")

MAX_REPEATS = 3


def passes(
    reducer: Reducer, micro_batches: Sequence[T], begin: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """Yields each micro-batch for its forward and backward pass; gradients are in place when the loop is over.

    All of them may come a second time: in exact mode, when the gradients did not fit the scale. What the first round
    added is forgotten. In the loop, the mean loss of a micro-batch times ``reducer.scale`` is back-propagated; to give
    the same bits again, random numbers must belong to the micro-batch (:func:`ray_ckpt.state.rng.seed_all`).

    Args:
        reducer: of the model, such as :class:`ray_ckpt.elastic.exact.ExactReplicas`.
        micro_batches: of this rank, at least one; every rank makes its passes in the same step.
        begin: called before each round.

    Raises:
        RuntimeError: the gradients are not the same when a pass is made again.
    """
    for _ in range(MAX_REPEATS + 1):
        begin()
        for number, micro in enumerate(micro_batches):
            with reducer.one_pass(number == len(micro_batches) - 1):
                yield micro
        if reducer.finish():
            return
    raise RuntimeError(
        f"the gradients of a step did not fit their own scale {MAX_REPEATS} times: they are not the same when "
        "a pass is made again. Exact mode needs kernels that give the same bits each time."
    )
