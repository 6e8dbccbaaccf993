"""Digests of a training state that do not depend on how it is spread over workers."""

from __future__ import annotations

import torch
import xxhash
from torch.distributed.tensor import DTensor

from ray_ckpt.checkpoint.restore import flatten
from ray_ckpt.state.train_state import TrainState


def state_digest(state: TrainState) -> dict[str, str]:
    """Digests of the whole tensors of each part; a collective when the model is sharded.

    Returns:
        16 hex digits for ``model``, ``optimizer``, ``progress`` and ``scalars``.
    """
    digests: dict[str, str] = {}
    for part, value in state.state_dict().items():
        tensors = {"": value} if isinstance(value, torch.Tensor) else dict(flatten(value))
        digest = xxhash.xxh3_64()
        for name in sorted(tensors):
            tensor = tensors[name].detach()
            whole = (
                (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()
            )
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        digests[part] = digest.hexdigest()
    return digests
