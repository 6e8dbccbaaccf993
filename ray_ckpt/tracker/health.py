"""Which holders answer: one that died or hangs is replaced by another one, which finds what it held.

A node whose holder does not answer cannot commit, so no save of the run would ever succeed again. Only holders that
owe an answer are asked whether they live: a call may take long, and one that hangs looks the same from here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ray_ckpt.errors import RayCkptError
from ray_ckpt.tiers.fleet import Fleet

logger = logging.getLogger(__name__)

ASK_AFTER_S = 20.0  # that a holder has owed an answer to anything
ANSWER_S = 40.0  # it has to say that it lives


class Health:
    """The holders of one run.

    Args:
        fleet: the holders.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._owing: dict[
            str, float
        ] = {}  # node to since when it owes an answer, or when it last lived
        self._asked: dict[str, tuple[Any, float]] = {}

    def look(self, owing: Iterable[str], now_s: float) -> list[str]:
        """Asks those that owe answers whether they live; ends those that hang, and returns their nodes.

        Args:
            owing: nodes with calls that have not ended.
            now_s: monotonic seconds.
        """
        nodes = set(owing)
        self._owing = {node: self._owing.get(node, now_s) for node in nodes}
        self._asked = {node: asked for node, asked in self._asked.items() if node in nodes}
        hung = []
        for node, since_s in list(self._owing.items()):
            if node in self._asked:
                if self._lives(node, now_s):
                    continue
                logger.warning(
                    "the holder on node %s does not answer; another one takes its place", node
                )
                self.forget(node)
                self._fleet.renew(node)
                hung.append(node)
            elif now_s - since_s >= ASK_AFTER_S:
                try:
                    self._asked[node] = self._fleet.post(node, "alive"), now_s
                except RayCkptError:
                    self.forget(node)  # gone, which whoever called it is told
        return hung

    def hurry(self, node: str, now_s: float) -> None:
        """A node was waited for in vain: it is asked at the next look, not only after a while."""
        self._owing[node] = now_s - ASK_AFTER_S

    def forget(self, node: str) -> None:
        """A node has another holder, or none."""
        self._owing.pop(node, None)
        self._asked.pop(node, None)

    def _lives(self, node: str, now_s: float) -> bool:
        """Whether a holder that was asked has answered, or still has time to."""
        ticket, since_s = self._asked[node]
        try:
            done, _ = self._fleet.take(ticket, 0)
        except RayCkptError:
            return False
        if done:
            del self._asked[node]
            self._owing[node] = now_s
        return done or now_s - since_s < ANSWER_S
