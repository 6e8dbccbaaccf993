"""The global order for map-style datasets: a batch sampler for torchdata's ``StatefulDataLoader``.

::

    order = GlobalOrder(row_group_sizes=index.row_group_sizes, global_batch=96, micro_batch=8, seed=0)
    plan = BatchPlan(global_batch=96, micro_batch=8, world_size=world_size, rank=rank)
    sampler = GlobalOrderSampler(order, plan, sample_offset=offset, stop_step=steps)
    loader = StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=2)
    for micro_batch in loader: ...                        # dataset[row id], in the order of the feed
    state = loader.state_dict()                           # this rank, this world
    offset = sample_offset(state)                         # any world: goes into a new sampler

One batch of the loader is one micro-batch of the rank, as the feed gives them. The position is kept by
the iterator, of which the loader takes a snapshot with every batch that it hands out: what its workers
have fetched ahead is not in it. A state taken after a batch was trained on is therefore the offset of
what was trained.

Inside a step the ranks have done different parts of a global batch, and no global offset says so: such
a state is good for the same world size only.

Of a mixture (:class:`ray_ckpt.data.mixture.MixedOrder`) the indices are those of
``torch.utils.data.ConcatDataset`` over the sources' datasets, in the order of the mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_ckpt.data.mixture import MixedOrder, Order
from ray_ckpt.data.order import GlobalOrder, Int64s
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.errors import ConfigError

_KEY = "ray_ckpt_sampler"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerState:
    """Where a rank is.

    Attributes:
        step: global steps done since the run began.
        micro_batches: micro-batches of this rank done in the step after them.
        share: micro-batches of this rank in a step.
        world_size: number of workers.
        rank: this worker.
        global_batch: samples of a step.
        order: names the global order.
    """

    step: int
    micro_batches: int
    share: int
    world_size: int
    rank: int
    global_batch: int
    order: str

    def after(self, micro_batches: int) -> tuple[int, int]:
        """(step, micro-batches) after some more micro-batches."""
        steps, rest = divmod(self.micro_batches + micro_batches, self.share)
        return self.step + steps, rest


class GlobalOrderSampler:
    """Batches of row ids: the micro-batches of one rank in the global order.

    Args:
        order: the global order; its row ids are the dataset's indices, those of a mixture an index of all datasets
            one after another.
        plan: this rank's share.
        sample_offset: samples that the run has trained on, a multiple of the global batch.
        stop_step: the run's last step, exclusive; None goes on without end, epoch after epoch.

    Raises:
        ConfigError: an offset inside a step, or a plan of another global batch.
    """

    def __init__(
        self,
        order: Order,
        plan: BatchPlan,
        *,
        sample_offset: int = 0,
        stop_step: int | None = None,
    ) -> None:
        sizes = (order.global_batch, order.micro_batch)
        if sizes != (plan.global_batch, plan.micro_batch):
            raise ConfigError(
                f"the plan is of global batch {plan.global_batch} and micro-batch {plan.micro_batch}, the order "
                f"of {sizes[0]} and {sizes[1]}: make both from the same options."
            )
        self.order, self.plan, self.stop_step = order, plan, stop_step
        self.start_step = _whole_steps(sample_offset, order.global_batch)

    def __iter__(self) -> GlobalOrderIterator:
        return GlobalOrderIterator(self)

    def __len__(self) -> int:
        """Micro-batches from the start to the last step.

        Raises:
            TypeError: there is no last step.
        """
        if self.stop_step is None:
            raise TypeError("a GlobalOrderSampler without stop_step has no length")
        return max(0, self.stop_step - self.start_step) * len(self.plan.micro_batches)


class GlobalOrderIterator:
    """Walks the order; its state is what ``StatefulDataLoader`` saves and restores."""

    def __init__(self, sampler: GlobalOrderSampler) -> None:
        self._sampler = sampler
        self._seek(sampler.start_step, 0)

    def _seek(self, step: int, micro_batches: int) -> None:
        order, streams = self._sampler.order, self._sampler.plan.micro_batches
        self._step, self._done = step, micro_batches
        self._rows = [
            _stream_batches(order, stream, step + (number < micro_batches))
            for number, stream in enumerate(streams)
        ]

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        stop = self._sampler.stop_step
        if stop is not None and self._step >= stop:
            raise StopIteration
        rows = next(self._rows[self._done])
        self._done += 1
        if self._done == len(self._rows):
            self._step, self._done = self._step + 1, 0
        return rows.tolist()

    def state_dict(self) -> dict[str, Any]:
        """Where this iterator is; plain numbers and words."""
        plan = self._sampler.plan
        return {
            _KEY: {
                "step": self._step,
                "micro_batches": self._done,
                "share": len(self._rows),
                "world_size": plan.world_size,
                "rank": plan.rank,
                "global_batch": plan.global_batch,
                "order": _name(self._sampler.order),
            },
            "sample_offset": self._step * plan.global_batch,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes where a state says.

        Raises:
            ConfigError: the state of another order; or one inside a step, of another rank or world.
        """
        state, plan = SamplerState(**state_dict[_KEY]), self._sampler.plan
        _check_order(state, self._sampler.order)
        if state.micro_batches and (state.world_size, state.rank) != (plan.world_size, plan.rank):
            raise ConfigError(
                f"the loader's state was taken inside step {state.step} by rank {state.rank} of "
                f"{state.world_size}: rank {plan.rank} of {plan.world_size} cannot go on inside a step. Take the "
                "state after the last micro-batch of a step."
            )
        self._seek(state.step, state.micro_batches)


