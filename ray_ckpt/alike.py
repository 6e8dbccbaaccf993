"""What must be the same on every rank, compared before anybody waits for it in vain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from ray_ckpt.checkpoint.restore import flatten
from ray_ckpt.errors import StateError
from ray_ckpt.state.parts import Entry
from ray_ckpt.state.train_state import PER_RANK, SCALARS, TrainState

_NOTHING = "nothing more"


def model_lines(model: torch.nn.Module) -> list[str]:
    """A line for each parameter and buffer of a model: name, type, shape, whether it is trained."""
    parameters = [
        f"{name}: {Entry.of(p)}{'' if p.requires_grad else ', not trained'}"
        for name, p in model.named_parameters()
    ]
    return parameters + [f"{name}: {Entry.of(b)}, a buffer" for name, b in model.named_buffers()]


def state_lines(state: TrainState) -> list[str]:
    """A line for each tensor of a training state that is the same on every rank, or sharded over them."""
    own = (f"{PER_RANK}.", SCALARS)
    return [
        f"{name}: {Entry.of(tensor)}"
        for name, tensor in flatten(state.state_dict())
        if not name.startswith(own)
    ]


def check_alike(what: str, lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Compares lines over all ranks; every rank calls it.

    Args:
        what: is compared, for the message.
        lines: of this rank.
        group: gloo process group of all ranks.

    Raises:
        StateError: on every rank, with the first rank that differs from rank 0 and the first difference.
    """
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        digests, xxhash.xxh3_64_hexdigest("\n".join(lines).encode()), group=group
    )
    if len(set(digests)) == 1:
        return
    everyone: list[Any] = [None] * len(digests)
    dist.all_gather_object(everyone, list(lines), group=group)
    rank = next(r for r, digest in enumerate(digests) if digest != digests[0])
    raise StateError(
        f"{what} is not the same on every rank: rank 0 has {first_difference(everyone[0], everyone[rank])}, at the "
        f"same place rank {rank} has {first_difference(everyone[rank], everyone[0])}. Build it from the options alone, "
        "not from the rank or the machine."
    )


def first_difference(mine: Sequence[str], other: Sequence[str]) -> str:
    """The first line of ``mine`` that is not in the same place in ``other``."""
    pairs = zip_longest(mine, other, fillvalue=_NOTHING)
    return next((here for here, there in pairs if here != there), _NOTHING)
