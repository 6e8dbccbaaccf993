"""What the tiers on the nodes need of the tracker around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ray_ckpt.checkpoint.listing import Listed
from ray_ckpt.checkpoint.manifest import Manifest
from ray_ckpt.tiers.holder import Target


class _Recorder(Protocol):
    def __call__(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """The tracker, as the tiers on the nodes see it.

    Attributes:
        record: puts an event on record.
        generation: newest attempt.
        every_steps: a tier to how many steps are between its copies.
        last_step: a tier to the step of the newest checkpoint that got there, None before the first.
        is_durable: whether a checkpoint is in the durable tier.
        is_barred: whether a checkpoint's copy in the durable tier was found bad: it is not put there again.
        seal: commits a checkpoint, whose files are all there, in the durable tier; why not, in words, if it cannot.
        promoted: told when a checkpoint is in the durable tier, and that is on record.
        is_left: whether a checkpoint belongs to a course that the run has left.
    """

    record: _Recorder
    generation: Callable[[], int]
    every_steps: Callable[[Target], int]
    last_step: Callable[[Target], int | None]
    is_durable: Callable[[str], bool]
    is_barred: Callable[[str], bool]
    seal: Callable[[Manifest], str | None]
    promoted: Callable[[str], None]
    is_left: Callable[[Listed], bool]