def sample_offset(loader_state: Mapping[str, Any]) -> int:
    """The global sample offset in the state of a ``StatefulDataLoader`` (or of the sampler's iterator).

    Args:
        loader_state: what ``loader.state_dict()`` gave after the last micro-batch of a step.

    Raises:
        ConfigError: the state is of another sampler, or was taken inside a step.
    """
    found = _find(loader_state)
    if found is None:
        raise ConfigError(
            "the loader's state has no GlobalOrderSampler in it: pass one as batch_sampler="
        )
    state = SamplerState(**found["sampler"][_KEY])
    # With snapshot_every_n_steps the loader saves an older state and the number of batches since.
    step, micro_batches = state.after(found["since"])
    if micro_batches:
        raise ConfigError(
            f"the loader's state was taken inside step {step}, after {micro_batches} of {state.share} "
            "micro-batches: take it after the last one, or the ranks have no common offset."
        )
    return step * state.global_batch


def _find(state: object, since: int = 0) -> dict[str, Any] | None:
    """The sampler's state inside a loader's, wherever its version keeps it."""
    if not isinstance(state, Mapping):
        return None
    if _KEY in state:
        return {"sampler": state, "since": since}
    since = int(state.get("_steps_since_snapshot", since))
    found = (_find(value, since) for value in state.values())
    return next((item for item in found if item is not None), None)


def _stream_batches(order: Order, stream: int, step: int) -> Iterator[Int64s]:
    """Indices of a stream's micro-batches, from a step on, without end."""
    b = order.micro_batch
    if isinstance(order, MixedOrder):
        yield from _mixed_batches(order, stream, step * b)
        return
    rows = _Rows(order, stream, step * b)
    while True:
        yield rows.take(b)


def _mixed_batches(order: MixedOrder, stream: int, row: int) -> Iterator[Int64s]:
    """The same for a mixture, from a row of the stream on: each source gives its next rows where it is its turn."""
    b = order.micro_batch
    firsts = order.rows_before(stream, row)
    sources = [_Rows(part, stream, first) for part, first in zip(order.parts, firsts, strict=True)]
    starts = np.cumsum([0, *(part.num_rows for part in order.parts[:-1])])
    while True:
        turns = order.sources_of(stream, row, row + b)
        batch = np.empty(b, dtype=np.int64)
        for source in np.unique(turns):
            mine = turns == source
            batch[mine] = starts[source] + sources[source].take(int(mine.sum()))
        row += b
        yield batch


class _Rows:
    """Row ids of one source's stream, one after another, epoch after epoch.

    Args:
        order: of the source.
        stream: of it.
        row: of the stream, since the run began.
    """

    def __init__(self, order: GlobalOrder, stream: int, row: int) -> None:
        self._order, self._stream = order, stream
        self._epoch, self._offset = divmod(row, order.stream_rows)
        self._held = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> Int64s:
        """The next rows."""
        parts = [self._held]
        held = len(self._held)
        while held < count:
            order = self._order
            span = order.span_at(self._epoch, self._stream, self._offset)
            rows = order.span_rows(span)[1][self._offset - span.offset :]
            parts.append(rows)
            held += len(rows)
            self._offset = span.offset + span.num_rows
            if self._offset == order.stream_rows:
                self._epoch, self._offset = self._epoch + 1, 0
        found = np.concatenate(parts)
        self._held = found[count:]
        return found[:count]


def _whole_steps(sample_offset: int, global_batch: int) -> int:
    step, rest = divmod(sample_offset, global_batch)
    if rest or step < 0:
        raise ConfigError(
            f"sample offset {sample_offset} is not a whole number of global batches of {global_batch}: a run "
            "stops between steps."
        )
    return step


def _name(order: Order) -> str:
    if isinstance(order, MixedOrder):
        weights = " ".join(map(str, order.weights))
        parts = "; ".join(map(_name, order.parts))
        return f"mixture {weights}, micro-batch {order.micro_batch}, seed {order.seed}, of: {parts}"
    return (
        f"rows {order.num_rows} in {len(order.row_group_sizes)} groups, global batch {order.global_batch}, "
        f"micro-batch {order.micro_batch}, seed {order.seed}, window {order.window_groups}"
    )


def _check_order(state: SamplerState, order: Order) -> None:
    if state.order != _name(order):
        raise ConfigError(
            f"the loader's state is of another order ({state.order}), this one is {_name(order)}: the rows "
            "behind it would not be those that come next."
        )
