"""What a worker process imports before it is told what to do, so that a process that waits has it behind it.

Ray calls :func:`warm_up` in each new process of a training worker's runtime environment: in the spare ones that
:mod:`ray_ckpt.elastic.spares` has started ahead, and, where there is none, in the one that a worker waits for.
"""

from __future__ import annotations

import logging
import os
import time
from importlib import import_module
from typing import Any

logger = logging.getLogger(__name__)

WARM_VARIABLE = "RAY_CKPT_WARM"

# What a worker imports sooner or later. None of it looks at a GPU: a process that has looked at those of its node
# would go on to see them all, whichever its worker is given.
IMPORTS = (
    "torch",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # by the first optimizer that is made
    "ray.data",
    "ray.train.torch",
    "ray_ckpt.joining",
    "ray_ckpt.data.source",
)

# With this torch asks the driver's management library whether there are GPUs, which leaves no trace in the process.
_ASK_LIGHTLY = "PYTORCH_NVML_BASED_CUDA_CHECK"

_begun: list[float] = []  # when this process was warmed up, by its steady clock


def warm_up() -> None:
    """Imports; raises nothing, or Ray would end the process."""
    if os.environ.get(WARM_VARIABLE) != "1":
        return
    _begun.append(time.monotonic())
    before = os.environ.get(_ASK_LIGHTLY)
    os.environ[_ASK_LIGHTLY] = "1"
    for name in IMPORTS:
        try:
            import_module(name)
        except Exception:  # whoever needs it will say so
            logger.warning("a worker process could not import %s ahead", name, exc_info=True)
    del os.environ[_ASK_LIGHTLY]
    if before is not None:
        os.environ[_ASK_LIGHTLY] = before


def settle() -> None:
    """Gives torch as many threads as it would have had without a warm-up; called in the thread that trains.

    Ray says how many by ``OMP_NUM_THREADS``, when an actor gets its processors. Torch reads that when it is loaded, and
    here it was loaded before: it would take all processors of the machine, and sum in another order.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if _begun and threads.isdigit() and int(threads) > 0:
        import torch

        # Loaded later it would not have taken more than it took now either: it knows how many cores there are.
        torch.set_num_threads(min(int(threads), torch.get_num_threads()))


def begun_ago_s() -> float:
    """How long ago this process began to warm up, seconds; 0 for one that did not."""
    return time.monotonic() - _begun[0] if _begun else 0.0


def worker_environment(hook_variable: str) -> dict[str, Any]:
    """Runtime environment of workers that warm up.

    Args:
        hook_variable: that names what a new process calls (:func:`ray_ckpt.ray_private.setup_hook_variable`).
    """
    hook = f"{warm_up.__module__}.{warm_up.__name__}"
    return {"env_vars": {hook_variable: hook, WARM_VARIABLE: "1"}}


def task_options() -> dict[str, Any]:
    """Options for tasks of such a worker: their runtime environment is another one, so none takes a spare process."""
    if os.environ.get(WARM_VARIABLE) != "1":
        return {}
    return {"runtime_env": {"env_vars": {WARM_VARIABLE: "0"}}}
