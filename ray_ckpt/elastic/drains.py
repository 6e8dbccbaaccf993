"""Sees that nodes will be taken away, and when: ``ray drain-node``, an autoscaler, the notice of a spot machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from ray_ckpt.tracker.departures import Drain

logger = logging.getLogger(__name__)

LOOK_S = 1.0

Look = Callable[[], Mapping[str, float | None]]


class DrainWatch:
    """Looks at the cluster again and again, in a thread: nobody's step or save waits for the answer.

    Args:
        tell: told all drains whenever they are others than before.
        look: the nodes that are being drained, and when they end.
        names: what people call these nodes.
        period_s: between looks, seconds.
    """

    def __init__(
        self,
        tell: Callable[[list[Drain]], None],
        look: Look,
        names: Callable[[], Mapping[str, str]],
        period_s: float = LOOK_S,
    ) -> None:
        self._tell, self._look, self._names = tell, look, names
        self._period_s = period_s
        self._known: dict[str, float | None] = {}
        self._names_known: dict[str, str] = {}

    def start(self) -> None:
        """Looks from now on."""
        threading.Thread(target=self._run, name="drains", daemon=True).start()

    def once(self) -> None:
        """One look; raises nothing: the next one is soon."""
        try:
            found = dict(self._look())
            if found == self._known:
                return
            if found.keys() - self._names_known.keys():
                self._names_known |= self._names()
            self._tell(
                [
                    Drain(node=node, name=self._names_known.get(node, node[:12]), deadline=deadline)
                    for node, deadline in sorted(found.items())
                ]
            )
            self._known = found
        except Exception:
            logger.warning("the cluster could not be asked which nodes will go", exc_info=True)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self.once()
            pause.wait(self._period_s)
