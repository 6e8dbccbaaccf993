"""How all ranks hear what the tracker says: rank 0 asks, everybody gets the answer, or the same error."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ray_ckpt.errors import RayCkptError
from ray_ckpt.tracker.client import TrackerClient


class Talk:
    """Questions that every rank asks together; for the start and the end of an attempt, not for each step.

    Args:
        tracker: on rank 0; None on the others.
        group: gloo process group of all ranks.
    """

    def __init__(self, tracker: TrackerClient | None, group: dist.ProcessGroup) -> None:
        self.tracker, self._group = tracker, group

    def ask(self, method: str, **kwargs: Any) -> Any:
        """Rank 0 calls the tracker; the others' arguments are not looked at.

        Raises:
            RayCkptError: what the tracker raised, on every rank.
        """
        box: list[Any] = [None, None]
        if self.tracker is not None:
            try:
                box[0] = self.tracker.call(method, **kwargs)
            except RayCkptError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, group=self._group)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, by rank."""
        box: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(box, value, group=self._group)
        return box

    def told(self, value: bool) -> bool:
        """What rank 0 says."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return bool(box[0])
