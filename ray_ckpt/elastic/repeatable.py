"""Whether the steps of an attempt give the same bits when they are made again by as many workers."""

from __future__ import annotations

import os
from dataclasses import dataclass

_CUBLAS_FIXED = (":4096:8", ":16:8")  # the workspaces for which cuBLAS promises the same bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What decides whether kernels repeat their bits.

    Attributes:
        device: type of the device, such as "cpu".
        deterministic: whether torch refuses kernels that do not repeat (``use_deterministic_algorithms``).
        benchmark: whether cuDNN picks its kernels by a race.
        cublas_workspace: the variable ``CUBLAS_WORKSPACE_CONFIG``.
        threads: threads of this process that share a kernel.
    """

    device: str
    deterministic: bool
    benchmark: bool
    cublas_workspace: str
    threads: int

    @classmethod
    def now(cls, device: str) -> Kernels:
        """Those of this process."""
        import torch

        return cls(
            device=device,
            deterministic=torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled(),
            benchmark=torch.backends.cudnn.benchmark,
            cublas_workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            threads=torch.get_num_threads(),
        )


def repeatable(kernels: Kernels) -> tuple[bool, str]:
    """Whether a resume by as many workers should repeat the same bits, and why, in words."""
    if kernels.device == "cpu":
        threads = f"{kernels.threads} thread{'' if kernels.threads == 1 else 's'} a worker"
        return True, f"CPU kernels, the same bits for {threads}"
    if not kernels.deterministic:
        return False, f"torch may choose {kernels.device} kernels that do not repeat their bits"
    if kernels.benchmark:
        return False, "cuDNN picks its kernels by a race (torch.backends.cudnn.benchmark)"
    if kernels.device == "cuda" and kernels.cublas_workspace not in _CUBLAS_FIXED:
        return False, f"CUBLAS_WORKSPACE_CONFIG is none of {', '.join(_CUBLAS_FIXED)}"
    return True, "deterministic kernels, the same bits on the same kind of device"
