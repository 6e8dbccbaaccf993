"""A session's eye on its own sanity: what the guard is given, and when an attempt must end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ray_ckpt.checkpoint.guard import Scan, with_step
from ray_ckpt.checkpoint.scan import scan_state
from ray_ckpt.config import GuardConfig
from ray_ckpt.elastic.control import Agreement
from ray_ckpt.elastic.repeatable import Kernels, repeatable


class Watch:
    """What one rank watches over.

    Args:
        guard: the options.
        rank: of this worker.
        device: of this worker.
        scaled: whether there is a gradient scaler. It looks for infinities on purpose and leaves such steps out:
            then a step's loss and gradients say nothing, and only the state is judged.
    """

    def __init__(
        self, guard: GuardConfig, *, rank: int, device: torch.device, scaled: bool
    ) -> None:
        self._guard, self._rank, self._device, self._scaled = guard, rank, device, scaled

    def scan(self, staged: Mapping[str, Any]) -> Scan:
        """Looks at the staged copy of a state; in the background."""
        return scan_state(staged, rank=self._rank, ignore=self._guard.ignore)

    def is_bad(self, grad_norm: float | None) -> bool:
        """Whether a gradient norm means trouble."""
        return grad_norm is not None and not math.isfinite(grad_norm) and not self._scaled

    def must_end(self, agreement: Agreement) -> bool:
        """Whether the attempt ends after this step; the same on all ranks."""
        bad_loss = not math.isfinite(agreement.loss) and not self._scaled
        return (agreement.trouble or bad_loss) and self._guard.on_nonfinite != "go-on"

    def report(self, found: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        """All that the guard knows of a save, for the tracker and the manifest.

        Args:
            found: in the state.
            record: line of the step, empty when there was none.
        """
        judged = {} if self._scaled else record
        report = with_step(found, loss=judged.get("loss"), grad_norm=judged.get("grad_norm"))
        return {**report, "repeatable": repeatable(Kernels.now(self._device.type))[1]}

    @property
    def bitwise_comparable(self) -> bool:
        """Whether the steps of this attempt repeat their bits."""
        return repeatable(Kernels.now(self._device.type))[0]

    @staticmethod
    def what(record: Mapping[str, Any]) -> str:
        """What was not finite in a step, in words."""
        parts = [f"loss {record.get('loss')}"]
        if record.get("grad_norm") is not None:
            parts.append(f"gradient norm {record['grad_norm']}")
        return ", ".join(parts)
