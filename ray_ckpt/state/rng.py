"""Random number generators as tensors: captured and restored exactly, without pickle.

With an unchanged world size every rank gets its own generators back. With another world size there is
no rank to give them to: they are then derived from (seed, step, micro-batch), so that a resized run is
still defined, and does not know the rank.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from ray_ckpt.data.permute import mix
from ray_ckpt.errors import RestoreError

_PYTHON_VERSION = 3  # of random.getstate(), in every Python since 3.2
_NUMPY_KIND = "MT19937"

Tensors = dict[str, torch.Tensor]


def capture(device: torch.device) -> Tensors:
    """State of Python, NumPy (legacy global), torch CPU and, on a GPU, the device's generator.

    Returns:
        Tensors of fixed shapes: ``python`` int64 [625], ``numpy`` int64 [625], ``gauss`` float64 [4],
        ``torch`` uint8 [5056], and ``cuda`` uint8 [16] on a CUDA device.
    """
    version, words, gauss = random.getstate()
    kind, keys, pos, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    if version != _PYTHON_VERSION or kind != _NUMPY_KIND:
        raise RestoreError(
            f"the generator of Python (version {version}) or NumPy ({kind}) is not one that can be "
            f"saved: version {_PYTHON_VERSION} and {_NUMPY_KIND} are. Do not replace them."
        )
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), pos], dtype=torch.int64),
        "gauss": torch.tensor(
            [float(gauss is not None), gauss or 0.0, float(has_gauss), cached], dtype=torch.float64
        ),
        "torch": torch.get_rng_state().clone(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def apply(state: Tensors, device: torch.device) -> None:
    """Puts back what :func:`capture` took."""
    gauss = state["gauss"].tolist()
    random.setstate(
        (_PYTHON_VERSION, tuple(state["python"].tolist()), gauss[1] if gauss[0] else None)
    )
    *keys, pos = state["numpy"].tolist()
    np.random.set_state(  # noqa: NPY002
        (_NUMPY_KIND, np.array(keys, dtype=np.uint32), pos, int(gauss[2]), gauss[3])
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_all(seed: int, step: int, micro_batch: int) -> None:
    """Seeds every generator from (seed, step, micro-batch)."""
    key = mix(seed, step, micro_batch)
    random.seed(key)
    np.random.seed(key % (1 << 32))  # noqa: NPY002
    torch.manual_seed(key % (1 << 63))


def rank_key(rank: int) -> str:
    """Name under which a checkpoint keeps the generators of a rank."""
    return f"rank{rank:05d}"
